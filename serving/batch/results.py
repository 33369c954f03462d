"""The result file of a batch, which grows by whole lines."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from .lines import ResultFileError, Tally, recover


class ResultFile:
    """Appends output lines to a file and counts them, those of an interrupted run included."""

    def __init__(self, path: Path, tally: Tally, mode: int = 0o600) -> None:
        """Takes up a file where it was left, without what a kill tore off at its end; makes it if there is none, with
        these permissions.

        Raises `ResultFileError` for a file that is no output of a batch, or has another writer; it stays as it is.
        """
        self._tally = tally
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode)
        try:
            _lock(self._fd, path)
            self.size = recover(path, tally)
            os.ftruncate(self._fd, self.size)
        except BaseException:
            self.close()
            raise

    def append(self, raw: bytes) -> None:
        """Raises OSError when the line could not be written, of which nothing stays behind then."""
        try:
            written = 0
            while written < len(raw):
                written += os.write(self._fd, raw[written:])
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(raw)
        self._tally.add(raw)

    def close(self) -> None:
        """Has everything safely on disk; nothing is left to do the second time."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def drop_failed(path: Path) -> None:
    """Makes a result file one without the lines that failed, all at once. Raises `ResultFileError`."""
    ResultFile(path, Tally()).close()
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as copy, path.open("rb") as file:
        for raw in file:
            tally = Tally()
            tally.add(raw)
            if tally.completed:
                copy.write(raw)
        copy.flush()
        os.fsync(copy.fileno())
    os.replace(copy.name, path)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResultFileError(f"{path}: another process is writing results to it") from None
