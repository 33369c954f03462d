"""The engine's own thread. Everything else talks to the loop through here."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .cache_control import CacheControl
from .engine import Engine
from .errors import EngineStopped
from .request import Delta, Request
from .stats import EngineStats

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.5
"""Seconds between heartbeats when there is nothing to do."""
BLOCKED_WAIT = 0.001
"""Seconds before looking again when requests wait for a transfer."""
DRAIN_TIMEOUT = 10.0
"""Seconds that writes to the disk get at the end."""

T = TypeVar("T")


class EngineThread:
    """Owns the thread that runs an engine's loop: `start`, then `close`, which joins it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.on_fault: Callable[[], None] = lambda: None
        """Called in the engine's thread after the device has lost its pages, and with them every hold."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._ready = threading.Event()
        self._asked_to_close = threading.Event()
        self._hurry = threading.Event()
        self._deadline = float("inf")
        self._calls: set[Future[Any]] = set()
        self._calls_lock = threading.Lock()
        self._ended = False
        self._faults = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._beat = engine.clock()

    def start(self) -> None:
        """Starts the thread, which warms up first."""
        self._thread.start()

    def stop(self, drain_timeout: float = DRAIN_TIMEOUT) -> None:
        """Begins what `close` does, and returns at once."""
        if not self._asked_to_close.is_set():
            self._deadline = self.engine.clock() + drain_timeout
            self._asked_to_close.set()
            self._commands.put(self._end_turns)

    def close(self, drain_timeout: float = DRAIN_TIMEOUT) -> None:
        """Aborts what runs, lets writes to the disk end within `drain_timeout` seconds, and joins the thread.

        The step in flight, or the program being compiled, is waited for.
        """
        self.stop(drain_timeout)
        if self._thread.ident is not None:
            self._thread.join()
        self._end_calls()
        self.engine.close(self._time_left())

    def hurry(self) -> None:
        """A `close` under way, or to come, waits for the disk no longer."""
        self._hurry.set()

    def submit(self, requests: list[Request]) -> None:
        """Hands over requests; their deltas come in the engine's thread."""
        self._commands.put(lambda: self._add(requests))

    def abort(self, request_ids: list[str]) -> None:
        """Ends requests; unknown and ended ids are ignored."""
        self._commands.put(lambda: self._abort(request_ids))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the engine's thread, between two steps and after warm-up.

        The future gets its result or its exception, `EngineStopped` if the thread ends before. Cancelled in time,
        `work` does not run.
        """
        future: Future[T] = Future()
        with self._calls_lock:
            if self._ended:
                future.set_exception(_stopped())
                return future
            self._calls.add(future)
        self._commands.put(lambda: self._answer(future, work))
        return future

    @property
    def replicas(self) -> list[EngineThread]:
        """The threads of all copies of the model: this one."""
        return [self]

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def cache_control(self, pin_share: float) -> CacheControl:
        """What operators ask of the engine's cache. Once: it hears of the device's faults."""
        control = CacheControl(self.engine, pin_share)
        self.on_fault = control.restore_pins
        return control

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Warm-up is done."""
        return self._ready.is_set()

    def wait_ready(self) -> None:
        """Blocks until the engine is warm. Raises RuntimeError if its thread ended before."""
        while not self._ready.wait(0.05):
            if not self.alive:
                raise RuntimeError("the engine's thread ended during warm-up; its log says why")

    def heartbeat_age(self) -> float:
        """Seconds since the loop last came round."""
        return self.engine.clock() - self._beat

    def _run(self) -> None:
        try:
            self.engine.warm_up(stopped=self._asked_to_close.is_set)
            if not self._asked_to_close.is_set():
                self._ready.set()
            while not self._closing:
                self._turn()
            self._obey(block_for=0.0)
            self._wind_up()
        except Exception:
            logger.exception("the engine's loop ended by an error")
        finally:
            self._end_calls()

    def _turn(self) -> None:
        loop = self.engine.loop
        self._beat = self.engine.clock()
        self._obey(block_for=IDLE_WAIT if loop.idle else 0.0)
        if self._closing:
            return
        if loop.idle:
            loop.tend()
            return
        waits = not loop.step()
        if loop.stats.faults > self._faults:
            self._faults = loop.stats.faults
            self.on_fault()
        if waits:
            self._obey(block_for=BLOCKED_WAIT)

    def _obey(self, block_for: float) -> None:
        """Carries out the commands that have come; waits for the first one if `block_for` is not 0."""
        try:
            command = self._commands.get(block=block_for > 0, timeout=block_for or None)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            pass

    def _add(self, requests: list[Request]) -> None:
        for request in requests:
            try:
                self.engine.loop.add(request)
            except ValueError as error:
                # A caller's mistake must not end everybody's engine.
                request.finish_reason = "error"
                if request.on_delta is not None:
                    request.on_delta(Delta(request, [], "", [], finish_reason="error", error=str(error)))

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.engine.loop.abort(request_id)

    def _answer(self, future: Future[T], work: Callable[[], T]) -> None:
        with self._calls_lock:
            self._calls.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _end_calls(self) -> None:
        with self._calls_lock:
            self._ended = True
            calls, self._calls = self._calls, set()
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(_stopped())

    def _end_turns(self) -> None:
        self._closing = True

    def _wind_up(self) -> None:
        loop = self.engine.loop
        self._abort(loop.request_ids)
        # The device ends what it has begun; a disk may have stalled for ever.
        while loop.step():
            pass
        while not loop.idle and self._time_left() > 0:
            if not loop.step():
                time.sleep(BLOCKED_WAIT)

    def _time_left(self) -> float:
        return 0.0 if self._hurry.is_set() else max(self._deadline - self.engine.clock(), 0.0)


def _stopped() -> EngineStopped:
    return EngineStopped("the engine's thread has ended")
