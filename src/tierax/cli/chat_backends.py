"""Who answers in `tierax chat`: a model in this process, or a server that speaks OpenAI's protocol."""

from __future__ import annotations

import http.client
import json
import queue
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from ..engine.config import EngineConfig
    from ..engine.request import Delta

Message = dict[str, str]
TIERS = ("device", "host", "disk")
PATIENCE_S = 600.0
"""Seconds that a server may stay silent."""


class ChatError(Exception):
    """This turn has no (whole) answer; the message is for the user."""


@dataclass(slots=True)
class Turn:
    """One answer while it comes in. `show` is called with every piece, and whether it is reasoning."""

    clock: Callable[[], float]
    show: Callable[[str, bool], None]
    text: str = ""
    """Without reasoning."""
    prompt_tokens: int | None = None
    """None where a server does not tell; so the next two."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    by_tier: dict[str, int] = field(default_factory=dict)
    """`cached_tokens` by where they were; empty where a server does not tell."""
    finish_reason: str | None = None
    started: float = 0.0
    first: float | None = None
    last: float | None = None

    def __post_init__(self) -> None:
        self.started = self.clock()

    def add(self, text: str, *, reasoning: bool = False) -> None:
        """Takes a piece of the answer."""
        if not text:
            return
        self.tick()
        self.text += "" if reasoning else text
        self.show(text, reasoning)

    def tick(self) -> None:
        """A token has come, whether or not there is text to show."""
        self.last = self.clock()
        self.first = self.last if self.first is None else self.first

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first is None else self.first - self.started

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first."""
        if self.first is None or self.last is None or self.last <= self.first or not self.output_tokens:
            return None
        return (self.output_tokens - 1) / (self.last - self.first)


class Backend(Protocol):
    """Answers conversations; one at a time."""

    name: str
    """Of the model."""

    def answer(self, messages: Sequence[Message], turn: Turn) -> None:
        """Fills in `turn` as the answer comes. Raises `ChatError`; interrupted, it ends the work for it first."""
        ...

    def close(self) -> None: ...


class LocalModel:
    """A model in this process, on an engine's thread of its own."""

    def __init__(self, config: EngineConfig, sampling: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Loads it; `say` tells of the progress. Raises what cannot be used, and `ChatError` without a chat template."""
        from ..engine.engine import Engine
        from ..engine.request import SamplingParams
        from ..engine.thread import EngineThread

        say(f"loading {config.model_path}")
        self._engine = Engine(config)
        self.name = self._engine.model_name
        self._thread = EngineThread(self._engine)
        self._turns = 0
        try:
            if self._engine.chat_template is None:
                raise ChatError("this model has no chat template; use `tierax generate`")
            self._params = SamplingParams(**{"max_tokens": self._engine.context_length, **sampling})
            say("preparing its programs (kept for the next start)")
            self._thread.start()
            self._thread.wait_ready()
        except BaseException:
            self._thread.close(0.0)
            raise

    def answer(self, messages: Sequence[Message], turn: Turn) -> None:
        from ..engine.chat_template import TemplateError
        from ..engine.validate import ParameterError

        engine = self._engine
        assert engine.chat_template is not None
        self._turns += 1
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        try:
            text = engine.chat_template.render(messages)
            ids = engine.tokenizer.encode(text, add_bos=False)
            [request] = engine.make_requests(
                ids, self._params, request_id=f"chat-{self._turns}", on_delta=deltas.put
            )
        except (ParameterError, TemplateError) as error:
            raise ChatError(str(error)) from None
        self._thread.submit([request])
        try:
            while turn.finish_reason is None:
                delta = self._next(deltas)
                if delta.token_ids:
                    turn.tick()
                turn.add(delta.text)
                turn.finish_reason = delta.finish_reason
                if delta.error is not None:
                    raise ChatError(delta.error)
        finally:
            if turn.finish_reason is None:
                self._thread.abort([request.id])
                while self._next(deltas).finish_reason is None:
                    pass
            turn.prompt_tokens, turn.output_tokens = request.num_prompt, request.num_output
            turn.cached_tokens, turn.by_tier = request.cached_tokens, request.cached_by_tier

    def _next(self, deltas: queue.SimpleQueue[Delta]) -> Delta:
        while True:
            try:
                return deltas.get(timeout=0.5)
            except queue.Empty:
                if not self._thread.alive:
                    raise ChatError("the engine has stopped") from None

    def close(self) -> None:
        """Lets writes to the disk end, and the model go."""
        self._thread.close()


class RemoteModel:
    """A model behind an OpenAI-compatible endpoint."""

    def __init__(self, url: str, key: str | None, model: str | None, sampling: Mapping[str, Any]) -> None:
        """Asks for the server's models, unless one is named. Raises `ChatError`."""
        path = urlsplit(url).path.rstrip("/")
        self._base = url.rstrip("/") if path else url.rstrip("/") + "/v1"
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._sampling = dict(sampling)
        self.name = model or self._first_model()

    def answer(self, messages: Sequence[Message], turn: Turn) -> None:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        with self._open("/chat/completions", body) as answer:
            try:
                for line in answer:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        self._take(json.loads(data), turn)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise ChatError(f"the answer broke off: {_reason(error)}") from None
        if turn.finish_reason is None:
            raise ChatError("the answer broke off")

    def close(self) -> None:
        """Nothing stays open between turns."""

    def _take(self, chunk: Mapping[str, Any], turn: Turn) -> None:
        if "error" in chunk:
            raise ChatError(_message(chunk) or "the server failed")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            turn.add(delta.get("reasoning_content") or delta.get("reasoning") or "", reasoning=True)
            turn.add(delta.get("content") or "")
            turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
        if usage := chunk.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            turn.prompt_tokens = usage.get("prompt_tokens")
            turn.output_tokens = usage.get("completion_tokens")
            turn.cached_tokens = details.get("cached_tokens")
            turn.by_tier = details.get("cached_tokens_by_tier") or {}

    def _first_model(self) -> str:
        with self._open("/models", None) as answer:
            try:
                return str(json.load(answer)["data"][0]["id"])
            except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
                raise ChatError(f"{self._base}/models does not list a model; name one with --model") from None

    def _open(self, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError as error:
            with error:
                try:
                    message = _message(json.loads(error.read()))
                except ValueError:
                    message = None
            raise ChatError(message or f"{self._base + path}: HTTP {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatError(f"{self._base}: {_reason(error)}") from None


def _message(answer: Any) -> str | None:
    """The message of an error object, in any of its usual shapes."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason)
