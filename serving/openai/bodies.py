"""Bodies of the OpenAI-style endpoints: their types, and every check that needs no tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from ...engine.prefetch_policy import PrefetchPolicy
from ...engine.request import SamplingParams
from ...engine.validate import MAX_BIAS_ENTRIES, check_messages
from ..core.answer_form import Formed
from ..core.tool_fields import check_calls, check_tools
from ..http.errors import bad_request

log = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 20


class StreamOptions(msgspec.Struct):
    """`stream_options` of a body."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Unsupported(Formed, kw_only=True):
    """Fields whose meaning this server cannot honour: refused by name unless they ask for nothing."""

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    logits_processors: Any = None


_REFUSED = tuple(name for name in _Unsupported.__struct_fields__ if name not in Formed.__struct_fields__)


class Common(_Unsupported, kw_only=True):
    """What chat and completions bodies share. `null` means the same as leaving a field away."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    prefetch_policy: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None


class ChatBody(Common, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Prompts = str | list[str | int | list[int]]
"""A text, token ids, or a list of one of these kinds."""


class CompletionBody(Common, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


def decode_chat(body: bytes) -> ChatBody:
    """Parses and checks a chat body; messages come out with plain string contents.

    Raises `ApiError` 400 or `ParameterError`.
    """
    chat = decode(body, ChatBody)
    _check_common(chat)
    chat.messages = plain_messages(chat.messages)
    check_tools(chat.tools or [])
    if chat.store:
        message = "store is not supported: chat answers are not kept; /v1/responses keeps its own."
        raise bad_request(message, "store", "unsupported_parameter")
    if chat.top_logprobs is not None:
        if not 0 <= chat.top_logprobs <= MAX_TOP_LOGPROBS:
            raise bad_request(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs")
        if chat.top_logprobs and not chat.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
    if chat.max_tokens is not None and chat.max_tokens < 1:
        raise bad_request("max_tokens must be at least 1.", "max_tokens")
    if chat.max_completion_tokens is not None and chat.max_completion_tokens < 1:
        raise bad_request("max_completion_tokens must be at least 1.", "max_completion_tokens")
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other."
            raise bad_request(message, "continue_final_message")
        if chat.messages[-1]["role"] != "assistant":
            message = "continue_final_message needs a last message of the assistant."
            raise bad_request(message, "continue_final_message")
    return chat


def decode_completion(body: bytes) -> CompletionBody:
    """Parses and checks a completions body. Raises `ApiError` 400."""
    completion = decode(body, CompletionBody)
    _check_common(completion)
    n = 1 if completion.n is None else completion.n
    if completion.best_of is not None and completion.best_of < n:
        raise bad_request(f"best_of must be at least n ({n}).", "best_of")
    if completion.best_of is not None and completion.best_of > n and completion.stream:
        message = "best_of above n cannot be streamed: which choices are the best is known at the end."
        raise bad_request(message, "best_of")
    return completion


def prompts_of(prompt: Prompts, param: str = "prompt") -> list[str | list[int]]:
    """The prompts of a body's field, each a text or token ids that are not empty, in order. Raises `ApiError` 400."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt or not all(part or isinstance(part, int) for part in prompt):
        raise bad_request(f"{param} must not be empty.", param)
    if all(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if isinstance(part, int)]]
    prompts = [part for part in prompt if not isinstance(part, int)]
    if len({type(part) for part in prompts}) != 1 or len(prompts) != len(prompt):
        raise bad_request(f"{param} must be a text, token ids, or a list of one of these kinds.", param)
    return prompts


def sampling_params(body: msgspec.Struct, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """The sampling fields that the body has, in the engine's terms; ranges are checked by the engine."""
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
    for name in _COPIED:
        value = getattr(body, name, None)
        if value is not None:
            setattr(params, name, value)
    stop: str | list[str] | None = getattr(body, "stop", None)
    if stop is not None:
        params.stop = [stop] if isinstance(stop, str) else stop
    logit_bias: dict[str, float] = getattr(body, "logit_bias", None) or {}
    if len(logit_bias) > MAX_BIAS_ENTRIES:
        message = f"logit_bias has {len(logit_bias)} entries, at most {MAX_BIAS_ENTRIES} are allowed."
        raise bad_request(message, "logit_bias")
    for key, bias in logit_bias.items():
        if not re.fullmatch(r"-?\d{1,18}", key, re.ASCII):
            raise bad_request(f"logit_bias: {key[:40]!r} is not a token id.", "logit_bias")
        params.logit_bias[int(key)] = bias
    return params


class Waiting(Protocol):
    """A body that may say how long to wait for the disk."""

    @property
    def prefetch_policy(self) -> str | None: ...


def prefetch_policy(body: Waiting) -> PrefetchPolicy | None:
    """How long the call waits for the disk; None = as the server does. Raises `ApiError` 400."""
    if body.prefetch_policy is None:
        return None
    try:
        return PrefetchPolicy.parse(body.prefetch_policy)
    except ValueError as error:
        raise bad_request(f"{error}.", "prefetch_policy") from None


_COPIED = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    "prompt_logprobs",
)

_Body = TypeVar("_Body", bound=msgspec.Struct)
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """Parses a JSON body; fields that `kind` does not know are ignored. Raises `ApiError` 400."""
    if not body:
        raise bad_request("The body is empty; send a JSON object.")
    try:
        value = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body's JSON is nested too deeply.", code="invalid_json") from None
    if log.isEnabledFor(logging.DEBUG):
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
        if unknown := sorted(names - set(kind.__struct_fields__)):
            log.debug("fields ignored: %s", ", ".join(name[:40] for name in unknown[:20]))
    return value


def _wrong_type(text: str) -> Exception:
    match = _AT.fullmatch(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    path = path.removesuffix("[...]")
    if missing := _MISSING.fullmatch(what):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{param} is missing.", param)
    return bad_request(
        f"{path or 'body'}: {what[:1].lower()}{what[1:].replace(' | null', '')}.", path or None
    )


def _check_common(body: Common) -> None:
    for name in _REFUSED:
        value = getattr(body, name)
        if value is None or value is False or value in ("", [], {}):
            continue
        if (allowed := _HARMLESS.get(name)) is not None and allowed(body, value):
            continue
        raise bad_request(f"{name} is not supported by this server.", name, "unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true.", "stream_options")
    check_salt(body.cache_salt)
    check_truncation(body.truncate_prompt_tokens)
    check_priority(body.priority)


def check_truncation(keep: int | None) -> None:
    """Raises `ApiError` 400 for a number of tokens that no prompt can be cut to."""
    if keep is not None and not -1 <= keep != 0:
        message = "truncate_prompt_tokens must be at least 1, or -1 for as many as leave room for an answer."
        raise bad_request(message, "truncate_prompt_tokens")


def check_priority(priority: int | None) -> None:
    """Raises `ApiError` 400 for a priority out of range."""
    if priority is not None and not -(2**31) <= priority < 2**31:
        raise bad_request("priority must fit 32 bits.", "priority")


def check_salt(cache_salt: str | None) -> None:
    """Raises `ApiError` 400 for an empty salt, which could be meant either way."""
    if cache_salt == "":
        raise bad_request("cache_salt must not be empty; leave it away to share the cache.", "cache_salt")


_HARMLESS: dict[str, Callable[[Common, Any], bool]] = {
    "functions": lambda body, _: body.function_call == "none",
    "function_call": lambda body, value: value == "none" or (value == "auto" and not body.functions),
    "modalities": lambda _, value: value == ["text"],
}


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain string contents. Raises `ApiError` 400 or `ParameterError`."""
    check_messages(messages)
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    check_calls(message, where)
    if not isinstance(message.get("reasoning_content", ""), str | None):
        raise bad_request(f"{where}.reasoning_content must be a text.", f"{where}.reasoning_content")
    # "developer" is the newer spelling of "system", which is what models' templates know.
    return {**message, "role": "system" if role == "developer" else role, "content": content or ""}


def _text_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad_request(f"{where} must be an object.", where)
    if part.get("type") != "text":
        raise bad_request(
            f"{where}: only text parts are supported.", f"{where}.type", "unsupported_parameter"
        )
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text must be a text.", f"{where}.text")
    return part["text"]
