"""Records served requests as a trace that `tierax lab` reads: times, lengths, and hashes of pages. No text, no tokens.

Hashes are keyed with a secret that is drawn at start and never written down, so they can be compared within one
recording and with nothing else; not even a short, guessable prompt can be told from them.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from .config import ConfigError
from .request import Request

logger = logging.getLogger(__name__)

HASH_BYTES = 8
NOTES = ["recorded by a server; a request is noted when it ends"]


class TraceRecorder:
    """Owns the file: made by the engine, which closes it. Called from the threads of engines only.

    A line is written when a request ends. A file that cannot be written any more ends the recording, not the server.
    """

    def __init__(self, path: str, page_size: int, clock: Callable[[], float]) -> None:
        """Raises `ConfigError` where the file exists, or cannot be made."""
        self._path = Path(path).expanduser()
        self._page_size = page_size
        self._began = clock()
        self._lock = threading.Lock()
        self._secret = secrets.token_bytes(16)
        try:
            # A line at a time, so that what a killed server has served is there.
            self._file = open(self._path, "x", encoding="utf-8", buffering=1, opener=_private)  # noqa: SIM115
            self._write({"format": "tierax-trace", "version": 1, "block_tokens": page_size, "notes": NOTES})
        except FileExistsError:
            raise ConfigError(
                f"trace_out: {self._path} exists; a recording starts a file of its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"trace_out: {self._path}: {error.strerror}") from None

    def record(self, request: Request) -> None:
        """A request has ended, however it did."""
        if request.num_output == 0:
            return
        line: dict[str, object] = {
            "arrival": round(request.arrival - self._began, 6),
            "prompt_tokens": request.num_prompt,
            "output_tokens": request.num_output,
            "blocks": self._hashes(request.namespace, request.tokens),
        }
        if request.namespace:
            line["tenant"] = self._hash(b"tenant", request.namespace).hex()
        with self._lock:
            if self._file.closed:
                return
            try:
                self._write(line)
            except OSError as error:
                logger.error("%s: %s; the recording ends here", self._path, error.strerror)
                self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            logger.error("%s: %s", self._path, error.strerror)

    def _hashes(self, namespace: bytes, tokens: array[int]) -> list[str]:
        """Of every page, the last one as far as it goes; each says all that comes before it, too."""
        found, before = [], namespace
        for at in range(0, len(tokens), self._page_size):
            before = self._hash(before, tokens[at : at + self._page_size].tobytes())
            found.append(before.hex())
        return found

    def _hash(self, before: bytes, data: bytes) -> bytes:
        framed = len(before).to_bytes(4, "little") + before + data
        return blake2b(framed, digest_size=HASH_BYTES, key=self._secret).digest()

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
