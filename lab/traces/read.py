"""Finds out which format a trace file has, and reads it. Files may be compressed with zstandard (`.zst`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ..errors import TraceError
from . import agentic, azure, mooncake, own, ragpulse
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Options:
    """What a trace leaves open."""

    seed: int = 0
    """Of whatever is drawn at random: spread arrivals, starts of sessions."""
    session_rate: float = 0.05
    """Sessions that start per second, where a trace has relative times only."""
    most_sessions: int | None = None
    """How many sessions are read, where the file has whole sessions."""


Reader = Callable[[str, Iterable[str], Options, Path], Trace]
"""(name, lines, options, path) -> the trace."""

FORMATS: dict[str, Reader] = {
    "mooncake": lambda name, lines, options, path: mooncake.read(name, records(lines), options.seed),
    "agentic": lambda name, lines, options, path: agentic.read(
        name, records(lines), options.seed, options.session_rate, options.most_sessions
    ),
    "ragpulse": lambda name, lines, options, path: ragpulse.read(
        name, records(lines), block_lengths(path, ragpulse.LENGTHS)
    ),
    "azure": lambda name, lines, options, path: azure.read(name, lines),
    "tierax": lambda name, lines, options, path: own.read(name, records(lines)),
}
"""By the names that `--format` takes."""


def load_trace(path: str | Path, format: str | None = None, options: Options | None = None) -> Trace:
    """Reads a trace; the format is told from the first line unless it is given. Raises `TraceError`."""
    path = Path(path)
    name = path.name.removesuffix(".zst").rpartition(".")[0] or path.name
    try:
        with open_text(path) as lines:
            first = next((line for line in lines if line.strip()), "")
            found = format or _detect(first)
            if found not in FORMATS:
                raise TraceError(
                    f"is in no format that is known ({', '.join(FORMATS)}); name one with --format"
                    if format is None
                    else f"no format {format!r}: choose one of {', '.join(FORMATS)}"
                )
            trace = FORMATS[found](name, _again(first, lines), options or Options(), path)
    except TraceError as error:
        raise TraceError(f"trace {path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        detail = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"trace {path}: a line is not what the format has: {detail}") from error
    if not trace.requests:
        raise TraceError(f"trace {path}: there is no request in it")
    return trace


def open_text(path: Path) -> TextIOWrapper:
    """The file as text, decompressed where its name ends in `.zst`. Raises `TraceError`, or OSError for the file itself."""
    file = path.open("rb")
    if path.suffix != ".zst":
        return TextIOWrapper(file, encoding="utf-8")
    try:
        import zstandard
    except ImportError:
        file.close()
        raise TraceError(
            "needs the package zstandard to be read: pip install 'tierax[lab]', or unpack it with zstd -d"
        ) from None
    return TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file, closefd=True), encoding="utf-8")


def records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON object of each line; blank lines are passed over."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TraceError(f"line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise TraceError(f"line {number} is not a JSON object")
        yield record


def block_lengths(path: Path, files: dict[str, str]) -> dict[int, int]:
    """Tokens by block id, out of the files beside a trace; `files` gives the id's field by the end of a file's name."""
    lengths: dict[int, int] = {}
    for end, field in files.items():
        beside = next(iter(sorted(path.parent.glob(f"*{end}.jsonl*"))), None)
        if beside is None:
            raise TraceError(f"the lengths of its blocks are missing: no file *{end}.jsonl beside it")
        with open_text(beside) as lines:
            lengths.update((record[field], record["token_length"]) for record in records(lines))
    return lengths


def _detect(line: str) -> str | None:
    if line.startswith("TIMESTAMP,"):
        return "azure"
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    if record.get("format") == own.FORMAT:
        return "tierax"
    if "hash_id_scope" in record:
        return "agentic"
    if isinstance(record.get("hash_ids"), dict):
        return "ragpulse"
    return "mooncake" if isinstance(record.get("hash_ids"), list) else None


def _again(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest
