"""The body of `/v1/responses`: its type, and every check that needs no tokenizer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...engine.constraint import Constraint
from ...engine.validate import MAX_INT32
from ..core.answer_form import AnswerForm, JsonObjectFormat, Schema, TextFormat, make_form
from ..core.conversation import Conversation, template_variables
from ..core.tool_fields import check_tools, tool_choice
from ..http.errors import bad_request
from ..openai.bodies import MAX_TOP_LOGPROBS, check_salt, decode
from .items import Message

LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""What may be included. Reasoning is always told in plain, which serves the purpose of the second."""
_MOST_METADATA, _KEY_LENGTH, _VALUE_LENGTH = 16, 64, 512


class _Refused(msgspec.Struct, kw_only=True):
    """Fields whose meaning this server cannot honour: refused by name unless they ask for nothing."""

    background: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    max_tool_calls: Any = None


class Reasoning(msgspec.Struct):
    """`reasoning` of a body."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class SchemaFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that fits a schema."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """`text` of a body."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(_Refused, kw_only=True):
    """Body of `/v1/responses`. `null` means the same as leaving a field away."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    prefetch_policy: str | None = None
    priority: int | None = None

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each; None = no log-probs at all."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def effort(self) -> str | None:
        """How much to reason."""
        return None if self.reasoning is None else self.reasoning.effort


def decode_responses(body: bytes) -> ResponsesBody:
    """Parses and checks a body. Raises `ApiError` 400."""
    found = decode(body, ResponsesBody)
    for name in _Refused.__struct_fields__:
        value = getattr(found, name)
        if value is not None and value is not False and value not in ("", [], {}):
            raise bad_request(f"{name} is not supported by this server.", name, "unsupported_parameter")
    check_salt(found.cache_salt)
    if found.max_output_tokens is not None and not 1 <= found.max_output_tokens <= MAX_INT32:
        raise bad_request(f"max_output_tokens must be from 1 to {MAX_INT32}.", "max_output_tokens")
    if found.truncation not in (None, "auto", "disabled"):
        raise bad_request("truncation must be auto or disabled.", "truncation")
    for name in found.include or ():
        if name not in _INCLUDES:
            known = ", ".join(_INCLUDES)
            raise bad_request(f"include: {name[:80]!r} is not supported; known: {known}.", "include")
    if found.top_logprobs is not None:
        if not 0 <= found.top_logprobs <= MAX_TOP_LOGPROBS:
            raise bad_request(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs")
        if found.top_logprobs and found.logprobs is None:
            raise bad_request(f"top_logprobs needs include: [{LOGPROBS!r}].", "top_logprobs")
    if found.priority is not None and not -(2**31) <= found.priority < 2**31:
        raise bad_request("priority must fit 32 bits.", "priority")
    _check_metadata(found)
    return found


def conversation_of(body: ResponsesBody, messages: list[Message]) -> Conversation:
    """What the chat template is given, instructions first. Raises `ApiError` 400 for what cannot be done or enforced."""
    head: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    tools = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    check_tools(tools, inside="")
    return Conversation(
        messages=head + messages,
        tools=tools,
        choice=tool_choice(body.tool_choice, [tool["function"]["name"] for tool in tools]),
        parallel=body.parallel_tool_calls is not False,
        form=_form(body),
        variables=template_variables(body.chat_template_kwargs, body.effort),
        parameters=".parameters",
        param="input",
    )


def _form(body: ResponsesBody) -> AnswerForm | None:
    match body.text and body.text.format:
        case SchemaFormat(schema=schema):
            return make_form("text.format", lambda: Constraint.json_schema(schema))
        case JsonObjectFormat():
            return make_form("text.format", Constraint.json_object)
        case _:
            return None


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_request(f"{where} must be an object.", where)
    if (kind := tool.get("type")) != "function":
        message = f"{where}: tools of type {str(kind)[:80]!r} are not supported, only functions are."
        raise bad_request(message, f"{where}.type", "unsupported_parameter")
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {x: tool[x] for x in fields if tool.get(x) is not None}}


def _check_metadata(body: ResponsesBody) -> None:
    metadata = body.metadata or {}
    if len(metadata) > _MOST_METADATA:
        raise bad_request(f"metadata may have {_MOST_METADATA} entries, not {len(metadata)}.", "metadata")
    if any(len(key) > _KEY_LENGTH or len(value) > _VALUE_LENGTH for key, value in metadata.items()):
        message = f"metadata: keys may have {_KEY_LENGTH} characters, values {_VALUE_LENGTH}."
        raise bad_request(message, "metadata")
