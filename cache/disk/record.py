"""A page as one value of the disk store: a header that says what the page is, a checksum, and the page's bytes.

    0       8         12            16              24         32                      4096
    | magic | version | meta length | payload bytes | checksum | meta (JSON), zeros ... | payload ... |

Integers are little endian. The checksum (XXH3, 64 bits) covers everything but itself. The payload starts at a fixed
offset of 4 KiB, so that it stays aligned to memory pages and disk blocks.

Several processes that run one model hold some KV heads each, and write a page in as many parts. The first is the page's
record, which lists all of them; each of the others is a record of its own, written before.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..page_keys import PageKey

MAGIC = b"TIERAXKV"
VERSION = 1
PAYLOAD_OFFSET = 4096
_FIXED = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")
_META_OFFSET = _FIXED.size + _CHECKSUM.size


class RecordError(Exception):
    """A record that must not be used, with the reason."""


class Part(NamedTuple):
    """Some KV heads of a page, `[first, end)` in the model's order, in all layers and tokens."""

    first: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class PageLayout:
    """How the bytes of a page are to be read: row-major `shape` (device-pool order, page first left away) of `dtype`.

    `dtype` is a name of NumPy's or ml_dtypes', e.g. `float32`, `bfloat16`, `float8_e4m3fn`, `uint8`. A page whose bytes
    are no plain array (scales beside values) is `(nbytes,)` of `uint8`.
    """

    shape: tuple[int, ...]
    dtype: str

    parts: tuple[Part, ...] = ()
    """Of a record that has not got all of the page: its own part, and behind that, in the page's record, those that have
    records of their own. Empty for a whole page."""

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of the whole page."""
        return math.prod(self.shape) * _itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, header left out."""
        return self.parts[0].nbytes if self.parts else self.page_bytes

    @cached_property
    def description(self) -> str:
        """The end of a header's JSON."""
        parts: list[dict[str, Any]] = [{"heads": part[:2], "bytes": part.nbytes} for part in self.parts[1:]]
        # What is in this record has an offset.
        heads = self.parts[0][:2] if self.parts else "all"
        parts.insert(0, {"heads": heads, "offset": 0, "bytes": self.nbytes})
        fields = {"shape": self.shape, "dtype": self.dtype, "parts": parts}
        return json.dumps(fields, separators=(",", ":"))[1:]

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record: what a page takes on disk, unless it is in parts."""
        return PAYLOAD_OFFSET + self.nbytes


def pack(key: PageKey, layout: PageLayout, payload: memoryview | np.ndarray | bytes) -> bytes:
    """The record of a page. `payload` is C-contiguous, of any shape and dtype, `layout.nbytes` long in all.

    One pass for the checksum and one for the copy. Raises ValueError when the payload's size is not the layout's.
    """
    data = _flat(payload)
    if data.nbytes != layout.nbytes:
        raise ValueError(f"a page of {_plain(layout)} has {layout.nbytes} bytes, not {data.nbytes}")
    fixed, meta = _head(key, layout)
    if len(meta) > PAYLOAD_OFFSET - _META_OFFSET:
        raise ValueError(f"the description of a page takes {len(meta)} bytes, more than its header holds")
    meta = meta.ljust(PAYLOAD_OFFSET - _META_OFFSET, b"\0")
    return b"".join((fixed, _CHECKSUM.pack(_checksum(fixed, meta, data)), meta, data))


def unpack(record: bytes | memoryview, key: PageKey, layout: PageLayout) -> memoryview:
    """The payload, a flat view of bytes into `record`, once it is certain that it is this page in this layout.

    Raises RecordError with the reason: length, magic, version, checksum, another key, another layout.
    """
    data = _flat(record)
    verify(data[:PAYLOAD_OFFSET], data[PAYLOAD_OFFSET:], key, layout)
    return data[PAYLOAD_OFFSET:]


def verify(header: memoryview | bytes, payload: memoryview, key: PageKey, layout: PageLayout) -> None:
    """Makes certain that a record, whose first `PAYLOAD_OFFSET` bytes are `header`, is this page in this layout.

    Raises RecordError as `unpack` does.
    """
    if _is_as_packed(memoryview(header), payload, key, layout):
        return
    # Slower, and says what is wrong.
    found_key, found_layout = _read_header(header, payload)
    if found_key != key:
        raise RecordError(f"other key: the record is page {found_key.key.hex()} at depth {found_key.depth}")
    if found_layout != layout:
        raise RecordError(f"other layout: {_plain(found_layout)}, expected {_plain(layout)}")


def peek(header: memoryview | bytes) -> PageLayout | None:
    """The layout that a record's first `PAYLOAD_OFFSET` bytes tell of, true or not; None where they tell of none."""
    magic, version, length, _ = _FIXED.unpack_from(header)
    if (magic, version) != (MAGIC, VERSION):
        return None
    try:
        return _read_meta(json.loads(bytes(header[_META_OFFSET : _META_OFFSET + length])))[1]
    except (ValueError, KeyError, TypeError):
        return None


def inspect(record: bytes | memoryview) -> tuple[PageKey, PageLayout, memoryview]:
    """What a record says of itself, and its payload. Raises RecordError unless it is whole and unchanged."""
    data = _flat(record)
    payload = data[PAYLOAD_OFFSET:]
    return (*_read_header(data[:PAYLOAD_OFFSET], payload), payload)


def _head(key: PageKey, layout: PageLayout) -> tuple[bytes, bytes]:
    """What a header begins with, and what it says in JSON."""
    meta = (
        f'{{"namespace":"{key.namespace.hex()}","key":"{key.key.hex()}","parent":"{key.parent.hex()}","depth":{key.depth}'
        f",{layout.description}"
    ).encode()
    return _FIXED.pack(MAGIC, VERSION, len(meta), layout.nbytes), meta


def _is_as_packed(header: memoryview, payload: memoryview, key: PageKey, layout: PageLayout) -> bool:
    """Whether a record is, to the byte, as `pack` makes it, by its checksum: that takes no parsing."""
    fixed, meta = _head(key, layout)
    if (header.nbytes, payload.nbytes) != (PAYLOAD_OFFSET, layout.nbytes):
        return False
    if header[: len(fixed)] != fixed or header[_META_OFFSET : _META_OFFSET + len(meta)] != meta:
        return False
    (expected,) = _CHECKSUM.unpack_from(header, len(fixed))
    return _checksum(fixed, header[_META_OFFSET:], payload) == expected


def _read_header(header: memoryview | bytes, payload: memoryview) -> tuple[PageKey, PageLayout]:
    header = memoryview(header)
    length = header.nbytes + payload.nbytes
    if header.nbytes < PAYLOAD_OFFSET:
        raise RecordError(f"length: {length} bytes, less than a header")
    magic, version, meta_length, payload_bytes = _FIXED.unpack_from(header)
    if magic != MAGIC:
        raise RecordError("magic: this is no page of tierax")
    if version != VERSION:
        raise RecordError(f"version: format {version}, this program reads {VERSION}")
    if payload.nbytes != payload_bytes:
        raise RecordError(f"length: {length} bytes of {PAYLOAD_OFFSET + payload_bytes}")
    (expected,) = _CHECKSUM.unpack_from(header, _FIXED.size)
    if _checksum(header[: _FIXED.size], header[_META_OFFSET:], payload) != expected:
        raise RecordError("checksum: the bytes have changed since they were written")
    try:
        key, layout = _read_meta(json.loads(bytes(header[_META_OFFSET : _META_OFFSET + meta_length])))
        nbytes = layout.nbytes
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"header: {error}") from error
    if nbytes != payload_bytes:
        raise RecordError(f"length: {payload_bytes} bytes of payload for {_plain(layout)}")
    return key, layout


def _read_meta(meta: dict[str, Any]) -> tuple[PageKey, PageLayout]:
    namespace, key, parent = (bytes.fromhex(meta[name]) for name in ("namespace", "key", "parent"))
    parts: list[dict[str, Any]] = meta["parts"]
    listed: tuple[Part, ...] = ()
    if not parts or parts[0]["heads"] != "all":
        listed = tuple(Part(int(part["heads"][0]), int(part["heads"][1]), part["bytes"]) for part in parts)
    if len(parts) != max(len(listed), 1):
        raise ValueError(f"a page in {len(parts)} parts, of which one is all of it")
    return PageKey(namespace, key, parent, meta["depth"]), PageLayout(
        tuple(meta["shape"]), meta["dtype"], listed
    )


def _plain(layout: PageLayout) -> str:
    heads = "".join(f", heads {part.first} to {part.end}" for part in layout.parts[:1])
    return f"{layout.shape} {layout.dtype}{heads}"


def _checksum(fixed: bytes | memoryview, meta: bytes | memoryview, payload: memoryview) -> int:
    digest = xxhash.xxh3_64(fixed)
    digest.update(meta)
    digest.update(payload)  # lets go of the GIL, being large
    return digest.intdigest()


def _flat(data: memoryview | np.ndarray | bytes) -> memoryview:
    """A view of the bytes. Arrays of ml_dtypes' types have no buffer interface; as uint8 they do."""
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8).data
    return memoryview(data).cast("B")


def _itemsize(dtype: str) -> int:
    """Bytes per element, read out of the name: NumPy alone does not know ml_dtypes' names."""
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        if dtype == "bfloat16":
            return 2
        if dtype.startswith("float8_"):
            return 1
        raise ValueError(f"unknown dtype {dtype!r}") from None
