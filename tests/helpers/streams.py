"""What a stream tells, put together for comparison with a whole answer."""

from __future__ import annotations

from typing import Any

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
"""A function for tests that only ask whether it is called."""


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a whole answer in the form of `put_together`."""
    message = choice.get("message", {})
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]
    return {
        "text": (choice["text"] if "text" in choice else message["content"]) or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": calls,
        "token_ids": choice.get("token_ids", []),
        "prompt_token_ids": choice.get("prompt_token_ids"),
        "prompt_logprobs": choice.get("prompt_logprobs"),
        "logprobs": choice["logprobs"],
        "finish_reason": choice["finish_reason"],
    }


def put_together(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that a stream tells of; nothing may come after a finish reason."""
    choices: dict[int, dict[str, Any]] = {}
    for told in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = told.get("delta", told)
        whole = choices.setdefault(
            told["index"], comparable({"text": "", "logprobs": None, "finish_reason": None})
        )
        assert whole["finish_reason"] is None, "a choice went on after its finish reason"
        whole["text"] += delta.get("text") or delta.get("content") or ""
        whole["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                whole["calls"].append((call["function"]["name"], ""))
            name, arguments = whole["calls"][call["index"]]
            whole["calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
        whole["token_ids"] += told.get("token_ids", [])
        whole["finish_reason"] = told["finish_reason"]
        for name in ("prompt_token_ids", "prompt_logprobs") if "text" in told else ():
            whole[name] = whole[name] or told.get(name)
        for name, values in (told["logprobs"] or {}).items():
            block = whole["logprobs"] = whole["logprobs"] or {}
            block[name] = values if values is None else [*block.get(name, []), *values]
    return choices
