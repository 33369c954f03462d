"""What bodies say about tools: functions on offer, whether they may be called, and calls of earlier answers."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from ..http.errors import bad_request

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether answers may call functions, must, or must not."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: frozenset[str] | None = None
    """The functions to choose from; None = all on offer."""

    @property
    def may_call(self) -> bool:
        """With `none` the tools stand in the prompt, whose beginning stays the same, but answers are not read for calls."""
        return self.mode != "none"

    @property
    def single(self) -> bool:
        """One function was named: it is called once."""
        return self.mode == "required" and self.names is not None and len(self.names) == 1


AUTO = ToolChoice()


def check_tools(tools: list[dict[str, Any]], param: str = "tools", *, inside: str = ".function") -> None:
    """Raises `ApiError` 400, naming the field below `param`, unless these are functions in OpenAI's chat form.

    `inside`: where the client's body has a function's fields, below the tool.
    """
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"{param} has {len(tools)} entries, at most {MAX_TOOLS} are allowed.", param)
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"{param}[{i}]"
        if tool.get("type") != "function":
            message = f"{where}.type must be function; tools of other types are not supported."
            raise bad_request(message, f"{where}.type", "unsupported_parameter")
        where = f"{where}{inside}"
        function = _object(tool.get("function"), where)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"{where}.name must have 1 to 128 letters, digits, underscores, points or hyphens."
            raise bad_request(message, f"{where}.name")
        if name in names:
            raise bad_request(f"{where}.name: {name} is there twice.", f"{where}.name")
        names.add(name)
        if not isinstance(function.get("description", ""), str | None):
            raise bad_request(f"{where}.description must be a text.", f"{where}.description")
        if function.get("parameters") is not None:
            _object(function["parameters"], f"{where}.parameters")
        if not isinstance(function.get("strict", False), bool | None):
            raise bad_request(f"{where}.strict must be true or false.", f"{where}.strict")


def tool_choice(value: Any, offered: Collection[str]) -> ToolChoice:
    """`tool_choice` of an OpenAI body, with the names of the functions on offer. Raises `ApiError` 400."""
    match value:
        case None | "auto":
            return AUTO
        case "none":
            return ToolChoice("none")
        case "required":
            return required_call(None, offered)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return required_call([name], offered)
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed(allowed, offered)
        case {"type": "allowed_tools"}:
            return _allowed(value, offered)
        case _:
            message = "tool_choice must be auto, none, required, or name a function or the allowed tools."
            raise bad_request(message, "tool_choice")


def required_call(names: Collection[str] | None, offered: Collection[str]) -> ToolChoice:
    """One of the functions has to be called (None: any). Raises `ApiError` 400 when it is not on offer."""
    if not offered:
        raise bad_request("tool_choice: there are no tools to choose from.", "tool_choice")
    return ToolChoice("required", _known(names, offered))


def _allowed(allowed: dict[str, Any], offered: Collection[str]) -> ToolChoice:
    """Only some of the tools may be called, or must be."""
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        message = "tool_choice: allowed_tools needs a mode (auto or required) and a list of tools."
        raise bad_request(message, "tool_choice")
    names = []
    for tool in tools:
        match tool:
            case {"function": {"name": str(name)}} | {"name": str(name)}:
                names.append(name)
            case _:
                raise bad_request("tool_choice: each allowed tool needs a name.", "tool_choice")
    if not names and mode == "auto":
        return ToolChoice("none")
    if not names:
        raise bad_request("tool_choice: there are no tools to choose from.", "tool_choice")
    return ToolChoice(mode, _known(names, offered))


def _known(names: Collection[str] | None, offered: Collection[str]) -> frozenset[str] | None:
    for name in names or ():
        if name not in offered:
            raise bad_request(f"tool_choice: there is no tool {name[:100]!r}.", "tool_choice")
    return None if names is None else frozenset(names)


def check_calls(message: dict[str, Any], where: str) -> None:
    """Raises `ApiError` 400 when a message's `tool_calls` are none of functions, or its `tool_call_id` is no text."""
    for i, call in enumerate(message.get("tool_calls") or []):
        at = f"{where}.tool_calls[{i}]"
        if call.get("type", "function") != "function":
            raise bad_request(f"{at}.type must be function.", f"{at}.type", "unsupported_parameter")
        function = _object(call.get("function"), f"{at}.function")
        if not isinstance(function.get("name"), str):
            raise bad_request(f"{at}.function.name must be a text.", f"{at}.function.name")
        if not isinstance(function.get("arguments", ""), str | dict):
            raise bad_request(f"{at}.function.arguments must be JSON text.", f"{at}.function.arguments")
    if not isinstance(message.get("tool_call_id", ""), str | None):
        raise bad_request(f"{where}.tool_call_id must be a text.", f"{where}.tool_call_id")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object.", where)
    return value
