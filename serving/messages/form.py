"""The shape of an Anthropic message: the object, its blocks, and the events that a stream tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...engine.text import TokenText
from ..core.blocks import Block, Blocks, Change
from ..core.generation import Event, Generation
from ..http.errors import ApiError, anthropic_payload
from ..http.named_events import Told
from ..parsers.json_object import read_json

if TYPE_CHECKING:
    from ...engine.engine import Engine

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageForm:
    """A message while it comes in."""

    def __init__(self, engine: Engine, generation: Generation, blocks: Blocks):
        self._engine = engine
        self._generation = generation
        self._blocks = blocks
        self._begun = False

    def begin(self) -> Iterator[Told]:
        # A message begins with its usage, which is not known before something has been generated.
        return iter(())

    def add(self, event: Event) -> Iterator[Told]:
        yield from self._start()
        for change in self._blocks.add(event):
            yield self._changed(change)

    def end(self) -> Iterator[Told]:
        yield from self._start()
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[Told]:
        yield anthropic_payload(error)

    def answer(self) -> dict[str, Any]:
        content = [self._whole(block) for block in self._blocks.blocks]
        return self._message(content) | self._stop()

    def _start(self) -> Iterator[Told]:
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": self._message([])}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._engine.model_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        details = usage["prompt_tokens_details"]
        return {
            # What was read from the cache counts apart, by this protocol's rules.
            "input_tokens": usage["prompt_tokens"] - details["cached_tokens"],
            "cache_read_input_tokens": details["cached_tokens"],
            "cache_read_input_tokens_by_tier": details["cached_tokens_by_tier"],
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._blocks.reasoning_tokens},
        }

    def _stop(self) -> dict[str, Any]:
        blocks, params = self._blocks, self._generation.call.params
        sequence = None
        if blocks.finish_reason == "length" and len(blocks.token_ids) < params.max_tokens:
            reason = "model_context_window_exceeded"
        elif blocks.finish_reason in ("length", "abort"):
            reason = "max_tokens"
        elif any(block.kind == "call" for block in blocks.blocks):
            reason = "tool_use"
        else:
            sequence = self._stop_sequence()
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _stop_sequence(self) -> str | None:
        """The stop sequence that ended the answer. The engine leaves it out of the text, but not out of the tokens."""
        params = self._generation.call.params
        text = TokenText(self._engine.tokenizer, shown=params.shown_special_ids)
        written = "".join(text.append(token_id) for token_id in self._blocks.token_ids)
        rest = written[len(self._blocks.raw_text) :]
        # The first to be complete was the one that counted.
        return min((stop for stop in params.stop if rest.startswith(stop)), key=len, default=None)

    def _changed(self, change: Change) -> Told:
        index = change.block.index
        match change.kind:
            case "opened":
                return {"type": "content_block_start", "index": index, "content_block": _empty(change.block)}
            case "grew":
                kind, name = _DELTAS[change.block.kind]
                return {
                    "type": "content_block_delta",
                    "index": index,
                    "delta": {"type": kind, name: change.text},
                }
            case "closed":
                return {"type": "content_block_stop", "index": index}

    def _whole(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "text":
                return _empty(block) | {"text": block.text}
            case "reasoning":
                return _empty(block) | {"thinking": block.text}
            case "call":
                return _empty(block) | {"input": read_json(block.text)}


def _empty(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
