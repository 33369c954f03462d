"""The words of the language: what users write programs with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, overload

from .errors import caller
from .expr import Begin, End, Expr, Gen, Message, Sampling, Select, Shape, as_expr
from .recording import RoleBlock, adopt, record

REGEX_OF_TYPE = {
    int: r"-?(0|[1-9][0-9]{0,17})",
    float: r"-?(0|[1-9][0-9]{0,15})\.[0-9]{1,15}",
    bool: r"(True|False)",
    str: r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
}
"""What `gen(dtype=…)` lets the model write: a Python literal of that type."""


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    min_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    seed: int | None = None,
    ignore_eos: bool | None = None,
    logprobs: int | None = None,
    choices: Sequence[str] | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | type | None = None,
    grammar: str | None = None,
    dtype: type | None = None,
) -> Gen | Select:
    """A place that the model fills in; its text is kept under `name`, if there is one.

    What is not given is as the run says, and else as in `SamplingParams`, with at most 128 tokens. At most one of
    `regex`, `json_schema` (a schema, its JSON text, or a pydantic model), `grammar`, `dtype` (`int`, `float`, `bool`,
    `str`) and `choices` (then it is a `select`) says what the text must be. Raises TypeError or ValueError.
    """
    where = caller()
    given = [regex, json_schema, grammar, dtype, choices]
    if sum(value is not None for value in given) > 1:
        raise ValueError("gen takes one of regex, json_schema, grammar, dtype and choices, not several")
    if choices is not None:
        return record(_select(name, choices, where))
    sampling = Sampling.checked(
        {
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "logprobs": logprobs,
        }
    )
    return record(Gen(_checked(name), where, sampling, _shape(regex, json_schema, grammar, dtype)))


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Gen | Select:
    """A whole number in digits."""
    return gen(name, max_tokens, dtype=int, **sampling)


def gen_string(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Gen | Select:
    """A text in double quotes, which belong to it."""
    return gen(name, max_tokens, dtype=str, **sampling)


def select(name: str | None = None, choices: Sequence[str] | None = None) -> Select:
    """A place for that of the `choices` whose tokens the model finds likeliest on average. Nothing is sampled."""
    return record(_select(name, choices or (), caller()))


@overload
def system(content: Expr | str) -> Message: ...
@overload
def system(content: None = None) -> RoleBlock: ...
def system(content: Expr | str | None = None) -> Message | RoleBlock:
    """A system message; without a content, for `with`."""
    return _message("system", content, caller())


@overload
def user(content: Expr | str) -> Message: ...
@overload
def user(content: None = None) -> RoleBlock: ...
def user(content: Expr | str | None = None) -> Message | RoleBlock:
    """A user's message; without a content, for `with`."""
    return _message("user", content, caller())


@overload
def assistant(content: Expr | str) -> Message: ...
@overload
def assistant(content: None = None) -> RoleBlock: ...
def assistant(content: Expr | str | None = None) -> Message | RoleBlock:
    """A message of the model's; without a content, for `with`."""
    return _message("assistant", content, caller())


def system_begin() -> Begin:
    """A system message begins."""
    return record(Begin("system", caller()))


def system_end() -> End:
    """The open system message ends."""
    return record(End("system", caller()))


def user_begin() -> Begin:
    """A user's message begins."""
    return record(Begin("user", caller()))


def user_end() -> End:
    """The user's open message ends."""
    return record(End("user", caller()))


def assistant_begin() -> Begin:
    """A message of the model's begins."""
    return record(Begin("assistant", caller()))


def assistant_end() -> End:
    """The model's open message ends."""
    return record(End("assistant", caller()))


def _message(role: str, content: Expr | str | None, where: str) -> Message | RoleBlock:
    if content is None:
        return RoleBlock(role, where)
    inner = as_expr(content)
    adopt(inner)
    return record(Message(role, where, inner))


def _select(name: str | None, choices: Sequence[str], where: str) -> Select:
    texts = tuple(choices)
    if isinstance(choices, str) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("choices must be a list of texts, none of them empty")
    if len(set(texts)) < len(texts):
        raise ValueError("choices must differ from each other")
    return Select(_checked(name), where, texts)


def _checked(name: object) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a name is a text, not {type(name).__name__}")
    return name


def _shape(
    regex: str | None,
    json_schema: str | dict[str, Any] | type | None,
    grammar: str | None,
    dtype: type | None,
) -> Shape | None:
    if dtype is not None:
        if dtype not in REGEX_OF_TYPE:
            raise ValueError(f"dtype must be int, float, bool or str, not {dtype!r}")
        return Shape("regex", REGEX_OF_TYPE[dtype])
    if regex is not None:
        return Shape("regex", regex)
    if grammar is not None:
        return Shape("grammar", grammar)
    if json_schema is None:
        return None
    if isinstance(json_schema, str):
        return Shape("json_schema", json_schema)
    if isinstance(json_schema, dict):
        return Shape("json_schema", json.dumps(json_schema))
    make: Any = getattr(json_schema, "model_json_schema", None)
    if make is None:
        raise TypeError("json_schema must be a schema, its JSON text, or a pydantic model")
    return Shape("json_schema", json.dumps(make()))
