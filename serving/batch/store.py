"""Files and batches on disk: SQLite for what is known of them, a plain file for each content.

Everything here blocks, and belongs to one thread: `archive.Archive` owns it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, cast

import msgspec

from ...engine.config import ConfigError
from ..http.errors import ApiError, bad_request
from .records import BatchRecord, FileObject

DATABASE, CONTENTS, LOCK = "tierax.sqlite3", "files", "lock"
_VERSION = 1
_SCHEMA = """
CREATE TABLE files (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE batches (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    input_id TEXT NOT NULL, active INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE INDEX active_batches ON batches (active) WHERE active;
"""
_OURS = re.compile(r"file-[0-9a-f]{32}(\.part)?")
_COLUMNS = "id, filename, purpose, bytes, created_at, expires_at"


class InUse(ConfigError):
    """Another process works with the directory."""


class Store:
    """The files and batches of a directory, which no other process uses meanwhile."""

    def __init__(self, directory: Path, quota: int, now: Callable[[], float]) -> None:
        """Opens a directory, or makes it; sweeps away what a killed process left half done.

        `quota` bounds the bytes of all files. Raises `ConfigError` for a directory that cannot be used.
        """
        self._directory, self._quota, self._now = directory, quota, now
        self._uploading = 0
        try:
            _make_private(directory)
            self._lock = _lock(directory / LOCK)
            try:
                self._database = _connect(directory / DATABASE)
                self.sweep()
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise ConfigError(f"data_dir: {directory}: {error.strerror}") from error
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"data_dir: {directory / DATABASE}: {error}") from error

    def close(self) -> None:
        self._database.close()
        self._lock.close()

    def path(self, file_id: str) -> Path:
        """Where the content of a file is; ids are of our own making, never a client's."""
        return self._directory / CONTENTS / file_id

    def used(self) -> int:
        """Bytes that files take, uploads in progress included."""
        (stored,) = self._database.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()
        return stored + self._uploading

    def sweep(self) -> None:
        """Removes expired files, and contents that nothing tells of."""
        with self._transaction():
            self._database.execute("DELETE FROM files WHERE expires_at <= ?", (self._now(),))
        kept = {file_id for (file_id,) in self._database.execute("SELECT id FROM files")}
        for record in self.active_batches():
            kept |= {record.batch.input_file_id, record.output_id, record.error_id}
        for entry in os.scandir(self._directory / CONTENTS):
            if _OURS.fullmatch(entry.name) and entry.name.removesuffix(".part") not in kept:
                os.unlink(entry.path)

    # Files

    def reserve(self, size: int) -> None:
        """Counts bytes of an upload, negative ones to let go. Raises `ApiError` 413 when they exceed the quota."""
        if size > 0 and self.used() + size > self._quota:
            message = (
                f"All files together may have {self._quota} bytes here; delete some, or ask the operator."
            )
            raise ApiError(413, message, param="file", code="storage_quota_exceeded")
        self._uploading += size

    def keep(
        self, file_id: str, *, tenant: str, filename: str, purpose: str, seconds: int | None
    ) -> FileObject:
        """Makes a file known whose content is in place; it expires after `seconds`."""
        with self._transaction():
            return self._keep(file_id, tenant, filename, purpose, seconds)

    def file(self, file_id: str, tenant: str) -> FileObject:
        """Raises `ApiError` 404 when the tenant has no such file."""
        row = self._database.execute(
            f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND (expires_at IS NULL OR expires_at > ?)",
            (file_id, tenant, self._now()),
        ).fetchone()
        if row is None:
            raise _missing("file", file_id)
        return _file_object(row)

    def content(self, file_id: str, tenant: str) -> tuple[FileObject, Path]:
        """A file and where its content is. Raises `ApiError` 404."""
        found = self.file(file_id, tenant)
        path = self.path(found.id)
        # Nothing but a plain file of ours is sent out, whatever somebody has put there.
        with suppress(FileNotFoundError):
            if stat.S_ISREG(path.lstat().st_mode):
                return found, path
        raise _missing("content of file", file_id)

    def files(
        self,
        tenant: str,
        *,
        purpose: str | None,
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
    ) -> tuple[list[FileObject], bool]:
        """A page of a tenant's files in the order of their making, and whether there are more.

        Raises `ApiError` 400 for an `after` that the tenant does not have.
        """
        where, values = self._page("files", tenant, after, descending=order == "desc")
        where += " AND (expires_at IS NULL OR expires_at > ?)"
        values.append(self._now())
        if purpose is not None:
            where += " AND purpose = ?"
            values.append(purpose)
        rows = self._database.execute(
            f"SELECT {_COLUMNS} FROM files WHERE {where} ORDER BY place {order} LIMIT ?", (*values, limit + 1)
        ).fetchall()
        return [_file_object(row) for row in rows[:limit]], len(rows) > limit

    def delete(self, file_id: str, tenant: str) -> None:
        """Raises `ApiError` 404, or 409 while a batch works with the file."""
        self.file(file_id, tenant)
        user = self._database.execute(
            "SELECT id FROM batches WHERE active AND input_id = ?", (file_id,)
        ).fetchone()
        if user is not None:
            message = f"Batch {user[0]} still reads this file; cancel it, or wait for its end."
            raise ApiError(409, message, code="file_in_use")
        with self._transaction():
            self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        with suppress(FileNotFoundError):
            self.path(file_id).unlink()

    # Batches

    def add_batch(self, record: BatchRecord, most_active: int) -> None:
        """Raises `ApiError` 429 when the tenant has `most_active` batches under way, 404 without the input file."""
        file = self.file(record.batch.input_file_id, record.tenant)
        if file.purpose != "batch":
            message = (
                f"The file's purpose is {file.purpose!r}; a batch needs one that was uploaded for batch."
            )
            raise bad_request(message, "input_file_id")
        (active,) = self._database.execute(
            "SELECT COUNT(*) FROM batches WHERE active AND tenant = ?", (record.tenant,)
        ).fetchone()
        if active >= most_active:
            message = f"{active} batches are under way, and more are not taken; wait for one to end."
            raise ApiError(429, message, code="too_many_batches")
        if self.used() >= self._quota:
            self.reserve(1)
        batch = record.batch
        with self._transaction():
            self._database.execute(
                "INSERT INTO batches (id, tenant, input_id, active, record) VALUES (?, ?, ?, 1, ?)",
                (batch.id, record.tenant, batch.input_file_id, msgspec.json.encode(record)),
            )

    def save_batch(self, record: BatchRecord, results: Sequence[tuple[str, str]] = ()) -> None:
        """Writes down a batch's state and, at once with it, that result files (id, filename) are there."""
        with self._transaction():
            for file_id, filename in results:
                self._keep(file_id, record.tenant, filename, "batch_output", record.results_live)
            self._database.execute(
                "UPDATE batches SET active = ?, record = ? WHERE id = ?",
                (record.active, msgspec.json.encode(record), record.batch.id),
            )

    def batch(self, batch_id: str, tenant: str) -> BatchRecord:
        """Raises `ApiError` 404 when the tenant has no such batch."""
        row = self._database.execute(
            "SELECT record FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant)
        ).fetchone()
        if row is None:
            raise _missing("batch", batch_id)
        return _record(row)

    def batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """A page of a tenant's batches, the latest first, and whether there are more. Raises `ApiError` 400."""
        where, values = self._page("batches", tenant, after, descending=True)
        rows = self._database.execute(
            f"SELECT record FROM batches WHERE {where} ORDER BY place DESC LIMIT ?", (*values, limit + 1)
        ).fetchall()
        return [_record(row) for row in rows[:limit]], len(rows) > limit

    def active_batches(self) -> list[BatchRecord]:
        """Those of all tenants on which work is not done, in the order of their making."""
        rows = self._database.execute("SELECT record FROM batches WHERE active ORDER BY place")
        return [_record(row) for row in rows]

    def _keep(
        self, file_id: str, tenant: str, filename: str, purpose: str, seconds: int | None
    ) -> FileObject:
        size, created = self.path(file_id).stat().st_size, int(self._now())
        # Its name must be on disk before the database tells of it.
        self._sync_names()
        expires = None if seconds is None else created + seconds
        row = (file_id, filename, purpose, size, created, expires)
        self._database.execute(
            f"INSERT INTO files ({_COLUMNS}, tenant) VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, tenant)
        )
        return _file_object(row)

    def _sync_names(self) -> None:
        names = os.open(self._directory / CONTENTS, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(names)
        finally:
            os.close(names)

    def _page(
        self, table: str, tenant: str, after: str | None, *, descending: bool
    ) -> tuple[str, list[object]]:
        if after is None:
            return "tenant = ?", [tenant]
        row = self._database.execute(
            f"SELECT place FROM {table} WHERE id = ? AND tenant = ?", (after, tenant)
        ).fetchone()
        if row is None:
            raise bad_request(f"after: there is no {after[:80]!r} to go on from.", "after")
        return f"tenant = ? AND place {'<' if descending else '>'} ?", [tenant, row[0]]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise


class Upload:
    """A file whose content is still coming in; ends with `finish` or `discard`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._id = new_id("file-")
        self._part = store.path(f"{self._id}.part")
        self._file = open_private(self._part, "xb")
        self.size = 0

    def write(self, chunk: bytes) -> None:
        """Raises `ApiError` 413 beyond the quota, OSError as the disk does."""
        self._store.reserve(len(chunk))
        self.size += len(chunk)
        self._file.write(chunk)

    def finish(self, *, tenant: str, filename: str, purpose: str, seconds: int | None) -> FileObject:
        """Makes the file known once it is safely on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._part.rename(self._store.path(self._id))
        return self._store.keep(self._id, tenant=tenant, filename=filename, purpose=purpose, seconds=seconds)

    def discard(self) -> None:
        """Ends it, whatever has become of it; what was not finished is gone."""
        self._store.reserve(-self.size)
        self.size = 0
        with suppress(OSError):
            self._file.close()
        with suppress(FileNotFoundError):
            self._part.unlink()


def new_id(prefix: str) -> str:
    """An id that nobody guesses."""
    return prefix + secrets.token_hex(16)


def open_private(path: Path, mode: str) -> BinaryIO:
    """Opens a file that only this user reads; a link at its place is not followed."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)

    return cast(BinaryIO, open(path, mode, opener=opener))


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (directory / DATABASE).exists() and any(entry.name != LOCK for entry in directory.iterdir()):
        raise ConfigError(f"data_dir: {directory} holds other files; give an empty directory, or a new one")
    directory.chmod(0o700)
    (directory / CONTENTS).mkdir(mode=0o700, exist_ok=True)


def _lock(path: Path):
    file = open_private(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InUse(
            f"data_dir: {path.parent} is in use by another server; give each its own --data-dir"
        ) from None
    return file


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT")
        elif version != _VERSION:
            raise ConfigError(f"data_dir: {path} was written by another version of tierax (format {version})")
    except BaseException:
        database.close()
        raise
    return database


def _file_object(row: tuple) -> FileObject:
    file_id, filename, purpose, size, created, expires = row
    return FileObject(
        id=file_id, filename=filename, purpose=purpose, bytes=size, created_at=created, expires_at=expires
    )


def _record(row: tuple) -> BatchRecord:
    return msgspec.json.decode(row[0], type=BatchRecord)


def _missing(what: str, name: str) -> ApiError:
    return ApiError(404, f"There is no {what} {name[:80]!r}.", code="not_found")
