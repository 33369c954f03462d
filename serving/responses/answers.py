"""Types of what `/v1/responses` answers, for the document and for tests."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from ..openai.answers import ChatToken, PromptDetails

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputPart(TypedDict):
    """What was said, or thought."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ChatToken]]


class OutputItem(TypedDict):
    """A message, some reasoning or a call of a function."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: ItemStatus
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputDetails(PromptDetails):
    """Where the prompt's tokens came from."""

    cache_write_tokens: int


class OutputDetails(TypedDict):
    """What the generated tokens were for."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseAnswer(TypedDict):
    """A response: its output, and the fields of the body that it was made with."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: str
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class ResponseEvent(TypedDict):
    """An event of a stream; which further fields it has follows from its type."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseAnswer]
    output_index: NotRequired[int]
    item_id: NotRequired[str]
    content_index: NotRequired[int]
    item: NotRequired[OutputItem]
    part: NotRequired[OutputPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[ChatToken]]


class ResponseDeleted(TypedDict):
    """A response that was forgotten."""

    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class InputItems(TypedDict):
    """A page of the items that a response was given."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
