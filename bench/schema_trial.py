"""Holds a grammar compiler to JSON Schema: what it lets through must fit, what fits it must let through."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.constraint import Constraint, ConstraintError, Matcher
from .schema_cases import Case, Judge, as_text

MOST_TOKENS = 200
"""Of a text that is written at random; longer ones are cut, and not judged."""
MOST_SHOWN = 20
_CLOSING = frozenset(b'"]}')


class Compiled(Protocol):
    """A compiled constraint."""

    def matcher(self, stop_ids: frozenset[int]) -> Matcher: ...


class Texts(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int

    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str, *, add_bos: bool) -> list[int]: ...


class Vocabulary(Protocol):
    """What is needed of an engine."""

    tokenizer: Any
    end_ids: frozenset[int]

    def compile_constraint(self, constraint: Constraint) -> Compiled: ...


@dataclass(slots=True)
class Findings:
    """What came of a trial. The lists name case, schema and text of what went wrong."""

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By keyword."""
    texts: int = 0
    """Written at random to their end."""
    cut: int = 0
    valid_values: int = 0
    invalid_values: int = 0
    compile_seconds: list[float] = field(default_factory=list)
    misfits: list[dict[str, Any]] = field(default_factory=list)
    """Texts that were let through to their end and do not fit."""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    """Values that fit and were not let through."""
    accepted: list[dict[str, Any]] = field(default_factory=list)
    """Values that do not fit and were let through."""

    @property
    def problems(self) -> int:
        return len(self.misfits) + len(self.rejected) + len(self.accepted)

    def told(self) -> dict[str, Any]:
        """In a form for JSON."""
        times = self.compile_seconds or [0.0]
        return {
            "schemas": self.schemas,
            "refused": dict(self.refused.most_common()),
            "compile_ms_mean": 1000 * sum(times) / len(times),
            "compile_ms_max": 1000 * max(times),
            "texts": self.texts,
            "texts_cut": self.cut,
            "texts_that_misfit": self.misfits[:MOST_SHOWN],
            "valid_values": self.valid_values,
            "valid_rejected": self.rejected[:MOST_SHOWN],
            "invalid_values": self.invalid_values,
            "invalid_accepted": self.accepted[:MOST_SHOWN],
            "problems": self.problems,
        }


def try_schemas(
    cases: Iterable[Case], engine: Vocabulary, clock: Callable[[], float], seed: int, texts: int = 1
) -> Findings:
    """Compiles each schema, writes `texts` random texts under it, and has its values checked."""
    findings = Findings()
    writer = RandomWriter(engine)
    for i, case in enumerate(cases):
        findings.schemas += 1
        started = clock()
        try:
            compiled = engine.compile_constraint(Constraint.json_schema(case.schema))
        except ConstraintError as error:
            findings.refused[error.keyword] += 1
            continue
        findings.compile_seconds.append(clock() - started)
        rng = random.Random(f"{seed}/{i}/text")
        for _ in range(texts):
            text = writer.write(compiled, rng)
            if text is None:
                findings.cut += 1
            else:
                findings.texts += 1
                judge_text(case, text, findings)
        _try_values(case, compiled, engine, findings)
    return findings


def judge_text(case: Case, text: str, findings: Findings) -> None:
    """Notes a text that was let through and does not fit."""
    judge = Judge.of(case.schema)
    try:
        fits = judge is None or judge.allows(json.loads(text))
    except ValueError:
        fits = False
    if not fits:
        findings.misfits.append(_told(case, text))


def _try_values(case: Case, compiled: Compiled, engine: Vocabulary, findings: Findings) -> None:
    for value, fits in case.values:
        text = as_text(value, case.schema)
        passed = _passes(compiled, engine, text)
        if fits:
            findings.valid_values += 1
            if not passed:
                findings.rejected.append(_told(case, text))
        else:
            findings.invalid_values += 1
            if passed:
                findings.accepted.append(_told(case, text))


def _passes(compiled: Compiled, engine: Vocabulary, text: str) -> bool:
    """Whether a text is let through, byte by byte of its usual tokens, to an end that may be one."""
    stop = min(engine.end_ids)
    matcher = compiled.matcher(frozenset([stop]))
    for token in engine.tokenizer.encode(text, add_bos=False):
        if matcher.ended or not _allows(matcher, token):
            return False
        matcher.advance(token)
    return matcher.ended or _allows(matcher, stop)


def _allows(matcher: Matcher, token: int) -> bool:
    return bool(matcher.mask[token // 32] >> (token % 32) & 1)


def _told(case: Case, text: str) -> dict[str, Any]:
    return {"about": case.name, "schema": case.schema, "text": text[:2000]}


class RandomWriter:
    """Writes what a constraint allows, at random, with a taste for what brings a text to its end."""

    def __init__(self, engine: Vocabulary, most: int = MOST_TOKENS) -> None:
        self._most = most
        tokenizer = engine.tokenizer
        self._bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._stop = min(engine.end_ids)
        size = tokenizer.vocab_size
        closing = [_closes(tokenizer.token_bytes(token)) for token in range(size)]
        self._closing: NDArray[np.bool_] = np.array(closing, bool)

    def write(self, compiled: Compiled, rng: random.Random) -> str | None:
        """A whole text; None if it had to be cut."""
        matcher = compiled.matcher(frozenset([self._stop]))
        written = b""
        for count in range(self._most):
            if matcher.ended:
                return written.decode()
            late = count > self._most // 3
            allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
            if allowed[self._stop] and (late or rng.random() < 0.5):
                return written.decode()
            allowed[self._stop] = 0
            token = self._pick(np.flatnonzero(allowed), rng, late)
            if token is None:
                return written.decode()
            written += self._bytes(token)
            matcher.advance(token)
        return None

    def _pick(self, allowed: NDArray[np.intp], rng: random.Random, late: bool) -> int | None:
        if not len(allowed):
            return None
        if late or rng.random() < 0.4:
            closing = allowed[self._closing[np.minimum(allowed, len(self._closing) - 1)]]
            allowed = closing if len(closing) else allowed
        return int(allowed[rng.randrange(len(allowed))])


def _closes(token: bytes) -> bool:
    return bool(token) and _CLOSING.issuperset(token)
