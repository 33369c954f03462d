"""The engine's own thread. Everything else talks to the loop through here."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from .engine import Engine
from .request import Delta, Request

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.5
"""Seconds between heartbeats when there is nothing to do."""
BLOCKED_WAIT = 0.001
"""Seconds before looking again when requests wait for a transfer."""


class EngineThread:
    """Owns the thread that runs an engine's loop: `start`, then `close`, which joins it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._ready = threading.Event()
        self._asked_to_close = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._beat = engine.clock()

    def start(self) -> None:
        """Starts the thread, which warms up first."""
        self._thread.start()

    def close(self) -> None:
        """Aborts what runs and joins the thread; the step in flight, or the program being compiled, is waited for."""
        self._asked_to_close.set()
        if self._thread.ident is not None:
            self._commands.put(self._stop)
            self._thread.join()
        self.engine.close()

    def submit(self, requests: list[Request]) -> None:
        """Hands over requests; their deltas come in the engine's thread."""
        self._commands.put(lambda: self._add(requests))

    def abort(self, request_ids: list[str]) -> None:
        """Ends requests; unknown and ended ids are ignored."""
        self._commands.put(lambda: self._abort(request_ids))

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
            self._abort_all()
        except Exception:
            logger.exception("the engine's loop ended by an error")

    def _turn(self) -> None:
        loop = self.engine.loop
        self._beat = self.engine.clock()
        self._obey(block_for=IDLE_WAIT if loop.idle else 0.0)
        if not loop.idle and not self._closing and not loop.step():
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

    def _stop(self) -> None:
        self._closing = True

    def _abort_all(self) -> None:
        loop = self.engine.loop
        self._abort(loop.request_ids)
        while not loop.idle:
            loop.step()
