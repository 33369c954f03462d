"""What processes that write to one store tell each other: a note of each, and the claim of the one that collects.

Nothing in them is a time: hosts need not agree on one. Whoever reads a note sees only whether it has changed.

    note:  magic | replica | beat | collector and round that it knows of | bytes of a record | pages
    claim: magic | holder  | beat | round | pages that are to be deleted, tails first

Integers are little endian. A checksum follows; whatever is not whole, or of another version, is nobody's note.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from ..page_keys import PageKey

NOBODY = b"\0" * 8
_NOTE = struct.Struct("<8s8sQ8sQQII")
_NOTE_MAGIC = b"TIERAXN1"
_CLAIM = struct.Struct("<8s8sQQI")
_CLAIM_MAGIC = b"TIERAXC1"
_PAGE = struct.Struct("<16s16s16sI")
_CHECKSUM = struct.Struct("<I")


class Note(NamedTuple):
    """What a replica says of itself. It is there as long as its `beat` goes on."""

    replica: bytes
    beat: int
    collector: bytes
    """The holder of the claim that it last took in; `NOBODY` so far. What that has doomed is no hit here any more, unless it
    is among the pages of this note."""
    round: int
    """Of that claim."""
    record_bytes: int
    """Of each of its pages in the store."""
    stored: frozenset[PageKey]
    """Of the store, that it has used of late or is using."""
    writing: frozenset[PageKey] = frozenset()
    """That it is writing."""


class Claim(NamedTuple):
    """Who may delete, for as long as its `beat` goes on, and what it is about to delete."""

    holder: bytes
    beat: int
    round: int
    """Grows with every list of doomed pages."""
    doomed: tuple[PageKey, ...] = ()


def pack_note(note: Note) -> bytes:
    head = _NOTE.pack(_NOTE_MAGIC, *note[:5], len(note.stored), len(note.writing))
    return _seal(head, (*note.stored, *note.writing))


def parse_note(raw: bytes) -> Note | None:
    """None for what is no whole note of this version."""
    body = _open(raw, _NOTE, _NOTE_MAGIC)
    if body is None:
        return None
    (_, replica, beat, collector, round, record_bytes, stored, writing), pages = body
    if stored + writing != len(pages):
        return None
    return Note(
        replica, beat, collector, round, record_bytes, frozenset(pages[:stored]), frozenset(pages[stored:])
    )


def pack_claim(claim: Claim) -> bytes:
    head = _CLAIM.pack(_CLAIM_MAGIC, *claim[:3], len(claim.doomed))
    return _seal(head, claim.doomed)


def parse_claim(raw: bytes) -> Claim | None:
    """None for what is no whole claim of this version."""
    body = _open(raw, _CLAIM, _CLAIM_MAGIC)
    if body is None:
        return None
    (_, holder, beat, round, count), pages = body
    return Claim(holder, beat, round, pages) if count == len(pages) else None


def _seal(head: bytes, pages: Iterable[PageKey]) -> bytes:
    body = head + b"".join(_PAGE.pack(*page) for page in pages)
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _open(raw: bytes, head: struct.Struct, magic: bytes) -> tuple[tuple, tuple[PageKey, ...]] | None:
    pages = len(raw) - head.size - _CHECKSUM.size
    if pages < 0 or pages % _PAGE.size or not raw.startswith(magic):
        return None
    body = raw[: -_CHECKSUM.size]
    if _CHECKSUM.pack(zlib.crc32(body)) != raw[-_CHECKSUM.size :]:
        return None
    return head.unpack_from(body), tuple(map(PageKey._make, _PAGE.iter_unpack(body[head.size :])))
