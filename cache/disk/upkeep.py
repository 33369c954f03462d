"""Work on a whole store from outside an engine: read, check and delete many pages, a bounded number at once."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..moves import Outcome
from ..page_keys import PageKey
from .names import Stored
from .record import RecordError, inspect
from .store import PageStore

READS_IN_FLIGHT = 16
DELETES_IN_FLIGHT = 64


def check_pages(store: PageStore, keys: Iterable[PageKey]) -> Iterator[tuple[PageKey, int, str | None]]:
    """Reads every page: its key, the bytes read, and what is wrong with it (None: nothing), as they come."""
    for key, (outcome, fetched) in _each(store.read, keys, READS_IN_FLIGHT):
        if fetched is None:
            yield key, 0, outcome.value
            continue
        record = fetched()
        try:
            found = inspect(record)[0]
            yield key, len(record), None if found == key else f"other key: it holds page {found.key.hex()}"
        except RecordError as error:
            yield key, len(record), str(error)


def delete_pages(store: PageStore, keys: Iterable[PageKey]) -> Iterator[tuple[PageKey, Outcome]]:
    """Deletes every page, about in the order given."""
    for key, (outcome,) in _each(store.delete, keys, DELETES_IN_FLIGHT):
        yield key, outcome


def list_with_sizes(store: PageStore) -> list[Stored]:
    """All pages with their sizes: where the store does not tell, one page of each namespace is read and stands for all.

    Raises StoreError.
    """
    listed = list(store.list())
    samples = {page.key.namespace: page.key for page in listed if page.nbytes is None}
    sizes = {key.namespace: nbytes for key, nbytes, _ in check_pages(store, samples.values())}
    return [
        page if page.nbytes is not None else Stored(page.key, sizes[page.key.namespace]) for page in listed
    ]


def _each(
    start: Callable[..., None], keys: Iterable[PageKey], in_flight: int
) -> Iterator[tuple[PageKey, tuple[Any, ...]]]:
    """Starts an operation of the store's for every key and yields (key, what it answered) in order of completion."""
    answers: queue.SimpleQueue[tuple[PageKey, tuple[Any, ...]]] = queue.SimpleQueue()
    running = 0
    for key in keys:
        if running == in_flight:
            yield answers.get()
            running -= 1
        start(key, lambda *answer, key=key: answers.put((key, answer)))
        running += 1
    for _ in range(running):
        yield answers.get()
