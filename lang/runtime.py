"""A model behind a URL: programs over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .backend import Backend, Completion, Scores
from .errors import BackendError
from .expr import Sampling, Shape

if TYPE_CHECKING:
    import aiohttp

_FIELDS = {"regex": "regex", "json_schema": "json", "grammar": "grammar"}
"""Kinds of shapes and their names in `structured_outputs`."""


class Runtime(Backend):
    """A tierax server: `Runtime("http://localhost:30000")`. Connects with the first use."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout` is for how many seconds the server may stay silent; `chat_template_kwargs` are variables of the chat
        template, such as `{"enable_thinking": False}`. Raises ValueError for what is no URL."""
        super().__init__()
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a URL begins with http:// or https://, not {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._connection = _Connection(self.url, api_key, timeout)
        self.loop.last = self._connection.close
        self._salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        self._variables = dict(chat_template_kwargs or {})
        self._clock = clock
        self._end_ids: frozenset[int] | None = None

    async def encode(self, text: str, *, begins: bool) -> list[int]:
        answer = await self._connection.post("/tokenize", {"prompt": text, "add_special_tokens": begins})
        return answer["tokens"]

    async def render(self, messages: Sequence[Mapping[str, str]], *, answer: bool) -> str:
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": answer}
        if self._variables:
            body["chat_template_kwargs"] = self._variables
        tokens = (await self._connection.post("/tokenize", body))["tokens"]
        return (await self._connection.post("/detokenize", {"tokens": tokens}))["text"]

    async def complete(
        self, ids: list[int], sampling: Sampling, shape: Shape | None, on_text: Callable[[str], None]
    ) -> Completion:
        if self._end_ids is None:
            self._end_ids = frozenset((await self._connection.get("/model_info"))["eos_token_ids"])
        body = {
            "prompt": ids,
            **sampling.given(),
            "max_tokens": sampling.max_tokens,
            **_shaped(shape),
            **self._salt,
        }
        body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        started = self._clock()
        answer = _Answer()
        async for chunk in self._connection.stream("/v1/completions", body):
            if answer.ttft is None:
                answer.ttft = self._clock() - started
            if piece := answer.take(chunk):
                on_text(piece)
        return answer.completion(sampling, self._end_ids)

    async def score(self, prompts: list[list[int]], start: int) -> Scores:
        body = {"input_ids": prompts, "return_logprob": True, "logprob_start_len": start, **self._salt}
        answers = await self._connection.post("/generate", body | {"sampling_params": {"max_new_tokens": 0}})
        metas = [answer["meta_info"] for answer in answers]
        return Scores(
            [[entry[0] for entry in meta["input_token_logprobs"]] for meta in metas],
            sum(meta["prompt_tokens"] for meta in metas),
            sum(meta["cached_tokens"] for meta in metas),
        )


class _Answer:
    """A completion as its chunks come in."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.usage: Mapping[str, Any] = {}
        self.ttft: float | None = None

    def take(self, chunk: Mapping[str, Any]) -> str:
        """Adds what a chunk tells, and returns its text."""
        piece = ""
        for choice in chunk["choices"]:
            piece += choice["text"]
            self.token_ids += choice["token_ids"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice["logprobs"] is not None:
                self.logprobs += choice["logprobs"]["token_logprobs"]
        self.usage = chunk.get("usage") or self.usage
        self.text += piece
        return piece

    def completion(self, sampling: Sampling, end_ids: frozenset[int]) -> Completion:
        """The whole. Raises `BackendError` if it did not come to its end."""
        if self.finish_reason is None:
            raise BackendError("the answer broke off")
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else end_ids)
        ids = self.token_ids
        stopped = self.finish_reason == "stop"
        ended = stopped and not ends.isdisjoint(ids[-1:])
        details = self.usage.get("prompt_tokens_details") or {}
        return Completion(
            self.text,
            ids[:-1] if ended else ids,
            self.finish_reason,
            self.usage.get("prompt_tokens", 0),
            self.usage.get("completion_tokens", len(ids)),
            details.get("cached_tokens", 0),
            details.get("cached_tokens_by_tier") or {},
            self.ttft,
            None if sampling.logprobs is None else self.logprobs,
            cut_by_stop=stopped and not ended and bool(sampling.stop),
        )


class _Connection:
    """HTTP to one server, from one event loop."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        self._url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> Any:
        """The JSON of an answer. Raises `BackendError`, as the others do."""
        async with self._request("GET", path, None) as response:
            return await response.json()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of an answer."""
        async with self._request("POST", path, body) as response:
            return await response.json()

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The objects of a stream of server-sent events."""
        rest = b""
        async with self._request("POST", path, body) as response:
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    payload = line.removeprefix(b"data:").strip()
                    if not payload or payload == b"[DONE]":
                        continue
                    chunk = json.loads(payload)
                    if "error" in chunk:
                        raise BackendError(_message(chunk) or "the server failed")
                    yield chunk

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        if self._session is None:
            # As many at a time as there are programs: the server queues.
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=min(30.0, self._timeout), sock_read=self._timeout
                ),
            )
        try:
            waited = 0.0
            while True:
                async with self._session.request(method, self._url + path, json=body) as response:
                    wanted = _wanted_wait(response)
                    if wanted is None or waited + wanted > self._timeout:
                        if response.status != 200:
                            raise await self._refusal(response, path)
                        yield response
                        return
                # A full server asks to come back.
                waited += wanted
                await asyncio.sleep(wanted)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, asyncio.TimeoutError):
                raise BackendError(f"{self._url} has not answered within {self._timeout:g} s") from error
            if isinstance(error, aiohttp.ClientConnectorError):
                raise BackendError(
                    f"{self._url} cannot be reached: {error.strerror or error.os_error}"
                ) from error
            raise BackendError(f"{self._url}: {error or type(error).__name__}") from error

    async def _refusal(self, response: aiohttp.ClientResponse, path: str) -> BackendError:
        if response.status == 404:
            return BackendError(f"{self._url} has no {path}: is it a tierax server?")
        text = await response.text()
        try:
            message = _message(json.loads(text))
        except ValueError:
            message = None
        return BackendError(message or f"{self._url}{path}: HTTP {response.status} {response.reason}")


def _wanted_wait(response: aiohttp.ClientResponse) -> float | None:
    """For how many seconds a server with too much to do wants to be left alone; None if it does not say so."""
    after = response.headers.get("Retry-After", "")
    return max(0.1, float(after)) if response.status in (429, 503) and after.isdecimal() else None


def _shaped(shape: Shape | None) -> dict[str, Any]:
    if shape is None:
        return {}
    value = json.loads(shape.value) if shape.kind == "json_schema" else shape.value
    return {"structured_outputs": {_FIELDS[shape.kind]: value}}


def _message(answer: Any) -> str | None:
    """The message of an error object."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
