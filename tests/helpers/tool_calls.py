"""Functions to call, models of two kinds that call them, and what was called."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from helpers.chat_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import Live


class City(BaseModel):
    name: str
    people: int


CITY = '{"name":"Köln","people":1085664}'


def tool(name: str, strict: bool | None = None, **parameters: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if parameters:
        function["parameters"] = {"type": "object", "additionalProperties": False, **parameters}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


WEATHER = tool("weather", properties={"city": {"type": "string"}}, required=["city"])
CLOCK = tool("clock")
TOOLS = [WEATHER, CLOCK]


def hermes(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(say(text), template=HERMES_TEMPLATE, **options)


def llama3(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(say(text), template=LLAMA3_TEMPLATE, **options)


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    told = answer["choices"][0]["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in told]


def written(live: Live) -> str:
    """What the model wrote in its last answer."""
    request = live.engine.made[-1]
    return live.engine.tokenizer.decode(request.tokens[request.num_prompt :])
