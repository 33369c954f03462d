"""Names of pages that mean the same in every process: a page's key says all that its KV depends on.

The key of a page is the SHA-256, cut to 128 bits, of its parent's key and its token ids; the first page's parent is
the digest of its namespace. A namespace is a list of typed, length-framed fields (weights, shapes, dtypes, layout,
format, tenant), so that no two different lists give the same digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

KEY_BYTES = 16


class PageKey(NamedTuple):
    """What the disk store knows of a page, all of it in its name."""

    namespace: bytes
    """Digest of the namespace, `KEY_BYTES` long."""
    key: bytes
    parent: bytes
    """The key of the page before; the namespace's digest for the first one."""
    depth: int
    """How many pages come before it."""


def namespace_digest(fields: Mapping[str, str | int | float | bytes | None], salt: bytes = b"") -> bytes:
    """The digest of a namespace: `fields` in any order, and a tenant's salt, which is kept apart from all of them."""
    digest = hashlib.sha256(b"tierax-namespace")
    for name in sorted(fields):
        value = fields[name]
        raw = value if isinstance(value, bytes) else repr(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), raw):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    digest.update(b"salt" + len(salt).to_bytes(8, "big") + salt)
    return digest.digest()[:KEY_BYTES]


def chain(parent: bytes, pages: Iterable[bytes | bytearray | memoryview]) -> list[bytes]:
    """The keys of pages that follow each other, given the token ids of each (i32, little endian) as bytes."""
    keys = []
    for tokens in pages:
        parent = hashlib.sha256(parent + tokens).digest()[:KEY_BYTES]
        keys.append(parent)
    return keys
