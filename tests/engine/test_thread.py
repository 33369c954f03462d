"""The engine's thread: commands from elsewhere, heartbeats, and an end that leaves nobody waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from helpers.fake_executor import Rig
from tierax.engine.engine import Engine
from tierax.engine.request import Delta, Request
from tierax.engine.thread import EngineThread

PROMPT = list(range(10))


class Stage:
    """A rig in the place of an engine, and the thread that runs it."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.warm = threading.Event()
        self.warm.set()
        self.warm_up_error: Exception | None = None
        self.programs_left = 0
        self.closed = False
        self.ended: dict[str, threading.Event] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.threads: set[str] = set()
        engine = SimpleNamespace(
            loop=self.rig.loop, clock=time.monotonic, warm_up=self._warm_up, close=self._close
        )
        self.thread = EngineThread(cast(Engine, engine))

    def request(self, max_tokens: int = 5, **options: object) -> Request:
        request = self.rig.request(PROMPT, max_tokens, **options)  # pyright: ignore[reportArgumentType]
        ended = self.ended[request.id] = threading.Event()
        deltas = self.deltas[request.id] = []

        def on_delta(delta: Delta) -> None:
            self.threads.add(threading.current_thread().name)
            deltas.append(delta)
            if delta.finish_reason is not None:
                ended.set()

        request.on_delta = on_delta
        return request

    def wait(self, *requests: Request) -> None:
        for request in requests:
            assert self.ended[request.id].wait(5), f"{request.id} never ended"

    def _warm_up(self, *, stopped: Callable[[], bool]) -> None:
        self.warm.wait(5)
        if self.warm_up_error is not None:
            raise self.warm_up_error
        while self.programs_left and not stopped():
            time.sleep(0.01)
            self.programs_left -= 1

    def _close(self) -> None:
        self.closed = True


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.warm.set()
    if not stage.closed:
        stage.thread.close()
    assert not stage.thread.alive


def test_requests_run_in_the_thread_and_end_there(stage: Stage) -> None:
    stage.thread.start()
    stage.thread.wait_ready()
    requests = [stage.request(seed=n) for n in range(6)]
    stage.thread.submit(requests[:4])
    stage.thread.submit(requests[4:])
    stage.wait(*requests)
    assert stage.threads == {"engine"}
    for request in requests:
        assert len(stage.deltas[request.id]) == 5


def test_what_comes_during_warm_up_runs_after_it(stage: Stage) -> None:
    stage.warm.clear()
    stage.thread.start()
    request = stage.request()
    stage.thread.submit([request])
    assert stage.thread.alive
    assert not stage.thread.ready
    assert not stage.ended[request.id].wait(0.05)
    stage.warm.set()
    stage.wait(request)
    assert stage.thread.ready


def test_an_abort_ends_a_request_and_spares_the_rest(stage: Stage) -> None:
    stage.thread.start()
    long, short = stage.request(200), stage.request(5)
    stage.thread.submit([long, short])
    stage.thread.abort([long.id, "unknown"])
    stage.wait(long, short)
    assert (long.finish_reason, short.finish_reason) == ("abort", "length")
    stage.thread.abort([long.id])
    again = stage.request()
    stage.thread.submit([again])
    stage.wait(again)


def test_closing_aborts_what_runs_and_joins(stage: Stage) -> None:
    stage.thread.start()
    stage.thread.wait_ready()
    requests = [stage.request(100_000, seed=n) for n in range(3)]
    for request in requests:
        request.max_total = 250
    stage.thread.submit(requests)
    stage.thread.close()
    stage.wait(*requests)
    assert stage.closed
    assert not stage.thread.alive
    assert stage.rig.loop.idle
    stage.rig.cache.check()


def test_closing_a_thread_that_was_never_started(stage: Stage) -> None:
    stage.thread.close()
    assert stage.closed


def test_a_failed_warm_up_is_told_to_who_waits(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    stage.warm_up_error = RuntimeError("no memory")
    stage.thread.start()
    with pytest.raises(RuntimeError, match="ended during warm-up"):
        stage.thread.wait_ready()
    assert not stage.thread.alive
    assert "no memory" in caplog.text


def test_closing_does_not_wait_for_the_whole_warm_up(stage: Stage) -> None:
    stage.programs_left = 10_000
    stage.thread.start()
    stage.thread.close()
    assert stage.programs_left > 9_000
    assert not stage.thread.ready
    assert stage.closed


def test_an_idle_engine_shows_a_sign_of_life(stage: Stage) -> None:
    stage.thread.start()
    stage.thread.wait_ready()
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        time.sleep(0.05)
        assert stage.thread.heartbeat_age() < 1
    assert stage.thread.alive


def test_an_id_in_use_ends_the_newcomer_not_the_engine(stage: Stage) -> None:
    stage.thread.start()
    stage.thread.wait_ready()
    release = threading.Event()
    first = stage.request(50, id="same")
    step = stage.rig.loop.step
    stage.rig.loop.step = lambda: release.wait(5) and step()  # pyright: ignore[reportAttributeAccessIssue]
    stage.thread.submit([first])
    ended_first, deltas_first = stage.ended["same"], stage.deltas["same"]
    second = stage.request(5, id="same")
    ended_second, deltas_second = stage.ended["same"], stage.deltas["same"]
    stage.thread.submit([second])
    release.set()
    assert ended_second.wait(5)
    assert ended_first.wait(5)
    assert deltas_second[-1].finish_reason == "error"
    assert "'same'" in (deltas_second[-1].error or "")
    assert deltas_first[-1].finish_reason == "length"
    after = stage.request()
    stage.thread.submit([after])
    stage.wait(after)
