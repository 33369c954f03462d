"""The prompt of a response: rendered anew, or the ids of the response that it continues and what has come since."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from ...engine.chat_template import TemplateError
from ..core.conversation import Conversation, Prompt, make_prompt, prompt_of, render
from ..core.service import Service
from ..http.errors import ApiError
from .body import ResponsesBody, conversation_of
from .items import Message
from .store import Continuation

_ANSWER = "\ue0c7answer\ue0c7"
"""Stands for the answer that is continued, to see what a template writes behind it."""
_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class ResponsePrompt:
    """What the model reads."""

    prompt: Prompt
    messages: list[Message]
    """What is in it, without instructions."""
    frame: bytes
    """See `Continuation`."""


def response_prompt(
    service: Service, body: ResponsesBody, messages: list[Message], previous: Continuation | None
) -> ResponsePrompt:
    """The prompt for `messages` after `previous`, for workers.

    With `truncation: "auto"` the oldest messages are left out as far as must be. Raises `TemplateError` or `ApiError`.
    """
    past = [] if previous is None else [*previous.messages, *previous.answer]
    everything = past + messages
    frame = _frame(body, conversation_of(body, everything))

    def rendered(left_out: int) -> ResponsePrompt:
        kept = everything[left_out:]
        return ResponsePrompt(make_prompt(service, conversation_of(body, kept)), kept, frame)

    def whole() -> ResponsePrompt:
        if previous is not None and previous.frame == frame:
            answered = [*previous.messages, {"role": "assistant", "content": _ANSWER}, *messages]
            prompt = _continued(service, conversation_of(body, answered), previous)
            if prompt is not None:
                return ResponsePrompt(prompt, everything, frame)
        return rendered(0)

    if body.truncation != "auto":
        return whole()
    capacity = min(service.engine.context_length, service.engine.cache.capacity_tokens)
    # Room for the answer that was asked for, but not at the price of more than half of the context.
    limit = capacity - min(body.max_output_tokens or 1, capacity // 2)
    turns = [i for i, message in enumerate(everything) if message["role"] == "user"]
    return _longest(whole, rendered, turns, limit)


def _continued(service: Service, conversation: Conversation, previous: Continuation) -> Prompt | None:
    """The ids that the model has read and written, and behind them what the template writes after an answer.

    None where the template does not let the answer's place be seen.
    """
    try:
        text = render(service, conversation)
    except TemplateError:
        return None
    if text.count(_ANSWER) != 1:
        return None
    added = text.partition(_ANSWER)[2]
    ids = previous.token_ids.tolist() + service.encode(added, add_bos=False, param=conversation.param)
    return prompt_of(service, conversation, ids, added)


def _longest(
    whole: Callable[[], ResponsePrompt],
    rendered: Callable[[int], ResponsePrompt],
    turns: Sequence[int],
    limit: int,
) -> ResponsePrompt:
    """The whole prompt if it has at most `limit` tokens, else the longest that has and begins with a user's turn."""

    def fitting(make: Callable[[], ResponsePrompt]) -> ResponsePrompt | None:
        try:
            made = make()
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            return None
        return made if len(made.prompt.ids) <= limit else None

    if (found := fitting(whole)) is not None or not turns:
        return found or whole()
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        if (shorter := fitting(partial(rendered, turns[middle]))) is not None:
            found, high = shorter, middle
        else:
            low = middle + 1
    # The last turn may be too long for the answer that was asked for, or at all: that is for the engine to say.
    return found or rendered(turns[high])


def _frame(body: ResponsesBody, conversation: Conversation) -> bytes:
    around = [body.instructions, conversation.tools, conversation.variables]
    return hashlib.sha256(msgspec.json.encode(around)).digest()
