"""Reads streams whose events have names, as OpenAI's Responses and Anthropic's Messages send them."""

from __future__ import annotations

import json
from typing import Any

from helpers.live_server import Live


def named_events_of(text: str) -> list[dict[str, Any]]:
    """The events' data; each event's name must be the type in it."""
    *blocks, rest = text.split("\n\n")
    assert rest == "", text[-300:]
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def stream_events(live: Live, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """All events of a streamed answer."""
    async with live.session.post(live.url + path, json=body | {"stream": True}, **options) as response:
        text = await response.text()
        assert response.status == 200, text
        assert response.content_type == "text/event-stream"
        return named_events_of(text)
