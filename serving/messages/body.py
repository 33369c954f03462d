"""The body of `/v1/messages`: its type, every check that needs no tokenizer, and its messages as templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ...engine.constraint import Constraint
from ...engine.validate import MAX_STOP_CHARS, MAX_STOPS
from ..core.answer_form import AnswerForm, Schema, make_form
from ..core.conversation import Conversation
from ..core.tool_fields import AUTO, ToolChoice, check_tools, required_call
from ..http.errors import bad_request
from ..openai.bodies import check_salt, decode

Message = dict[str, Any]

_SKIPPED_THINKING = "redacted_thinking"
"""Cannot be read by anybody but those who wrote it."""


class _Refused(msgspec.Struct, kw_only=True):
    """Fields whose meaning this server cannot honour: refused by name unless they ask for nothing."""

    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None


class Thinking(msgspec.Struct):
    """`thinking` of a body. A budget is no more than a wish here."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON that fits a schema."""

    schema: Schema


class OutputConfig(msgspec.Struct):
    """`output_config` of a body."""

    format: SchemaFormat | None = None
    effort: str | None = None


class CountBody(_Refused, kw_only=True):
    """Body of `/v1/messages/count_tokens`. `null` means the same as leaving a field away."""

    messages: list[Any]
    model: str | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    """Older place of `output_config.format`."""


class MessagesBody(CountBody, kw_only=True):
    """Body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    cache_control: Any = None
    service_tier: str | None = None

    seed: int | None = None
    min_p: float | None = None
    cache_salt: str | None = None
    prefetch_policy: str | None = None
    priority: int | None = None

    @property
    def stop(self) -> list[str] | None:
        """The stop sequences under the name that they have elsewhere."""
        return self.stop_sequences


def decode_messages(body: bytes) -> MessagesBody:
    """Parses and checks a body. Raises `ApiError` 400."""
    found = decode(body, MessagesBody)
    _check(found)
    if found.max_tokens < 1:
        raise bad_request("max_tokens must be at least 1.", "max_tokens")
    stops = found.stop_sequences or []
    if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        message = f"stop_sequences may have {MAX_STOPS} entries, each of 1 to {MAX_STOP_CHARS} characters."
        raise bad_request(message, "stop_sequences")
    check_salt(found.cache_salt)
    if found.priority is not None and not -(2**31) <= found.priority < 2**31:
        raise bad_request("priority must fit 32 bits.", "priority")
    return found


def decode_count(body: bytes) -> CountBody:
    """Parses and checks the body of a count. Raises `ApiError` 400."""
    found = decode(body, CountBody)
    _check(found)
    return found


def conversation_of(body: CountBody) -> Conversation:
    """What the chat template is given. Raises `ApiError` 400 for what cannot be done or enforced.

    A last message of the assistant is to be completed.
    """
    messages = _messages(body)
    last = messages[-1]
    if last.get("tool_calls"):
        raise bad_request("messages: the last one calls tools; add their results.", "messages")
    completing = last["role"] == "assistant"
    tools = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    check_tools(tools, inside="")
    variables = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    return Conversation(
        messages=messages,
        tools=tools,
        choice=_choice(body, [tool["function"]["name"] for tool in tools]),
        parallel=not (body.tool_choice or {}).get("disable_parallel_tool_use"),
        form=_form(body),
        variables=variables,
        parameters=".input_schema",
        add_generation_prompt=not completing,
        continue_final_message=completing,
    )


def _choice(body: CountBody, offered: Sequence[str]) -> ToolChoice:
    match body.tool_choice:
        case None | {"type": "auto"}:
            return AUTO
        case {"type": "none"}:
            return ToolChoice("none")
        case {"type": "any"}:
            return required_call(None, offered)
        case {"type": "tool", "name": str(name)}:
            return required_call([name], offered)
        case _:
            message = "tool_choice must be of type auto, none or any, or of type tool with its name."
            raise bad_request(message, "tool_choice")


def _form(body: CountBody) -> AnswerForm | None:
    config = body.output_config and body.output_config.format
    if config is not None and body.output_format is not None:
        message = (
            "output_config.format and output_format each say what the answer must match: give one of them."
        )
        raise bad_request(message, "output_format")
    asked = config or body.output_format
    if asked is None:
        return None
    param = "output_format" if config is None else "output_config.format"
    return make_form(param, lambda: Constraint.json_schema(asked.schema))


def _messages(body: CountBody) -> list[Message]:
    """Messages for a chat template; turns of one side in a row become one."""
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise bad_request(f"{where} must be an object.", where)
        match message.get("role"):
            case "user":
                _add_user(messages, _blocks(message.get("content"), where), where)
            case "assistant":
                _add_assistant(messages, _blocks(message.get("content"), where), where)
            case "system":
                text = _text(message.get("content"), f"{where}.content")
                messages.append({"role": "system", "content": text})
            case _:
                raise bad_request(f"{where}.role must be user, assistant or system.", f"{where}.role")
    if not messages:
        raise bad_request("messages must not be empty.", "messages")
    return messages


def _check(body: CountBody) -> None:
    for name in _Refused.__struct_fields__:
        if getattr(body, name) not in (None, False, "", [], {}):
            raise bad_request(f"{name} is not supported by this server.", name, "unsupported_parameter")


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_request(f"{where} must be an object.", where)
    if (kind := tool.get("type")) not in (None, "custom"):
        message = f"{where}: tools of type {str(kind)[:80]!r} are not supported, only your own are."
        raise bad_request(message, f"{where}.type", "unsupported_parameter")
    function: dict[str, Any] = {"name": _string(tool, "name", where)}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", where)
    if not isinstance(tool.get("input_schema"), dict):
        raise bad_request(f"{where}.input_schema must be an object.", f"{where}.input_schema")
    function["parameters"] = tool["input_schema"]
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a text or a list of blocks.", f"{where}.content")
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise bad_request(f"{where}.content[{i}] must be an object.", f"{where}.content[{i}]")
    return content


def _add_user(messages: list[Message], blocks: Sequence[dict[str, Any]], where: str) -> None:
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        match block.get("type"):
            case "text":
                _append_text(messages, "user", _string(block, "text", place))
            case "tool_result":
                content = _text(block.get("content") or "", f"{place}.content")
                call_id = _string(block, "tool_use_id", place)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case kind:
                raise _unsupported(kind, place)


def _add_assistant(messages: list[Message], blocks: Sequence[dict[str, Any]], where: str) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        match block.get("type"):
            case "text":
                _append_text(messages, "assistant", _string(block, "text", place))
            case "thinking":
                thought = _string(block, "thinking", place)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case "tool_use":
                turn.setdefault("tool_calls", []).append(_call(block, place))
            case kind if kind != _SKIPPED_THINKING:
                raise _unsupported(kind, place)


def _append_text(messages: list[Message], role: str, text: str) -> None:
    """Adds text to the message at the end, or begins a message of this role."""
    if messages and messages[-1]["role"] == role:
        before = messages[-1]["content"]
        messages[-1]["content"] = f"{before}\n{text}" if before else text
    else:
        messages.append({"role": role, "content": text})


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        raise bad_request(f"{where}.input must be an object.", f"{where}.input")
    arguments = msgspec.json.encode(block["input"]).decode()
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of text blocks.", where)
    texts = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(block, dict):
            raise bad_request(f"{place} must be an object.", place)
        if block.get("type") != "text":
            raise _unsupported(block.get("type"), place)
        texts.append(_string(block, "text", place))
    return "\n".join(texts)


def _string(value: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(value.get(name), str):
        raise bad_request(f"{where}.{name} must be a text.", f"{where}.{name}")
    return value[name]


def _unsupported(kind: Any, where: str) -> Exception:
    message = f"{where}: blocks of type {str(kind)[:80]!r} are not supported here."
    return bad_request(message, f"{where}.type", "unsupported_parameter")
