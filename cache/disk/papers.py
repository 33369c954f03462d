"""What a page store keeps beside its pages, in small records: notes for people, the index's snapshot, marks."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorstore as ts

from .local import StoreError, remove_empty_folders
from .names import INDEX_NAME, MARKS, ROOT, description_name, parse_description_name
from .outcomes import PATIENCE_S, plain

_log = logging.getLogger(__name__)


class Papers:
    """Of one store at `url`, in the directory `local` if it has one. All calls wait, in whichever thread makes them."""

    def __init__(
        self, url: str, local: Path | None, reads: ts.KvStore, writes: ts.KvStore, *, read_only: bool
    ) -> None:
        """`reads` and `writes` are two handles of the store, each with a queue of its own."""
        self.kv = writes
        """For what is neither a page nor a paper (board.py)."""
        self._url = url
        self._reads = reads
        self._local = local
        self._read_only = read_only

    # Namespaces.

    def describe(self, namespace: bytes, fields: Mapping[str, str | int | float | bytes | None]) -> None:
        """Leaves a note for people on what `namespace` is, unless there is one. A salt must not be among `fields`.

        A failure is logged only: nothing depends on the note.
        """
        if self._read_only:
            return
        words = {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}
        name = description_name(namespace)
        try:
            if self._get(name) is None:
                self._put(name, json.dumps(words, indent=1).encode())
        except Exception as error:
            _log.warning("disk cache %s: no description for a namespace: %s", self._url, plain(error))

    def description(self, namespace: bytes) -> dict[str, Any]:
        """What `describe` left; empty if there is nothing, or nothing legible. Raises StoreError."""
        with self.as_store_error():
            raw = self._get(description_name(namespace))
        try:
            fields = json.loads(raw or b"{}")
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) else {}

    def described(self) -> set[bytes]:
        """The namespaces that have a description, with or without pages. Raises StoreError."""
        return {found for name in self.names() if (found := parse_description_name(name)) is not None}

    def forget(self, namespace: bytes) -> None:
        """Removes a namespace's description, and folders of it that are empty. Raises StoreError."""
        with self.as_store_error():
            self._put(description_name(namespace), None)
        if self._local is not None:
            remove_empty_folders(self._local / ROOT / namespace.hex())

    # The index.

    def save_index(self, snapshot: bytes, *, patience: float = PATIENCE_S) -> bool:
        """Keeps what `DiskIndex.snapshot` gave; False if that failed, or took more than `patience` seconds, which costs
        nothing but the order of use."""
        try:
            if not self._read_only:
                self._put(INDEX_NAME, snapshot, patience)
            return not self._read_only
        except Exception as error:
            _log.warning("disk cache %s: the index was not saved: %s", self._url, plain(error))
            return False

    def load_index(self) -> bytes:
        """What `save_index` kept; empty if there is none."""
        try:
            return self._get(INDEX_NAME) or b""
        except Exception as error:
            _log.warning("disk cache %s: the index was not read: %s", self._url, plain(error))
            return b""

    def forget_index(self) -> None:
        """Removes what `save_index` kept. Raises StoreError."""
        with self.as_store_error():
            self._put(INDEX_NAME, None)

    # Marks.

    def mark(self, name: str) -> str:
        """Leaves a mark by which others see that they have the same store; returns what it is called. Raises StoreError."""
        with self.as_store_error():
            self._put(MARKS + name, b"")
        return MARKS + name

    def sees(self, mark: str) -> bool:
        """Whether such a mark is here. Raises StoreError."""
        with self.as_store_error():
            return self._get(mark) is not None

    def unmark(self, mark: str) -> None:
        """Removes a mark, if it can be."""
        with contextlib.suppress(Exception):
            self._put(mark, None)

    # All of it.

    def names(self) -> list[str]:
        """Of everything that the store has, pages included. Raises StoreError."""
        # "0" follows "/": all names that start with the root.
        everything = ts.KvStore.KeyRange(ROOT, ROOT.rstrip("/") + "0")
        with self.as_store_error():
            names = self._reads.list(everything).result(timeout=PATIENCE_S)
        return [name.decode(errors="replace") for name in names]

    @contextlib.contextmanager
    def as_store_error(self) -> Iterator[None]:
        """Whatever goes wrong within is a StoreError that names the store."""
        try:
            yield
        except Exception as error:
            raise StoreError(f"disk cache {self._url}: {plain(error)}") from error

    def _get(self, name: str) -> bytes | None:
        result = self._reads.read(name).result(timeout=PATIENCE_S)
        return result.value if result.state == "value" else None

    def _put(self, name: str, value: bytes | None, patience: float = PATIENCE_S) -> None:
        self.kv.write(name, value).result(timeout=patience)
