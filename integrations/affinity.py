"""Remembers which replica has seen which beginning of a prompt. Knows neither Ray nor what a replica is."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator

CHUNK = 256
"""Bytes of a prompt's text by which beginnings are told apart."""


class PrefixAffinity:
    """A bounded memory: prompt text in chunks -> the replica that last had it. The least recently used is forgotten."""

    def __init__(self, capacity: int = 100_000) -> None:
        """`capacity`: chunks that are remembered."""
        self._capacity = capacity
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def home(self, key: bytes, replicas: Collection[str]) -> str | None:
        """The replica among these that has seen the longest beginning of `key`; None if none has seen any."""
        found = None
        for name in _chunks(key):
            replica = self._homes.get(name)
            if replica is None:
                break
            if replica in replicas:
                found = replica
        return found

    def note(self, key: bytes, replica: str) -> None:
        """A request with this beginning went to `replica`."""
        for name in _chunks(key):
            self._homes[name] = replica
            self._homes.move_to_end(name)
        while len(self._homes) > self._capacity:
            self._homes.popitem(last=False)


def _chunks(key: bytes) -> Iterator[bytes]:
    """A name for each beginning of whole chunks; the whole of a shorter text counts as one."""
    state = hashlib.sha256()
    for at in range(0, max(len(key) - CHUNK + 1, 1), CHUNK):
        state.update(key[at : at + CHUNK])
        yield state.digest()[:16]
