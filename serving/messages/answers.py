"""Types of what `/v1/messages` answers, for the document and for tests."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from ..openai.answers import TierTokens


class MessageProblem(TypedDict):
    """What went wrong, for people (`message`) and for programs."""

    type: str
    message: str


class MessageError(TypedDict):
    """Every answer from status 400 on."""

    type: Literal["error"]
    error: MessageProblem


class ThinkingDetails(TypedDict):
    """What the generated tokens were for."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """Tokens read and written; those read from the cache are not among `input_tokens`."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_read_input_tokens_by_tier: TierTokens
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails


class ContentBlock(TypedDict):
    """A text, a thought or the use of a tool, by `type`."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageAnswer(TypedDict):
    """An answered conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: (
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    )
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """An event of a stream; which further fields it has follows from its type."""

    type: str
    message: NotRequired[MessageAnswer]
    index: NotRequired[int]
    content_block: NotRequired[ContentBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[MessageProblem]


class TokenCount(TypedDict):
    """How long a prompt is."""

    input_tokens: int
