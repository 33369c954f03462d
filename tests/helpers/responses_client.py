"""What tests of `/v1/responses` share."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from helpers.chat_templates import HERMES_TEMPLATE
from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import Live

RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CLOCK = {
    "type": "function",
    "name": "clock",
    "description": "Tells the time",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'


async def respond(live: Live, given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    status, answer = await live.post(RESPONSES, {"input": given} | fields)
    assert status == 200, answer
    Response.model_validate(answer, strict=True)
    return answer


async def refusal(live: Live, status: int, **fields: Any) -> dict[str, Any]:
    got, answer = await live.post(RESPONSES, {"input": "Hi"} | fields)
    assert (got, set(answer)) == (status, {"error"}), answer
    return answer["error"]


def hermes(script: Script) -> FakeEngine:
    return FakeEngine(script, template=HERMES_TEMPLATE)


def prompt_text(engine: FakeEngine, index: int = -1) -> str:
    """The prompt of a request, special tokens written out."""
    request = engine.made[index]
    return engine.tokenizer.decode(request.tokens[: request.num_prompt], skip_special_tokens=False)
