"""The engine's thread: commands from elsewhere, heartbeats, and an end that leaves nobody waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.fake_rig import Rig
from helpers.tiny_text_model import write_tiny_text_model
from tierax.engine.config import EngineConfig
from tierax.engine.engine import Engine
from tierax.engine.errors import EngineStopped
from tierax.engine.plan import NoTransfers, Transfers
from tierax.engine.request import Delta, Request, SamplingParams
from tierax.engine.thread import EngineThread

PROMPT = list(range(10))


class Stage:
    """A rig in the place of an engine, and the thread that runs it."""

    def __init__(self, transfers: Transfers | None = None) -> None:
        self.rig = Rig(transfers=transfers)
        self.warm = threading.Event()
        self.warm.set()
        self.warm_up_error: Exception | None = None
        self.programs_left = 0
        self.closed = False
        self.drain_left: float | None = None
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

    def _close(self, drain_timeout: float) -> None:
        self.closed = True
        self.drain_left = drain_timeout


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


def test_calls_run_in_the_engines_thread_between_steps(stage: Stage) -> None:
    stage.thread.start()
    request = stage.request(200)
    stage.thread.submit([request])
    name = stage.thread.call(lambda: threading.current_thread().name)
    assert name.result(5) == "engine"
    with pytest.raises(ZeroDivisionError):
        stage.thread.call(lambda: 1 // 0).result(5)
    assert stage.thread.alive, "a call that fails fails its caller only"
    stage.wait(request)


def test_a_call_given_up_in_time_does_not_run(stage: Stage) -> None:
    ran: list[int] = []
    stage.warm.clear()
    stage.thread.start()
    given_up, kept = stage.thread.call(lambda: ran.append(1)), stage.thread.call(lambda: ran.append(2))
    assert given_up.cancel()
    stage.warm.set()
    kept.result(5)
    assert ran == [2]


def test_no_call_is_left_without_an_answer(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    stage.warm.clear()
    stage.thread.start()
    early = stage.thread.call(lambda: 1)
    stage.warm_up_error = RuntimeError("no memory")
    stage.warm.set()
    with pytest.raises(EngineStopped):
        early.result(5)
    with pytest.raises(EngineStopped):
        stage.thread.call(lambda: 1).result(5)
    never = Stage()
    waiting = never.thread.call(lambda: 1)
    never.thread.close()
    with pytest.raises(EngineStopped):
        waiting.result(5)


class Stalled(NoTransfers):
    """A disk that never answers."""

    busy = True


@pytest.mark.parametrize("hurry", [False, True])
def test_closing_does_not_wait_for_ever_for_a_disk(hurry: bool) -> None:
    stage = Stage(transfers=Stalled())
    stage.thread.start()
    stage.thread.wait_ready()
    request = stage.request(100_000)
    request.max_total = 250
    stage.thread.submit([request])
    started = time.monotonic()
    if hurry:
        threading.Timer(0.1, stage.thread.hurry).start()
    stage.thread.close(60.0 if hurry else 0.3)
    assert 0.05 < time.monotonic() - started < 3
    stage.wait(request)
    assert not stage.thread.alive
    assert stage.closed
    assert stage.drain_left == 0
    assert stage.rig.cache.in_use == 0


def test_what_is_left_of_the_time_goes_to_the_engine(stage: Stage) -> None:
    stage.thread.start()
    stage.thread.wait_ready()
    stage.thread.close(20.0)
    assert stage.drain_left is not None
    assert 15 < stage.drain_left <= 20


def test_a_fault_of_the_device_is_told(stage: Stage) -> None:
    told = threading.Event()
    stage.thread.on_fault = told.set
    stage.thread.start()
    stage.rig.device.submit_error = RuntimeError("lost")
    request = stage.request()
    stage.thread.submit([request])
    stage.wait(request)
    assert told.wait(5)


class StallingStore:
    """A page store whose writes never end."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, *_: Any) -> None:
        self.writes += 1


def test_a_real_engine_ends_though_its_disk_has_stalled(tmp_path: Path) -> None:
    write_tiny_text_model(tmp_path / "model")
    stores: list[StallingStore] = []

    def wrap(store: Any) -> Any:
        stores.append(StallingStore(store))
        return stores[0]

    config = EngineConfig(
        model_path=str(tmp_path / "model"),
        max_num_seqs=2,
        max_num_batched_tokens=32,
        context_length=128,
        device_cache_size="8MiB",
        host_cache_size="4MiB",
        host_disk_cache_dir=str(tmp_path / "kv"),
        skip_warmup=True,
    )
    engine = Engine(config, wrap_store=wrap)
    thread = EngineThread(engine)
    thread.start()
    ended = threading.Event()
    requests = engine.make_requests(
        list(range(40)),
        SamplingParams(max_tokens=2),
        request_id="r",
        on_delta=lambda delta: ended.set() if delta.finish_reason else None,
    )
    thread.submit(requests)
    assert ended.wait(60)
    started = time.monotonic()
    thread.close(0.5)
    assert time.monotonic() - started < 4
    assert not thread.alive
    assert stores[0].writes > 0
