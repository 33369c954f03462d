"""Responses that clients may fetch, continue and delete: in memory, within bounds, each tenant on its own."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..core.generation import Generation
from ..http.errors import ApiError
from .form import ResponseForm
from .items import Item, Message

MAX_RESPONSES = 10_000
MAX_TOKENS = 16_000_000
"""Of prompts and outputs together; 64 MB of ids."""
MAX_BYTES = 256 * 2**20
"""Of the bodies that asked for them."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a response can be continued from."""

    messages: Sequence[Message]
    """All before the answer, without instructions."""
    answer: Sequence[Message]
    """The answer as messages, for templates that are rendered anew."""
    frame: bytes
    """What stands around the messages (instructions, tools, variables): only with the same are the ids of use."""
    token_ids: array[int]
    """Exactly what the model read and wrote, without an end token."""
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A response that has ended."""

    tenant: bytes
    response: dict[str, Any]
    input_items: list[Item]
    continuation: Continuation
    body_bytes: int
    """Size of the body that asked for it, most of which is kept."""


@dataclass(frozen=True, slots=True)
class Running:
    """A response that is being made."""

    tenant: bytes
    generation: Generation
    form: ResponseForm


class ResponseStore:
    """The least recently used go first when there are too many, or when together they are too large."""

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_tokens: int = MAX_TOKENS,
        max_bytes: int = MAX_BYTES,
    ):
        self._max_responses = max_responses
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._tokens = 0
        self._bytes = 0

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    @property
    def tokens(self) -> int:
        """Token ids held."""
        return self._tokens

    @contextmanager
    def running(self, entry: Running) -> Iterator[None]:
        """Makes a response known while it is being made."""
        self._running[entry.generation.id] = entry
        try:
            yield
        finally:
            del self._running[entry.generation.id]

    def get_running(self, response_id: str, tenant: bytes) -> Running | None:
        """A response of this tenant that is being made."""
        entry = self._running.get(response_id)
        return entry if entry is not None and entry.tenant == tenant else None

    def put(self, stored: Stored) -> None:
        """Keeps a response. One that is larger than the whole store is not kept."""
        if len(stored.continuation.token_ids) > self._max_tokens or stored.body_bytes > self._max_bytes:
            return
        self._stored[stored.response["id"]] = stored
        self._count(stored, 1)
        while (
            len(self._stored) > self._max_responses
            or self._tokens > self._max_tokens
            or self._bytes > self._max_bytes
        ):
            _, oldest = self._stored.popitem(last=False)
            self._count(oldest, -1)

    def get(self, response_id: str, tenant: bytes, param: str | None = None) -> Stored:
        """A response of this tenant, which counts as a use. Raises `ApiError` 404 for any other id."""
        stored = self._stored.get(response_id)
        if stored is None or stored.tenant != tenant:
            message = (
                f"There is no response {response_id[:100]!r} here; it may have been deleted or displaced."
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, tenant: bytes) -> None:
        """Forgets a response of this tenant. Raises `ApiError` 404 for any other id."""
        stored = self.get(response_id, tenant)
        del self._stored[response_id]
        self._count(stored, -1)

    def _count(self, stored: Stored, sign: int) -> None:
        self._tokens += sign * len(stored.continuation.token_ids)
        self._bytes += sign * stored.body_bytes
