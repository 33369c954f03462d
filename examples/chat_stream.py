"""A chat over HTTP, streamed, that shows how much of each turn came from the cache. Start a server first:

    tierax serve demo                              (or: make serve)
    python examples/chat_stream.py [http://127.0.0.1:30000]

Only the standard library is used; any OpenAI client works the same way.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

TURNS = ["What is a lighthouse for?", "Who looks after it?", "Say it all again in one sentence."]


def stream(url: str, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """The chunks of one answer; the last one carries the usage."""
    body = {
        "messages": messages,
        "max_tokens": 80,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
    messages: list[dict[str, str]] = []
    for turn in TURNS:
        print(f"> {turn}")
        messages.append({"role": "user", "content": turn})
        answer = ""
        for chunk in stream(url.rstrip("/"), messages):
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                print(piece, end="", flush=True)
                answer += piece
            if usage := chunk.get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                print(f"\n  [{cached} of {usage['prompt_tokens']} prompt tokens from the cache]\n")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
