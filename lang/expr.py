"""What programs are made of: texts, messages, and places for the model to fill in. Immutable, and free of any backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .recording import adopt, record

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer's tokens are chosen, and how many there may be; names and defaults as in `SamplingParams`."""

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that were given (those that are not None), made plain. Raises TypeError or ValueError by name."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise TypeError(f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(sorted(known))}")
        plain = {name: value for name, value in given.items() if value is not None}
        for name in ("stop", "stop_token_ids"):
            if name in plain:
                value = plain[name]
                plain[name] = (value,) if isinstance(value, str | int) else tuple(value)
        most = plain.get("max_tokens", 1)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"max_tokens must be a whole number of at least 1, not {most!r}")
        return plain

    def given(self) -> dict[str, Any]:
        """The fields that differ from the defaults."""
        return {
            f.name: list(value) if isinstance(value, tuple) else value
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """What an answer must look like."""

    kind: str
    """`regex`, `json_schema` or `grammar`."""
    value: str
    """The pattern, the schema as JSON text, or the grammar."""


class Expr:
    """Part of a program; `+` puts parts and strings one after the other."""

    def __add__(self, other: Expr | str) -> Seq:
        return Seq.of(self, other)

    def __radd__(self, other: str) -> Seq:
        return Seq.of(other, self)


@dataclass(frozen=True, slots=True, eq=False)
class Text(Expr):
    """A text of the program's own."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Gen(Expr):
    """A place that the model fills in."""

    name: str | None
    where: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Sampling` that differ from the run's."""
    shape: Shape | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Select(Expr):
    """A place for the likeliest of some choices."""

    name: str | None
    where: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Begin(Expr):
    """A message begins."""

    role: str
    where: str


@dataclass(frozen=True, slots=True, eq=False)
class End(Expr):
    """The open message ends."""

    role: str
    where: str


@dataclass(frozen=True, slots=True, eq=False)
class Message(Expr):
    """A whole message."""

    role: str
    where: str
    content: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Seq(Expr):
    """Parts one after the other."""

    parts: tuple[Expr, ...]

    @classmethod
    def of(cls, *given: Expr | str) -> Seq:
        """Raises TypeError for what is neither a part nor a string."""
        parts: list[Expr] = []
        for part in map(as_expr, given):
            adopt(part)
            parts += part.parts if isinstance(part, Seq) else [part]
        return record(cls(tuple(parts)))


def as_expr(value: object) -> Expr:
    """A part of a program; strings become texts. Raises TypeError for anything else."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    hint = (
        "; numbers are not turned into text by themselves: use str(…)"
        if isinstance(value, int | float)
        else ""
    )
    raise TypeError(
        f"a program is made of strings, gen(…), select(…) and messages, not {type(value).__name__}{hint}"
    )


def named_parts(expr: Expr) -> Iterator[Gen | Select]:
    """The places to fill in, in the order in which they are."""
    match expr:
        case Gen() | Select():
            yield expr
        case Message():
            yield from named_parts(expr.content)
        case Seq():
            for part in expr.parts:
                yield from named_parts(part)
