"""Several copies of a model in one process, each an engine with devices, cache and thread of its own, run as one.

What they have in common is read once (files, weights) or kept once (tokenizer, disk cache); a router sends each request
to one of them. `Replicas` has the face of `thread.EngineThread`, so that who serves need not know how many there are.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from typing import Any, TypeVar

from .cache_control import CacheControl
from .config import EngineConfig
from .engine import Engine
from .errors import EngineStopped
from .replica_control import ReplicaControl
from .request import Delta, Request
from .router import PageView, Router, Visit
from .stats import EngineStats, total
from .thread import DRAIN_TIMEOUT, EngineThread

LOOK = 0.05
"""Seconds between looks at the warm-up."""

T = TypeVar("T")


def load_thread(config: EngineConfig, **options: Any) -> EngineThread | Replicas:
    """The engine that `config` describes, or as many as it says, loaded but not started. Raises what `Engine` does.

    `options` are those of `Engine`.
    """
    if config.dp_size == 1:
        return EngineThread(Engine(config, **options))
    engines = [Engine(config, **options)]
    try:
        while len(engines) < config.dp_size:
            engines.append(Engine(config, first=engines[0], replica=len(engines), **options))
    except BaseException:
        for engine in reversed(engines):
            engine.close(0.0)
        raise
    return Replicas(engines)


class Replicas:
    """Owns a thread for each engine, and the router before them: `start`, then `close`, which joins all threads."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engine = engines[0]
        """The first one: for what is the same in all, and to make requests."""
        self.replicas = [EngineThread(engine) for engine in engines]
        views = [PageView() for _ in engines]
        for engine, view in zip(engines, views, strict=True):
            engine.cache.tiers.listen(view)
        self.router = Router(views, self.engine.cache.page_size)
        # What concerns all copies waits for their threads, and so needs one that is none of them.
        self._desk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replicas")

    @property
    def stats(self) -> EngineStats:
        """The sum of all."""
        return total([thread.engine.stats for thread in self.replicas])

    def cache_control(self, pin_share: float) -> CacheControl:
        """Of all their caches as one. Once."""
        return ReplicaControl(self.replicas, pin_share)

    def start(self) -> None:
        """Starts the threads, which warm up first."""
        for thread in self.replicas:
            thread.start()

    def warm_up(self, progress: Callable[[Iterable[None]], Iterable[None]] = iter) -> None:
        """Starts the threads and waits until all are ready. Raises RuntimeError if one ended before."""
        self.start()
        try:
            for _ in progress(self._programs()):
                pass
            self.wait_ready()
        except BaseException:
            self.close(0.0)
            raise

    def _programs(self) -> Iterator[None]:
        """One after the other, as they become ready."""
        done = 0
        while self.alive and not self.ready:
            ready = self.stats.warm_programs
            yield from repeat(None, ready - done)
            done = ready
            time.sleep(LOOK)
        yield from repeat(None, self.stats.warm_programs - done)

    def close(self, drain_timeout: float = DRAIN_TIMEOUT) -> None:
        """Aborts what runs, lets writes to the disk end within `drain_timeout` seconds, and joins the threads."""
        for thread in self.replicas:
            thread.stop(drain_timeout)
        # The first one owns what they have in common.
        for thread in reversed(self.replicas):
            thread.close()
        self._desk.shutdown()

    def hurry(self) -> None:
        """A `close` under way, or to come, waits for the disk no longer."""
        for thread in self.replicas:
            thread.hurry()

    def submit(self, requests: list[Request]) -> None:
        """Hands over requests, each to the copy that is best for it; their deltas come in that one's thread."""
        names: dict[tuple[bytes, bytes], list[bytes]] = {}
        parts: list[list[Request]] = [[] for _ in self.replicas]
        for request in requests:
            # The choices of one prompt have its names in common.
            prompt = request.namespace, request.tokens.tobytes()
            if prompt not in names:
                names[prompt] = self._page_keys(request.namespace, request.tokens)
            visit = self.router.route(names[prompt], len(request.tokens))
            self._follow(request, visit)
            parts[visit.replica].append(request)
        for thread, part in zip(self.replicas, parts, strict=True):
            if part:
                thread.submit(part)

    def abort(self, request_ids: list[str]) -> None:
        """Ends requests; unknown and ended ids are ignored."""
        for thread in self.replicas:
            thread.abort(request_ids)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` after every copy has come round, in a thread that may wait for theirs.

        The future gets its result or its exception, `EngineStopped` if a copy's thread has ended.
        """
        try:
            return self._desk.submit(self._after_all, work)
        except RuntimeError:
            future: Future[T] = Future()
            future.set_exception(EngineStopped("the engine's threads have ended"))
            return future

    @property
    def alive(self) -> bool:
        """All threads run: a server that has lost one copy is to be started anew."""
        return all(thread.alive for thread in self.replicas)

    @property
    def ready(self) -> bool:
        """All have warmed up."""
        return all(thread.ready for thread in self.replicas)

    def wait_ready(self) -> None:
        """Blocks until all are warm. Raises RuntimeError if a thread ended before."""
        for thread in self.replicas:
            thread.wait_ready()

    def heartbeat_age(self) -> float:
        """Seconds since the last of the loops came round."""
        return max(thread.heartbeat_age() for thread in self.replicas)

    def _page_keys(self, namespace: bytes, tokens: array[int]) -> list[bytes]:
        cache = self.engine.cache
        if not cache.enabled:
            return []
        return [name.key for name in cache.page_names(namespace, tokens, len(tokens) // cache.page_size)]

    def _follow(self, request: Request, visit: Visit) -> None:
        """Notices the end of a request, before its caller does."""
        told = request.on_delta

        def hear(delta: Delta) -> None:
            if delta.finish_reason is not None:
                self.router.end(visit)
            if told is not None:
                told(delta)

        request.on_delta = hear

    def _after_all(self, work: Callable[[], T]) -> T:
        for come in [thread.call(lambda: None) for thread in self.replicas]:
            come.result()
        return work()
