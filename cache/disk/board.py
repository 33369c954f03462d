"""Where replicas leave notes for each other: the store itself. All waiting is done here, in threads that may wait."""

from __future__ import annotations

import logging
from collections.abc import Callable

import tensorstore as ts

from ..moves import Outcome
from ..page_keys import PageKey
from .fleet import News, Orders
from .names import CLAIM_NAME, FLEET, parse_replica_name, replica_name
from .notes import Claim, Note, pack_claim, pack_note, parse_claim, parse_note
from .outcomes import PATIENCE_S
from .store import PageStore
from .upkeep import DELETES_IN_FLIGHT, delete_pages

_log = logging.getLogger(__name__)

_EVERYTHING = ts.KvStore.KeyRange(FLEET, FLEET[:-1] + "0")
"""All names that start with `FLEET`: "0" follows "/"."""


class Board:
    """Of one replica; used by one thread at a time. `clock` counts seconds, `lease` is of them."""

    def __init__(self, store: PageStore, *, lease: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._papers = store.papers
        self._kv = store.papers.kv
        self._lease = lease
        self._clock = clock
        self._generations: dict[bytes, bytes] = {}
        """Of the notes as they were last read."""
        self._notes: dict[bytes, Note] = {}

    def read(self, deleted: tuple[PageKey, ...] = ()) -> News:
        """Everything that is there now; `deleted` is handed on. Raises StoreError."""
        began = self._clock()
        with self._papers.as_store_error():
            # The claim first: whoever has acknowledged it has done so in the notes, or will.
            raw, generation = self._get(CLAIM_NAME)
            self._read_notes()
        claim = None if raw is None else parse_claim(raw)
        return News(began, self._clock(), dict(self._notes), claim, generation, deleted)

    def clear(self) -> None:
        """Removes all notes and the claim; whoever lives writes again. Raises StoreError."""
        with self._papers.as_store_error():
            self._kv.delete_range(_EVERYTHING).result(timeout=PATIENCE_S)

    def carry_out(self, orders: Orders, generation: bytes) -> tuple[PageKey, ...]:
        """Does what `Fleet.turn` said of news with this `generation` of the claim; returns which pages are deleted. Raises
        StoreError."""
        with self._papers.as_store_error():
            self._put(replica_name(orders.note.replica), pack_note(orders.note))
            began = self._clock()
            claimed = orders.claim is not None and self._claim(orders.claim, generation)
        for replica in orders.bury:
            self._bury(replica, always=replica == orders.note.replica)
        return self._delete(orders.delete, began + self._lease / 2) if claimed else ()

    def _delete(self, keys: tuple[PageKey, ...], deadline: float) -> tuple[PageKey, ...]:
        """Deletes while it is certain that nobody else collects, in portions: tails before heads."""
        gone: list[PageKey] = []
        for first in range(0, len(keys), DELETES_IN_FLIGHT):
            if self._clock() >= deadline:
                _log.warning("disk cache %s: deleting takes too long; it goes on later", self._store.url)
                break
            portion = keys[first : first + DELETES_IN_FLIGHT]
            outcomes = dict(delete_pages(self._store, portion))
            gone += [key for key in portion if outcomes[key] in (Outcome.OK, Outcome.MISSING)]
        return tuple(gone)

    def _read_notes(self) -> None:
        listed = self._kv.list(_EVERYTHING).result(timeout=PATIENCE_S)
        replicas = {replica for name in listed if (replica := parse_replica_name(name.decode())) is not None}
        for replica in set(self._notes) - replicas:
            self._notes.pop(replica, None)
            self._generations.pop(replica, None)
        futures = {
            replica: self._kv.read(replica_name(replica), if_not_equal=self._generations.get(replica))
            for replica in replicas
        }
        for replica, future in futures.items():
            found = future.result(timeout=PATIENCE_S)
            if found.state == "value" and (note := parse_note(found.value)) is not None:
                self._notes[replica] = note
                self._generations[replica] = found.stamp.generation
            elif found.state == "missing":
                self._notes.pop(replica, None)
                self._generations.pop(replica, None)

    def _claim(self, claim: Claim, generation: bytes) -> bool:
        stamp = self._kv.write(CLAIM_NAME, pack_claim(claim), if_equal=generation)
        # An empty generation says that the condition did not hold.
        return bool(stamp.result(timeout=PATIENCE_S).generation)

    def _bury(self, replica: bytes, *, always: bool) -> None:
        """Not if it has come back to life meanwhile. A note that stays is no harm."""
        generation = None if always else self._generations.get(replica)
        try:
            self._kv.write(replica_name(replica), None, if_equal=generation).result(timeout=PATIENCE_S)
        except Exception as error:
            _log.debug("the note of replica %s stays: %s", replica.hex(), error)

    def _get(self, name: str) -> tuple[bytes | None, bytes]:
        found = self._kv.read(name).result(timeout=PATIENCE_S)
        return (found.value if found.state == "value" else None), found.stamp.generation

    def _put(self, name: str, value: bytes) -> None:
        self._kv.write(name, value).result(timeout=PATIENCE_S)
