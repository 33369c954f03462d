"""What bodies say about tools: functions on offer, whether they may be called, and calls of earlier answers."""

from __future__ import annotations

import re
from typing import Any

from ..http.errors import bad_request

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


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
        if function.get("strict"):
            message = f"{where}.strict: this server cannot hold a model to a schema; leave it away."
            raise bad_request(message, f"{where}.strict", "unsupported_parameter")


def may_call(tool_choice: Any) -> bool:
    """Whether answers may hold calls. Raises `ApiError` 400 for a choice that would have to be enforced."""
    if tool_choice in (None, "auto"):
        return True
    if tool_choice == "none":
        return False
    if tool_choice == "required" or (isinstance(tool_choice, dict) and "type" in tool_choice):
        message = "tool_choice: this server cannot make a model call a function; auto and none are supported."
        raise bad_request(message, "tool_choice", "unsupported_parameter")
    raise bad_request("tool_choice must be auto or none.", "tool_choice")


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
