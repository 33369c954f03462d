"""How pages are called in the store.

    v1/index                                                  the index's snapshot: what was used last
    v1/fleet/claim                                            who collects, where several processes write (fleet.py)
    v1/fleet/<replica>                                        what a process uses just now
    v1/mark-<any>                                             left for a moment, to see whether others have this store
    v1/<namespace>/namespace.json                             what the namespace is, for people
    v1/<namespace>/<key's first byte>/<key>.<parent>.<depth>  one page (see record.py); all in hex, the depth decimal
    v1/<namespace>/<...>/<key>.<parent>.<depth>.<first>-<end> KV heads [first, end) of that page, where it is in parts

A page's name says all that the index must know, so a listing rebuilds it. A part without its page is nothing. Any other
name is not ours.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..page_keys import KEY_BYTES, PageKey

ROOT = "v1/"
INDEX_NAME = ROOT + "index"
MARKS = ROOT + "mark-"
FLEET = ROOT + "fleet/"
CLAIM_NAME = FLEET + "claim"
REPLICA_BYTES = 8
"""Of the random id of a process that shares a store."""

_KEY = f"([0-9a-f]{{{2 * KEY_BYTES}}})"
_NUMBER = "(0|[1-9][0-9]{0,8})"
_PAGE = re.compile(rf"v1/{_KEY}/([0-9a-f]{{2}})/{_KEY}\.{_KEY}\.{_NUMBER}")
_PART = re.compile(rf"(.*)\.{_NUMBER}-{_NUMBER}")
_REPLICA = re.compile(rf"{FLEET}([0-9a-f]{{{2 * REPLICA_BYTES}}})")
_DESCRIPTION = re.compile(rf"v1/{_KEY}/namespace\.json")


class Stored(NamedTuple):
    """A page found in the store."""

    key: PageKey
    nbytes: int | None
    """Bytes of its record, or records; None where the store does not tell (object stores)."""
    only_parts: bool = False
    """There are parts of it, but not the record of the page: it was not written to its end, or is being so."""


class PartKey(NamedTuple):
    """A record that has KV heads `[first, end)` of a page, and is not the page's own."""

    page: PageKey
    first: int
    end: int


RecordKey = PageKey | PartKey


def record_name(key: RecordKey) -> str:
    """What a page, or a part of one, is called."""
    if isinstance(key, PartKey):
        return f"{page_name(key.page)}.{key.first}-{key.end}"
    return page_name(key)


def page_name(key: PageKey) -> str:
    digits = key.key.hex()
    return f"{ROOT}{key.namespace.hex()}/{digits[:2]}/{digits}.{key.parent.hex()}.{key.depth}"


def parse_page_name(name: str) -> PageKey | None:
    """The page of that name; None for anything that `page_name` would not have said."""
    match = _PAGE.fullmatch(name)
    if match is None or not match[3].startswith(match[2]):
        return None
    namespace, key, parent = (bytes.fromhex(match[group]) for group in (1, 3, 4))
    return PageKey(namespace, key, parent, int(match[5]))


def parse_part_name(name: str) -> PartKey | None:
    """The part of that name; None for anything else."""
    match = _PART.fullmatch(name) if "-" in name else None
    page = None if match is None else parse_page_name(match[1])
    if match is None or page is None:
        return None
    return PartKey(page, int(match[2]), int(match[3]))


def description_name(namespace: bytes) -> str:
    return f"{ROOT}{namespace.hex()}/namespace.json"


def parse_description_name(name: str) -> bytes | None:
    """The namespace that this name describes."""
    match = _DESCRIPTION.fullmatch(name)
    return None if match is None else bytes.fromhex(match[1])


def replica_name(replica: bytes) -> str:
    """Where a replica keeps its note."""
    return FLEET + replica.hex()


def parse_replica_name(name: str) -> bytes | None:
    """The replica whose note has this name."""
    match = _REPLICA.fullmatch(name)
    return None if match is None else bytes.fromhex(match[1])
