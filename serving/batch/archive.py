"""The way from the event loop to the store, which blocks: one thread owns it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ...engine.config import ConfigError
from ..config import ServerConfig
from ..http.errors import ApiError
from .store import DATABASE, InUse, Store

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Archive:
    """Opens the store when it is first needed, and runs all work on it in one thread, in the order that it came."""

    def __init__(self, config: ServerConfig, model: str, now: Callable[[], float]) -> None:
        self._directory = data_directory(config, model)
        self._quota, self._now = config.data_quota, now
        self._store: Store | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")

    @property
    def exists(self) -> bool:
        """Something was stored before."""
        return self._directory is not None and (self._directory / DATABASE).exists()

    async def run(self, work: Callable[[Store], _T]) -> _T:
        """The result of `work`. Raises `ApiError` where there is no store, or the disk is full."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def run_later(self, work: Callable[[Store], object]) -> None:
        """Has `work` done after all that came before it, even if nobody can wait for that."""
        self._thread.submit(self._run, work)

    async def close(self) -> None:
        """Ends the thread once its work is done."""
        self._thread.submit(self._close)
        await asyncio.to_thread(self._thread.shutdown)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _run(self, work: Callable[[Store], _T]) -> _T:
        try:
            return work(self._open())
        except (OSError, sqlite3.OperationalError) as error:
            if _is_full(error):
                raise ApiError(507, "The disk is full.", code="disk_full") from error
            raise

    def _open(self) -> Store:
        if self._directory is None:
            raise ApiError(404, "Files and batches are switched off on this server.", code="files_off")
        if self._store is None:
            try:
                self._store = Store(self._directory, self._quota, self._now)
            except InUse as error:
                log.warning("%s", error)
                raise ApiError(
                    503, "Another server uses the data directory.", code="data_dir_in_use"
                ) from None
            except ConfigError as error:
                if isinstance(error.__cause__, Exception) and _is_full(error.__cause__):
                    raise error.__cause__ from None
                log.error("%s", error)
                raise ApiError(500, "The data directory cannot be used.", code="data_dir_unusable") from None
        return self._store


def check_data_dir(config: ServerConfig) -> None:
    """Raises `ConfigError` when the directory that the user named cannot be used."""
    if config.data_dir not in ("auto", "none"):
        Store(Path(config.data_dir).expanduser(), config.data_quota, lambda: 0.0).close()


def data_directory(config: ServerConfig, model: str) -> Path | None:
    """Where files and batches go; None = nowhere. Without a directory given, each model has its own."""
    if config.data_dir == "none":
        return None
    if config.data_dir != "auto":
        return Path(config.data_dir).expanduser()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    readable = re.sub(r"[^\w.-]", "_", model, flags=re.ASCII).lstrip(".")[:60]
    # Two names that read alike must not meet.
    return Path(base).expanduser() / "tierax" / f"{readable}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def _is_full(error: Exception) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
