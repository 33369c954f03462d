"""Writes and deletes start in an order in which the last call wins and room is free before it is used."""

from __future__ import annotations

import random
import threading

from tierax.cache.disk.order import WriteOrder


class Log:
    """Operations that end when the test says so."""

    def __init__(self) -> None:
        self.order = WriteOrder()
        self.started: list[str] = []

    def submit(self, name: str, *, deletes: bool = False) -> None:
        label = f"{'delete' if deletes else 'write'} {name}"
        self.order.submit(name, lambda: self.started.append(label), deletes=deletes)

    def finish(self, name: str, *, deletes: bool = False) -> None:
        self.order.finish(name, deletes=deletes)


def test_different_names_run_at_once() -> None:
    log = Log()
    for name in "abc":
        log.submit(name)
    assert log.started == ["write a", "write b", "write c"]


def test_one_name_runs_one_after_the_other() -> None:
    log = Log()
    log.submit("a")
    log.submit("a", deletes=True)
    log.submit("a")
    assert log.started == ["write a"]
    log.finish("a")
    assert log.started == ["write a", "delete a"]
    log.finish("a", deletes=True)
    assert log.started == ["write a", "delete a", "write a"]


def test_write_waits_for_the_deletes_before_it_but_deletes_wait_for_no_write() -> None:
    log = Log()
    log.submit("a", deletes=True)
    log.submit("b", deletes=True)
    log.submit("c")
    log.submit("d", deletes=True)
    assert log.started == ["delete a", "delete b"]
    log.finish("b", deletes=True)
    assert log.started == ["delete a", "delete b"]
    log.finish("a", deletes=True)
    assert log.started == ["delete a", "delete b", "write c", "delete d"]


def test_operations_that_end_within_their_start_do_not_pile_up_on_the_stack() -> None:
    order = WriteOrder()
    done: list[int] = []
    order.submit("gate", lambda: None, deletes=True)

    def start(number: int) -> None:
        done.append(number)
        order.finish(f"n{number}")

    for number in range(5000):
        order.submit(f"n{number}", lambda number=number: start(number))
    assert done == []
    order.finish("gate", deletes=True)
    assert done == list(range(5000))


def test_many_threads_leave_nothing_behind() -> None:
    order = WriteOrder()
    ended = threading.Semaphore(0)
    running: set[str] = set()

    def submit(name: str, deletes: bool) -> None:
        def start() -> None:
            assert name not in running
            running.add(name)
            threading.Thread(target=end).start()

        def end() -> None:
            running.remove(name)
            order.finish(name, deletes=deletes)
            ended.release()

        order.submit(name, start, deletes=deletes)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(50):
            submit(rng.choice("abcdefgh"), rng.random() < 0.4)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        assert ended.acquire(timeout=20)
    for thread in threads:
        thread.join()
