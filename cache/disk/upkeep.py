"""Work on a whole store from outside an engine: read, check and delete many pages, a bounded number at once."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..moves import Outcome
from ..page_keys import PageKey
from .names import PartKey, RecordKey, Stored
from .record import PageLayout, RecordError, inspect
from .store import Fetched, PageStore

Key = TypeVar("Key")

READS_IN_FLIGHT = 16
DELETES_IN_FLIGHT = 64


def check_pages(store: PageStore, keys: Iterable[PageKey]) -> Iterator[tuple[PageKey, int, str | None]]:
    """Reads every page, with all its parts: its key, the bytes read, and what is wrong with it (None: nothing), as they
    come."""
    waiting = deque[tuple[PageKey, list[PartKey], int]]()
    for key, answer in _each(store.read, keys, READS_IN_FLIGHT):
        nbytes, reason, layout = _check_record(key, *answer)
        if layout is None or not layout.parts:
            yield key, nbytes, reason
            continue
        parts = layout.parts
        ends = [0, *(part.end for part in parts)]
        if reason is None and (
            [part.first for part in parts] != ends[:-1]
            or sum(part.nbytes for part in parts) != layout.page_bytes
        ):
            reason = "header: its parts are not the whole page"
        if reason is None:
            waiting.append((key, [PartKey(key, part.first, part.end) for part in parts[1:]], nbytes))
        else:
            yield key, nbytes, reason
    for key, parts, nbytes in waiting:
        reason = None
        for part, answer in _each(store.read, parts, READS_IN_FLIGHT):
            size, problem, _ = _check_record(part, *answer)
            nbytes += size
            if problem is not None:
                reason = f"heads {part.first} to {part.end}: {problem}"
        yield key, nbytes, reason


def _check_record(
    key: RecordKey, outcome: Outcome, fetched: Fetched | None
) -> tuple[int, str | None, PageLayout | None]:
    """Bytes of a record, what is wrong with it, and what it says of itself."""
    if fetched is None:
        return 0, outcome.value, None
    record = fetched()
    try:
        found, layout, _ = inspect(record)
    except RecordError as error:
        return len(record), str(error), None
    page = key.page if isinstance(key, PartKey) else key
    if found != page:
        return len(record), f"other key: it holds page {found.key.hex()}", layout
    if isinstance(key, PartKey) and [part[:2] for part in layout.parts] != [key[1:]]:
        return len(record), "other heads than its name says", layout
    return len(record), None, layout


def delete_pages(store: PageStore, keys: Iterable[PageKey]) -> Iterator[tuple[PageKey, Outcome]]:
    """Deletes every page, about in the order given."""
    for key, (outcome,) in _each(store.delete, keys, DELETES_IN_FLIGHT):
        yield key, outcome


def list_with_sizes(store: PageStore) -> list[Stored]:
    """All pages with their sizes: where the store does not tell, one page of each namespace is read and stands for all.

    Raises StoreError.
    """
    listed = list(store.list())
    samples = {page.key.namespace: page.key for page in listed if page.nbytes is None and not page.only_parts}
    sizes = {key.namespace: nbytes for key, nbytes, _ in check_pages(store, samples.values())}
    return [
        page if page.nbytes is not None else page._replace(nbytes=sizes.get(page.key.namespace, 0))
        for page in listed
    ]


def _each(
    start: Callable[..., None], keys: Iterable[Key], in_flight: int
) -> Iterator[tuple[Key, tuple[Any, ...]]]:
    """Starts an operation of the store's for every key and yields (key, what it answered) in order of completion."""
    answers: queue.SimpleQueue[tuple[Key, tuple[Any, ...]]] = queue.SimpleQueue()
    running = 0
    for key in keys:
        if running == in_flight:
            yield answers.get()
            running -= 1
        start(key, lambda *answer, key=key: answers.put((key, answer)))
        running += 1
    for _ in range(running):
        yield answers.get()
