"""What callers may ask for. Every limit on parameters and prompts is here, checked before the engine sees a request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from .constraint import Constraint
from .request import SamplingParams

MAX_STOPS, MAX_STOP_CHARS = 32, 1024
MAX_STOP_IDS = 128
MAX_BIAS_ENTRIES = 300
MAX_INT32 = 2**31 - 1
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


class ParameterError(ValueError):
    """A caller's mistake. `param` names the field, `code` the kind of mistake where clients know one."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Range:
    """Legal numbers of one field of `SamplingParams`; `above` excludes the lower end."""

    field: str
    low: float
    high: float
    integer: bool = False
    above: bool = False
    optional: bool = False

    def check(self, value: object) -> None:
        if value is None and self.optional:
            return
        if isinstance(value, bool) or not isinstance(value, Integral if self.integer else Real):
            kind = "an integer" if self.integer else "a number"
            raise ParameterError(self.field, f"{self.field} must be {kind}, not {_shown(value)}")
        number = int(value) if isinstance(value, Integral) else float(value)
        # Written so that NaN fails.
        if not (self.low <= number <= self.high) or (self.above and not number > self.low):
            low = f"above {self.low}" if self.above else f"at least {self.low}"
            raise ParameterError(
                self.field, f"{self.field} must be {low} and at most {self.high}, not {_shown(value)}"
            )


RANGES = (
    Range("n", 1, 128, integer=True),
    Range("max_tokens", 0, MAX_INT32, integer=True),
    Range("min_tokens", 0, MAX_INT32, integer=True),
    Range("temperature", 0.0, 100.0),
    Range("top_p", 0.0, 1.0, above=True),
    Range("top_k", -1, MAX_INT32, integer=True),
    Range("min_p", 0.0, 1.0),
    Range("repetition_penalty", 0.0, 100.0, above=True),
    Range("frequency_penalty", -2.0, 2.0),
    Range("presence_penalty", -2.0, 2.0),
    Range("seed", -(2**63), 2**63 - 1, integer=True, optional=True),
    Range("logprobs", 0, 20, integer=True, optional=True),
    Range("prompt_logprobs", 0, 20, integer=True, optional=True),
    Range("prompt_logprobs_start", 1, MAX_INT32, integer=True),
)
FLAGS = ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos")
BIAS = Range("logit_bias", -100.0, 100.0)


def check_sampling(params: SamplingParams, *, vocab_size: int, allow_no_tokens: bool = False) -> None:
    """Raises `ParameterError` for the first field that is out of range or of a wrong type.

    `vocab_size` is the model's real vocabulary, not the padded width of its logits. `allow_no_tokens` lets
    max_tokens be 0, for calls that only echo the prompt; those that score it may have 0 anyhow.
    """
    for rule in RANGES:
        rule.check(getattr(params, rule.field))
    for field in FLAGS:
        value = getattr(params, field)
        if not isinstance(value, bool):
            raise ParameterError(field, f"{field} must be true or false, not {_shown(value)}")
    if params.max_tokens == 0 and params.prompt_logprobs is None and not allow_no_tokens:
        raise ParameterError("max_tokens", "max_tokens must be at least 1, not 0")
    if params.min_tokens > params.max_tokens:
        raise ParameterError(
            "min_tokens", f"min_tokens {params.min_tokens} is larger than max_tokens {params.max_tokens}"
        )
    _check_stops(params.stop)
    stop_ids = _sequence("stop_token_ids", params.stop_token_ids, MAX_STOP_IDS)
    for token_id in stop_ids:
        _check_id("stop_token_ids", token_id, vocab_size)
    _check_bias(params.logit_bias, vocab_size)
    if params.constraint is not None:
        _check_constraint(params)


def check_prompt(
    ids: Sequence[int],
    *,
    vocab_size: int,
    context_length: int,
    capacity_tokens: int,
    params: SamplingParams,
    param: str = "prompt",
) -> int:
    """The most tokens that prompt and output may reach together: max_tokens, clipped to context and KV capacity.

    `capacity_tokens` is what the KV pool holds for one request. Raises `ParameterError` (about `param`) with the
    numbers if the prompt is empty, has ids outside `[0, vocab_size)`, or leaves no room for one token.
    """
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise ParameterError(param, f"{param} must be a list of token ids, not {_shown(ids)}")
    if not ids:
        raise ParameterError(param, f"{param} is empty: at least one token is needed")
    for token_id in ids:
        if type(token_id) is not int or not (0 <= token_id < vocab_size):
            _check_id(param, token_id, vocab_size)
    limit = min(context_length, capacity_tokens)
    needed = len(ids) + min(1, params.max_tokens)
    if needed > limit:
        bound = "context length" if context_length <= capacity_tokens else "KV cache's capacity"
        room = " and one more to generate" if params.max_tokens else ""
        raise ParameterError(
            param,
            f"{param} has {len(ids)} tokens{room}, but the {bound} is {limit} tokens",
            code="context_length_exceeded",
        )
    return min(len(ids) + params.max_tokens, limit)


def check_messages(messages: object, *, param: str = "messages") -> None:
    """Raises `ParameterError` unless `messages` is a non-empty list of objects with known roles and sound content."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise ParameterError(param, f"{param} must be a list of messages, not {_shown(messages)}")
    if not messages:
        raise ParameterError(param, f"{param} is empty: at least one message is needed")
    for i, message in enumerate(messages):
        where = f"{param}[{i}]"
        if not isinstance(message, Mapping):
            raise ParameterError(
                where, f"{where} must be an object with role and content, not {_shown(message)}"
            )
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ParameterError(
                f"{where}.role", f"{where}.role {_shown(role)} is unknown; known: {', '.join(ROLES)}"
            )
        calls = message.get("tool_calls")
        if calls is not None and not (
            isinstance(calls, Sequence) and all(isinstance(c, Mapping) for c in calls)
        ):
            raise ParameterError(f"{where}.tool_calls", f"{where}.tool_calls must be a list of objects")
        if content is None and role == "assistant" and (calls or message.get("reasoning_content")):
            continue
        if not isinstance(content, (str, list, tuple)):
            raise ParameterError(
                f"{where}.content",
                f"{where}.content must be text or a list of text parts, not {_shown(content)}",
            )


def seed_for_choice(seed: int, index: int) -> int:
    """The seed of choice `index` of a request, in `[0, 2**63)`: choice 0 keeps the seed, others are derived from it."""
    mask = 2**63 - 1
    if index == 0:
        return seed & mask
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & mask


def _check_stops(stops: object) -> None:
    for stop in _sequence("stop", stops, MAX_STOPS):
        if not isinstance(stop, str):
            raise ParameterError("stop", f"stop must hold strings, not {_shown(stop)}")
        if not (1 <= len(stop) <= MAX_STOP_CHARS):
            raise ParameterError(
                "stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}"
            )


def _check_bias(bias: object, vocab_size: int) -> None:
    if not isinstance(bias, Mapping):
        raise ParameterError("logit_bias", f"logit_bias must map token ids to numbers, not be {_shown(bias)}")
    if len(bias) > MAX_BIAS_ENTRIES:
        raise ParameterError(
            "logit_bias", f"logit_bias has {len(bias)} entries, at most {MAX_BIAS_ENTRIES} are allowed"
        )
    for token_id, value in bias.items():
        _check_id("logit_bias", token_id, vocab_size)
        BIAS.check(value)


def _check_constraint(params: SamplingParams) -> None:
    if not isinstance(params.constraint, Constraint):
        raise ParameterError(
            "constraint",
            f"constraint must be a Constraint, such as Constraint.regex(...), not {_shown(params.constraint)}",
        )
    if params.max_tokens == 0:
        raise ParameterError(
            "constraint", "with max_tokens 0 there is no text that a constraint could hold for"
        )


def _check_id(field: str, value: object, vocab_size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterError(field, f"{field} must hold token ids, not {_shown(value)}")
    if not (0 <= int(value) < vocab_size):
        raise ParameterError(
            field, f"{field}: token id {_shown(value)} is outside the vocabulary of {vocab_size}"
        )


def _sequence(field: str, value: object, most: int) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise ParameterError(field, f"{field} must be a list, not {_shown(value)}")
    if len(value) > most:
        raise ParameterError(field, f"{field} has {len(value)} entries, at most {most} are allowed")
    return value


def _shown(value: object) -> str:
    """A value in a message; long ones are cut."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
