"""Plain transformers behind OpenAI's chat protocol, streamed; run by an interpreter that has it, and knows nothing of tierax.

python transformers_server.py MODEL PORT. Requests are answered one at a time, each prompt is computed in full: what one gets without
a serving engine.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

NAME = "transformers"


class Model:
    """Weights in float32, greedy decoding, one request at a time."""

    def __init__(self, path: str) -> None:
        options: dict[str, Any] = {}
        if path.endswith(".gguf"):
            path, options["gguf_file"] = os.path.split(path)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa", **options
        ).eval()
        self._turn = threading.Lock()

    def encode(self, messages: list[dict[str, str]]) -> Any:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    def tokens(self, ids: Any, most: int) -> Any:
        """The token ids of the answer, one by one; all of `most`, whatever they are."""
        with self._turn, torch.inference_mode():
            output = self._model(ids, use_cache=True, logits_to_keep=1)
            for place in range(most):
                following = output.logits[:, -1:].argmax(-1)
                yield int(following)
                if place < most - 1:
                    output = self._model(following, past_key_values=output.past_key_values, use_cache=True)


class Handler(BaseHTTPRequestHandler):
    """`/v1/models`, and `/v1/chat/completions` as a stream."""

    model: Model
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(json.dumps({"object": "list", "data": [{"id": NAME, "object": "model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = self.model.encode(body["messages"])
        self._begin("text/event-stream")
        shown, made = "", []
        for token in self.model.tokens(ids, body["max_tokens"]):
            made.append(token)
            text = self.model.tokenizer.decode(made)
            self._send({"choices": [{"index": 0, "delta": {"content": text[len(shown) :] or "\u200b"}}]})
            shown = text
        usage = {"prompt_tokens": ids.shape[1], "completion_tokens": len(made)}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _send(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()


if __name__ == "__main__":
    torch.manual_seed(0)
    Handler.model = Model(sys.argv[1])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
