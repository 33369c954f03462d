"""Input items of `/v1/responses` as messages for chat templates, and as the list that clients may read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..http.errors import bad_request

Item = dict[str, Any]
Message = dict[str, Any]

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
"""Role of an item -> role in templates."""
_TEXTS = ("input_text", "output_text", "text")


def listed_items(given: str | Sequence[Any]) -> list[Item]:
    """The input as items, each an object with a type and an id.

    Raises `ApiError` 400.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise bad_request("input must not be empty.", "input")
    return [_listed(item, f"input[{i}]", f"item-{i}") for i, item in enumerate(given)]


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Messages for a chat template. What an assistant thinks, says and calls in a row becomes one message.

    Raises `ApiError` 400, naming the item at fault.
    """
    messages: list[Message] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item["type"]:
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                turn = _assistant_turn(messages, taken="content")
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _thought(item, where)
            case "function_call":
                _assistant_turn(messages).setdefault("tool_calls", []).append(_call(item, where))
            case "function_call_output":
                output = _text(item.get("output"), f"{where}.output")
                call_id = _string(item, "call_id", where)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case kind:
                message = f"{where}: items of type {kind[:80]!r} are not supported."
                raise bad_request(message, f"{where}.type", "unsupported_parameter")
    for message in messages:
        if message["role"] == "assistant":
            # Templates look at every message's content.
            message.setdefault("content", "")
    return messages


def _listed(item: Any, where: str, item_id: str) -> Item:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object.", where)
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str):
        raise bad_request(f"{where}.type is missing.", f"{where}.type")
    given_id = item.get("id")
    listed = item | {"type": kind, "id": given_id if given_id and isinstance(given_id, str) else item_id}
    if kind == "message":
        listed["content"] = _listed_content(item.get("content"), written=item.get("role") == "assistant")
    if kind in ("function_call", "function_call_output") or item.get("role") == "assistant":
        listed.setdefault("status", "completed")
    if kind == "reasoning":
        listed.setdefault("summary", [])
    return listed


def _listed_content(content: Any, *, written: bool) -> Any:
    if isinstance(content, str):
        content = [{"type": "output_text" if written else "input_text", "text": content}]
    if not isinstance(content, list) or not written:
        return content
    return [{"annotations": []} | part if isinstance(part, dict) else part for part in content]


def _add_message(messages: list[Message], item: Item, where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise bad_request(f"{where}.role must be one of {known}.", f"{where}.role")
    text = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        _assistant_turn(messages, taken="content")["content"] = text
    else:
        messages.append({"role": _ROLES[role], "content": text})


def _assistant_turn(messages: list[Message], taken: str | None = None) -> Message:
    """The assistant's message at the end; a new one if there is none, or if it has called something or has `taken`."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] == "assistant" and (taken is None or not (taken in last or "tool_calls" in last)):
        return last
    messages.append({"role": "assistant"})
    return messages[-1]


def _call(item: Item, where: str) -> Item:
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _thought(item: Item, where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise bad_request(f"{where}.content must be a list.", f"{where}.content")
    return "".join(
        _part_text(part, f"{where}.content[{i}]", ("reasoning_text", "summary_text"))
        for i, part in enumerate(parts)
    )


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of text parts.", where)
    return "\n".join(_part_text(part, f"{where}[{i}]", _TEXTS) for i, part in enumerate(content))


def _part_text(part: Any, where: str, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        raise bad_request(f"{where} must be an object.", where)
    if (kind := part.get("type")) == "refusal":
        return _string(part, "refusal", where)
    if kind not in kinds:
        message = f"{where}: parts of type {str(kind)[:80]!r} are not supported."
        raise bad_request(message, f"{where}.type", "unsupported_parameter")
    return _string(part, "text", where)


def _string(value: Item, name: str, where: str) -> str:
    if not isinstance(value.get(name), str):
        raise bad_request(f"{where}.{name} must be a text.", f"{where}.{name}")
    return value[name]
