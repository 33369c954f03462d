"""The lines of batch files, in OpenAI's form: what goes in, what comes out, and what an interrupted run left behind."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

MAX_CUSTOM_ID = 512
_BEGIN = b'{"id":"batch_req_'
"""What every output line begins with: tells a torn line of ours from somebody else's file."""
_BOM = b"\xef\xbb\xbf"
_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a line got no answer, for people (`message`) and for programs (`code`)."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an input file: a request, or the problem with it."""

    number: int
    """Counted from 1, blank lines included."""
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    """A JSON object."""
    problem: Problem | None = None

    @property
    def key(self) -> str | int:
        """Tells the line from all others of its file: bad lines go by their numbers, their ids may be anything."""
        return self.number if self.problem is not None or self.custom_id is None else self.custom_id


class _Request(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: str = "POST"


class _Named(msgspec.Struct):
    custom_id: str | None = None


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """The lines of a batch that are not blank, each checked by itself; a line of more than `max_bytes` is a bad one.

    Of lines with the same custom_id only the first is good.
    """
    seen: set[str] = set()
    number = 0
    while raw := file.readline(max_bytes + 1):
        number += 1
        if len(raw) > max_bytes and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(2**20)
            yield _bad(number, "line_too_long", f"the line has more than {max_bytes} bytes")
            continue
        raw = raw.removeprefix(_BOM) if number == 1 else raw
        if not raw.strip():
            continue
        line = _read_line(number, raw)
        if line.problem is None and line.custom_id is not None:
            if line.custom_id in seen:
                message = f"custom_id {line.custom_id!r} was used by a line before"
                line = _bad(number, "duplicate_custom_id", message, "custom_id", line.custom_id)
            else:
                seen.add(line.custom_id)
        yield line


def answer_line(line: Line, status: int, body: bytes) -> bytes:
    """The output line of a request that got an HTTP answer with this JSON body."""
    response = {
        "status_code": status,
        "request_id": f"req_{secrets.token_hex(12)}",
        "body": msgspec.Raw(body),
    }
    return _output(line, {"response": response, "error": None})


def problem_line(line: Line, problem: Problem) -> bytes:
    """The output line of a request that got none."""
    error: dict[str, Any] = {"code": problem.code, "message": problem.message, "param": problem.param}
    if isinstance(line.key, int):
        error["line"] = line.number
    return _output(line, {"response": None, "error": error})


@dataclass(slots=True)
class Usage:
    """Tokens of the answers so far."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Tally:
    """What the output lines of a batch say together."""

    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    keys: set[str | int] = field(default_factory=set)
    """The keys of the lines that are answered, in one way or another."""

    def add(self, raw: bytes) -> None:
        """Counts an output line. Raises `msgspec.MsgspecError` for bytes that are none."""
        found = msgspec.json.decode(raw, type=_Output)
        line = None if found.error is None else found.error.line
        key = found.custom_id if line is None else line
        if key is None:
            raise msgspec.ValidationError("neither custom_id nor the number of a line")
        self.keys.add(key)
        if found.response is None or found.response.status_code != 200:
            self.failed += 1
            return
        self.completed += 1
        self._add_usage(found.response.body.usage or {})

    def _add_usage(self, usage: dict[str, Any]) -> None:
        # The protocols name the same things differently.
        into = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        out = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        # Anthropic's input_tokens leave out what was cached.
        cached = usage.get("cache_read_input_tokens", 0)
        self.usage.input_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0)) + cached
        self.usage.cached_tokens += into.get("cached_tokens", cached)
        self.usage.output_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        self.usage.reasoning_tokens += out.get("reasoning_tokens", 0)


class ResultFileError(Exception):
    """A file cannot take results; the message says why."""


def recover(path: Path, tally: Tally) -> int:
    """Counts the output lines of an interrupted run; returns how many bytes of the file are whole lines.

    What a kill tore off at the end does not count. Raises `ResultFileError` for anything that is no output of a batch.
    """
    good = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                if not raw.startswith(_BEGIN[: len(raw)]):
                    raise ResultFileError(f"{path}, line {number}: this is no output of a batch")
                break
            try:
                tally.add(raw)
            except (msgspec.MsgspecError, UnicodeError):
                raise ResultFileError(f"{path}, line {number}: this is no output of a batch") from None
            good += len(raw)
    return good


class _Body(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _Error(msgspec.Struct):
    line: int | None = None


class _Output(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


def _output(line: Line, rest: dict[str, Any]) -> bytes:
    head = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id}
    return msgspec.json.encode(head | rest) + b"\n"


def _read_line(number: int, raw: bytes) -> Line:
    try:
        request = msgspec.json.decode(raw, type=_Request)
    except msgspec.ValidationError as error:
        text = str(error)
        if missing := re.search(r"missing required field `(\w+)`", text):
            message = f"{missing[1]} is missing"
            return _bad(number, "invalid_request_line", message, missing[1], _id_of(raw))
        param = at["path"] if (at := _AT.search(text)) else None
        what = _AT.sub("", text)
        message = f"{param or 'the line'}: {what[:1].lower()}{what[1:]}"
        return _bad(number, "invalid_request_line", message, param, _id_of(raw))
    except (msgspec.DecodeError, UnicodeError) as error:
        return _bad(number, "invalid_json_line", f"not valid JSON: {error}")
    except RecursionError:
        return _bad(number, "invalid_json_line", "the JSON is nested too deeply")
    if not 1 <= len(request.custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters"
        return _bad(number, "invalid_request_line", message, "custom_id")
    if request.method != "POST":
        message = f"method must be POST, not {request.method[:40]!r}"
        return _bad(number, "invalid_method", message, "method", request.custom_id)
    return Line(number, request.custom_id, request.url, msgspec.json.encode(request.body))


def _id_of(raw: bytes) -> str | None:
    """The custom_id of a line that is wrong in another way."""
    try:
        return msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _bad(
    number: int, code: str, message: str, param: str | None = None, custom_id: str | None = None
) -> Line:
    return Line(number, custom_id, problem=Problem(code, f"Line {number}: {message}.", param))
