"""An agent with tools: every call sends the whole history again, and only what is new is computed. Start a server first:

    tierax serve demo                              (or: make serve)
    python examples/agent_loop.py [http://127.0.0.1:30000]

A schema holds every step of the model to a call of one of the tools, so that this works with models that were not trained for tools, as
the demo. Those that were take `tools` in the request: docs/http.md.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

SYSTEM = (
    "You look after a greenhouse with a northern and a southern bed. Tomatoes like 18 to 26 degrees and a soil moisture of 40 to "
    "70 per cent: below that, water them; above it, open the windows. You have these tools: temperature reads the thermometer of a "
    "bed, moisture reads the probe in its soil. Call one at a time by a line of JSON such as "
    '{"tool": "temperature", "bed": "north"}. When you know enough, say in one sentence what is to be done.'
)
TOOLS: dict[str, Callable[[str], str]] = {
    "temperature": lambda bed: f"The {bed}ern bed has 23.5 degrees.",
    "moisture": lambda bed: f"The soil of the {bed}ern bed has a moisture of 38 per cent.",
}


def call_schema(tools: list[str]) -> dict[str, Any]:
    """What a call looks like."""
    fields = {"tool": {"enum": tools}, "bed": {"enum": ["north", "south"]}}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


class Conversation:
    """The history, which only ever grows at its end, and the server that continues it."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._messages = [{"role": "system", "content": SYSTEM}]

    def say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def answer(self, **fields: Any) -> str:
        """The model's next message; `fields` of the request's body come on top."""
        body = {"messages": self._messages, "max_tokens": 96, "temperature": 0} | fields
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        usage, text = answer["usage"], answer["choices"][0]["message"]["content"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"{text}\n  [{cached} of {usage['prompt_tokens']} prompt tokens from the cache]")
        self._messages.append({"role": "assistant", "content": text})
        return text


def main() -> None:
    talk = Conversation(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
    talk.say("How is the southern bed?")
    left = list(TOOLS)
    while left:
        schema = {"name": "call", "schema": call_schema(left)}
        call = json.loads(talk.answer(response_format={"type": "json_schema", "json_schema": schema}))
        left.remove(call["tool"])
        reading = TOOLS[call["tool"]](call["bed"])
        print(f"> {reading}")
        talk.say(reading)
    talk.answer()


if __name__ == "__main__":
    main()
