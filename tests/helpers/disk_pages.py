"""Small pages for tests of the disk tier, and a store whose answers are waited for."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tierax.cache.disk.names import page_name
from tierax.cache.disk.record import PAYLOAD_OFFSET, PageLayout, pack
from tierax.cache.disk.store import PageStore
from tierax.cache.moves import Outcome
from tierax.cache.page_keys import PageKey, chain, namespace_digest

LAYOUT = PageLayout((2, 16, 3, 8), "float32")
NAMESPACE = namespace_digest({"model": "tiny"})
OTHER_NAMESPACE = namespace_digest({"model": "tiny"}, salt=b"tenant")
WAIT_S = 30.0


def sequence(pages: int, start: bytes = b"", namespace: bytes = NAMESPACE) -> list[PageKey]:
    """The keys of a sequence of pages; different `start`s share nothing."""
    keys = chain(namespace, [start + page.to_bytes(4, "little") for page in range(pages)])
    return [PageKey(namespace, key, keys[i - 1] if i else namespace, i) for i, key in enumerate(keys)]


def payload(key: PageKey) -> bytes:
    """Bytes that belong to that page only."""
    return hashlib.shake_128(key.key).digest(LAYOUT.nbytes)


def record(key: PageKey) -> bytes:
    return pack(key, LAYOUT, payload(key))


def answer(operation: Callable[..., None], *arguments: Any) -> Any:
    """What an asynchronous operation of a store answers: the outcome, or (outcome, record) of a read."""
    (result,) = answers([(operation, *arguments)])
    return result


def answers(calls: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The answers of operations that are all in flight at once, in order of the calls; each must answer exactly once."""
    calls = list(calls)
    results: list[list[Any]] = [[] for _ in calls]
    waiting = threading.Semaphore(0)

    def done(place: int, *result: Any) -> None:
        result = tuple(part() if callable(part) else part for part in result)
        results[place].append(result[0] if len(result) == 1 else result)
        waiting.release()

    for place, (operation, *arguments) in enumerate(calls):
        operation(*arguments, lambda *result, place=place: done(place, *result))
    for _ in calls:
        assert waiting.acquire(timeout=WAIT_S), "no answer"
    assert all(len(result) == 1 for result in results), "more than one answer"
    return [result[0] for result in results]


def read_into(store: PageStore, key: PageKey, payload_bytes: int = LAYOUT.nbytes) -> tuple[Outcome, bytes]:
    """The outcome of a read into memory of the caller's, header and payload apart, and what is there afterwards."""
    buffers = bytearray(b"?" * PAYLOAD_OFFSET), bytearray(b"?" * payload_bytes)
    outcome = answer(store.read_into, key, tuple(map(memoryview, buffers)))
    return outcome, b"".join(buffers)


def fill(store: PageStore, keys: Iterable[PageKey]) -> None:
    """Stores good records."""
    outcomes = answers((store.write, key, record(key)) for key in keys)
    assert all(outcome is Outcome.OK for outcome in outcomes)


def file_of(store: PageStore, key: PageKey) -> Path:
    assert store.local is not None
    return store.local / page_name(key)
