"""The shape of a response: the object, its items, and the events that a stream tells of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ...engine.request import TokenLogprob
from ..core.blocks import Block, Blocks, Change
from ..core.generation import Event, Generation
from ..http.errors import ApiError
from ..http.named_events import Told
from ..openai.logprobs import chat_logprobs
from .body import ResponsesBody
from .items import Item

if TYPE_CHECKING:
    from ...engine.engine import Engine

_STATUSES = {"length": "incomplete", "abort": "cancelled"}
"""Finish reason -> status; any other is `completed`."""
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}


class ResponseForm:
    """A response while it comes in. `now` is the wall clock, in seconds since 1970."""

    def __init__(
        self,
        engine: Engine,
        body: ResponsesBody,
        generation: Generation,
        blocks: Blocks,
        now: Callable[[], float],
    ):
        self.blocks = blocks
        self._engine = engine
        self._body = body
        self._generation = generation
        self._now = now
        self._created = int(now())
        self._completed: int | None = None
        self._count = 0

    def begin(self) -> Iterator[Told]:
        response = self.response("in_progress")
        yield self._told("response.created", response=response)
        yield self._told("response.in_progress", response=response)

    def add(self, event: Event) -> Iterator[Told]:
        for change in self.blocks.add(event):
            yield from self._changed(change)

    def end(self) -> Iterator[Told]:
        response = self.answer()
        # There is no event of its own for a cancelled one.
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield self._told(f"response.{kind}", response=response)

    def fail(self, error: ApiError) -> Iterator[Told]:
        problem = {"code": "server_error", "message": error.message}
        yield self._told("response.failed", response=self.response("failed") | {"error": problem})

    def answer(self) -> dict[str, Any]:
        if self._completed is None:
            self._completed = int(self._now())
        return self.response(_STATUSES.get(self.blocks.finish_reason or "", "completed"))

    def response(self, status: str) -> dict[str, Any]:
        """The response as far as it has come."""
        body = self._body
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._engine.model_name,
            "output": [self._item(block) for block in self.blocks.blocks],
            "usage": None if status == "in_progress" else self._usage(),
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "tools": [_told_tool(tool) for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": _text_format(body)},
            "reasoning": {"effort": body.effort, "summary": None},
            "store": body.store is not False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            # Writing to the cache is not something that a client asks for, or pays.
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.blocks.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _changed(self, change: Change) -> Iterator[Told]:
        block = change.block
        item_id = self._item_id(block)
        item = {"output_index": block.index, "item_id": item_id}
        part = item | {"content_index": 0}
        match change.kind, block.kind:
            case "opened", kind:
                yield self._told(
                    "response.output_item.added", output_index=block.index, item=self._new_item(block)
                )
                if kind != "call":
                    yield self._told("response.content_part.added", **part, part=self._part(block, "", []))
            case "grew", "text":
                told = self._logprobs(change.logprobs)
                yield self._told("response.output_text.delta", **part, delta=change.text, logprobs=told)
            case "grew", "reasoning":
                yield self._told("response.reasoning_text.delta", **part, delta=change.text)
            case "grew", "call":
                yield self._told("response.function_call_arguments.delta", **item, delta=change.text)
            case "closed", kind:
                yield from self._closed(block, item, part)

    def _closed(self, block: Block, item: Told, part: Told) -> Iterator[Told]:
        match block.kind:
            case "text":
                told = self._logprobs(block.logprobs)
                yield self._told("response.output_text.done", **part, text=block.text, logprobs=told)
            case "reasoning":
                yield self._told("response.reasoning_text.done", **part, text=block.text)
            case "call":
                yield self._told(
                    "response.function_call_arguments.done", **item, name=block.name, arguments=block.text
                )
        if block.kind != "call":
            whole = self._part(block, block.text, block.logprobs)
            yield self._told("response.content_part.done", **part, part=whole)
        yield self._told("response.output_item.done", output_index=block.index, item=self._item(block))

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}-{self._generation.id.partition('-')[2]}-{block.index}"

    def _new_item(self, block: Block) -> Item:
        item = self._item(block) | {"status": "in_progress"}
        return item | ({"arguments": ""} if block.kind == "call" else {"content": []})

    def _item(self, block: Block) -> Item:
        """The block as it is now."""
        cut = self.blocks.finish_reason in _STATUSES and block is self.blocks.blocks[-1]
        item: Item = {"id": self._item_id(block), "status": "incomplete" if cut else "completed"}
        match block.kind:
            case "text":
                part = self._part(block, block.text, block.logprobs)
                return item | {"type": "message", "role": "assistant", "content": [part]}
            case "reasoning":
                part = self._part(block, block.text, [])
                return item | {"type": "reasoning", "summary": [], "content": [part]}
            case "call":
                call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return item | {"type": "function_call"} | call

    def _part(self, block: Block, text: str, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[block.kind], "text": text}
        return (
            part | {"annotations": [], "logprobs": self._logprobs(logprobs)} if block.kind == "text" else part
        )

    def _logprobs(self, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        top = self._body.logprobs
        return [] if top is None else chat_logprobs(self._engine.tokenizer, logprobs, top)["content"]

    def _told(self, kind: str, **fields: Any) -> Told:
        told = {"type": kind, "sequence_number": self._count} | fields
        self._count += 1
        return told


def _told_tool(tool: dict[str, Any]) -> dict[str, Any]:
    # That arguments keep to the schema is not enforced, and so not claimed.
    told = {name: tool.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "strict": False} | told


def _text_format(body: ResponsesBody) -> dict[str, Any]:
    asked = body.text and body.text.format
    return {"type": "text"} if asked is None else msgspec.to_builtins(asked)
