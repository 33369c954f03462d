"""Publishes KV events over ZeroMQ, from a thread of its own: for routers that send a prompt to where its prefix is.

    PUB     [topic, sequence (8 bytes, big-endian), payload]
    ROUTER  a request [start sequence (8 bytes)] is answered by the messages from there on that are still kept,
            [sequence, payload] each, and by [-1, b""]

The engine's thread only appends to a bounded log. A subscriber that is slow or away misses messages, which it sees by
the sequence numbers, and may ask for again. What did not even find room in the log leaves a gap in the sequence for good;
after it comes `AllBlocksCleared`, and then all that there is.
"""

# The package is optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engine.config import ConfigError
from ...engine.page_events import PageLog
from .config import KvEventsConfig
from .messages import encode_batch

logger = logging.getLogger(__name__)

POLL_MS = 20
"""Milliseconds between looks at the log: what came meanwhile is one message."""
MOST_EVENTS = 1000
"""Events of one message."""
REPLAY_BYTES = 64 << 20
"""Bytes of messages that are kept to be sent again, at most."""
LINGER_MS = 200
"""Milliseconds that the last messages get at the end."""
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence of the message that ends a replay."""


class Sockets:
    """The publisher's two, open until `close`."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Raises `ConfigError` when ZeroMQ's package is not installed or an endpoint cannot be had."""
        try:
            import zmq
        except ImportError:
            message = "kv_events: this needs ZeroMQ's package: pip install 'tierax[events]'"
            raise ConfigError(message) from None
        self._context = zmq.Context()
        self.pub = self._context.socket(zmq.PUB)
        self.pub.setsockopt(zmq.SNDHWM, config.hwm)
        self.replay = self._context.socket(zmq.ROUTER)
        # A replay is bounded by what is kept, and none of it may be dropped on the way.
        self.replay.setsockopt(zmq.SNDHWM, 0)
        self._poller = zmq.Poller()
        self._poller.register(self.replay, zmq.POLLIN)
        at = config.endpoint
        try:
            (self.pub.bind if config.binds else self.pub.connect)(at)
            if config.replay_endpoint is not None:
                at = config.replay_endpoint
                self.replay.bind(at)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"kv_events: {at}: {error.strerror}") from None

    def requested(self, timeout_ms: int) -> bool:
        """Waits for a replay request."""
        return bool(self._poller.poll(timeout_ms))

    def close(self) -> None:
        self.pub.close(LINGER_MS)
        self.replay.close(LINGER_MS)
        self._context.term()


def check_endpoints(config: KvEventsConfig, ranks: int = 1) -> None:
    """Raises `ConfigError` for what so many `Publisher`s could not open."""
    opened: list[Sockets] = []
    try:
        for rank in range(ranks):
            opened.append(Sockets(config.of_rank(rank)))
    finally:
        for sockets in opened:
            sockets.close()


class Publisher:
    """Owns the sockets and the thread: `start`, then `close`, which joins it."""

    def __init__(
        self,
        config: KvEventsConfig,
        log: PageLog,
        *,
        page_size: int,
        rank: int = 0,
        retell: Callable[[], Future[Any]],
        now: Callable[[], float],
    ) -> None:
        """`retell` has the engine's thread tell `log` everything anew. `now` is the wall clock, in seconds.

        Raises `ConfigError` as `Sockets` does.
        """
        self._config = config
        self._log = log
        self._page_size = page_size
        self._rank = rank
        self._retell = retell
        self._now = now
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._kept_bytes = 0
        self._asked: Future[Any] | None = None
        self._events = 0
        self._gaps = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._sockets = Sockets(config)

    def start(self) -> None:
        """Starts the thread, which has everything told that there is."""
        self._asked = self._retell()
        self._thread.start()

    def close(self) -> None:
        """Publishes what is in the log, and joins the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._log.close()
        self._sockets.close()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Events, messages, and gaps so far."""
        return self._events, self._sequence, self._gaps

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn(POLL_MS)
        self._publish()

    def _turn(self, timeout: int) -> None:
        # Nothing that comes from outside may end this thread.
        try:
            requested = self._sockets.requested(timeout)
            self._publish()
            if requested:
                self._answer(self._sockets.replay.recv_multipart())
        except Exception:
            logger.exception("KV events could not be published")
            self._stop.wait(1.0)

    def _publish(self) -> None:
        while (taken := self._log.take(MOST_EVENTS)).events:
            payload = encode_batch(
                taken.events,
                ts=self._now(),
                page_size=self._page_size,
                encoding=self._config.encoding,
                rank=self._rank,
            )
            self._sockets.pub.send_multipart(
                [self._config.topic.encode(), self._sequence.to_bytes(8, "big"), payload]
            )
            self._keep(payload)
            self._sequence += 1
            self._events += len(taken.events)
        if taken.lost and (self._asked is None or self._asked.done()):
            self._gaps += 1
            self._sequence += 1
            self._asked = self._retell()

    def _keep(self, payload: bytes) -> None:
        if len(self._kept) == self._kept.maxlen:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._kept.append((self._sequence, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > REPLAY_BYTES and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, frames: list[bytes]) -> None:
        """A REQ socket puts an empty frame before its request, a DEALER need not; the answer has what the request had."""
        *envelope, request = frames
        if len(frames) not in (2, 3) or len(request) != 8:
            logger.warning("a replay request must be 8 bytes, the sequence to start from")
            return
        start = int.from_bytes(request, "big")
        for sequence, payload in self._kept:
            if sequence >= start:
                self._sockets.replay.send_multipart([*envelope, sequence.to_bytes(8, "big"), payload])
        self._sockets.replay.send_multipart([*envelope, END, b""])


class Publishers(Collector):
    """A publisher for each copy of the model, started and closed together. Shows what they do as metrics, too."""

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        self._publishers = publishers

    def start(self) -> None:
        for publisher in self._publishers:
            publisher.start()

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()

    def collect(self) -> Iterator[Metric]:
        events, batches, gaps = map(sum, zip(*(one.counts for one in self._publishers), strict=True))
        yield CounterMetricFamily("tierax_kv_events", "Events of the cache published.", value=events)
        yield CounterMetricFamily("tierax_kv_event_batches", "Messages of them.", value=batches)
        yield CounterMetricFamily(
            "tierax_kv_event_gaps", "Times that the log was full, and all was told anew.", value=gaps
        )
