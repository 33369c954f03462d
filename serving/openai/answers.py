"""Types of what the server answers, in OpenAI's shapes: they document answers, and tests hold answers against them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class Problem(TypedDict):
    """What went wrong, for people (`message`) and for programs."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorAnswer(TypedDict):
    """Every answer from status 400 on."""

    error: Problem


class Status(TypedDict):
    """What a probe is told."""

    status: str


class Version(TypedDict):
    """The version of the server."""

    version: str


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    embeddings: str
    """How `/v1/embeddings` makes a vector."""


class ModelList(TypedDict):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class TierTokens(TypedDict):
    """Cached prompt tokens by the tier that had them when the request arrived."""

    device: int
    host: int
    disk: int


class PromptDetails(TypedDict):
    """Where the prompt's tokens came from; their sum by tier is `cached_tokens`."""

    cached_tokens: int
    cached_tokens_by_tier: TierTokens


class Usage(TypedDict):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TokenChance(TypedDict):
    """A token with its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenChance):
    """A chosen token and the likeliest in its place."""

    top_logprobs: list[TokenChance]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat answer, an entry per token."""

    content: list[ChatToken]
    refusal: None


class PromptToken(TypedDict):
    """A token of the prompt or one that could have stood there; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of the prompt the likeliest ones and itself, by their ids; None for the first."""


class CalledFunction(TypedDict):
    """A function's name, and its arguments as the JSON text of an object."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A function that the model wants to be called."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The answer itself."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(TypedDict):
    """One of `n` answers to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_ids: NotRequired[list[int]]


class ChatAnswer(TypedDict):
    """An answered conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class FunctionDelta(TypedDict):
    """What a chunk adds to a call: first its name, then pieces of its arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A chunk's part of the call with this index; the first one has its id."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """What a chunk adds to an answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """A chunk's part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatChunk(TypedDict):
    """A piece of a streamed answer to a conversation; the last one before `[DONE]` may hold only `usage`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion as parallel lists; with `echo` the first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionAnswer(TypedDict):
    """Continued prompts; streamed ones come in chunks of the same shape, with `usage` only in the last, if asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Flushed(TypedDict):
    """What became of one tier's pages."""

    dropped_pages: int
    kept_pages: int
    pinned_pages: int
    reason: NotRequired[str]


class FlushAnswer(TypedDict):
    """Everything that nobody uses was dropped."""

    complete: Literal[True]
    tiers: dict[str, Flushed]


class FlushProblem(ErrorAnswer):
    """Something stays, since it is in use."""

    complete: NotRequired[Literal[False]]
    tiers: NotRequired[dict[str, Flushed]]


class CacheStat(TypedDict):
    """How full the tiers are, and what they hold for whom."""

    page_size: int
    page_bytes: int
    tiers: dict[str, dict[str, Any]]
    tokens: dict[str, Any]
    requests: dict[str, int]
    namespaces: list[dict[str, Any]]


class WarmAnswer(TypedDict):
    """What warming computed; `items` tells of each prompt in its place, errors included."""

    items: list[dict[str, Any]]
    computed_tokens: int
    cached_tokens: int
    failed: int


class PinCard(TypedDict):
    """A pinned prefix."""

    id: str
    pages: int
    held_pages: int
    tokens: int


class PinAnswer(PinCard):
    """A prefix that was pinned."""

    computed_tokens: int


class PinList(TypedDict):
    """The caller's pins; for keys without a salt, the quota of all as well."""

    pins: list[PinCard]
    pages: NotRequired[int]
    quota_pages: NotRequired[int]


class Unpinned(TypedDict):
    """The pin that was let go."""

    unpinned: dict[str, Any]
