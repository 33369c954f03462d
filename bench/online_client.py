"""The client of `tierax bench online`: plays conversations on any OpenAI-compatible server, and makes figures of what it saw."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector
from tqdm import tqdm

from .talks import Talk


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client saw of one request; seconds."""

    index: int
    """In its conversation."""
    first_token: float
    whole: float
    prompt_tokens: int | None
    """None: the server does not say."""
    output_tokens: int
    """As the server says; pieces of text where it does not."""
    cached_tokens: int | None
    """None: the server does not say."""


class ServerError(Exception):
    """An answer that is none: the message is one line."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go."""

    base_url: str
    """With or without `/v1` at the end."""
    model: str
    api_key: str | None = None

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def chat(self) -> str:
        return f"{self.root}/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


async def play(
    server: Server,
    talks: Sequence[Talk],
    running: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    progress: bool = False,
) -> tuple[float, list[Turn]]:
    """Seconds that all conversations took, and their turns. Raises `ServerError` at the first answer that is none.

    Answers join the conversations, so each can be played once.
    """
    turns: list[Turn] = []
    slots = asyncio.Semaphore(running)
    started = clock()
    bar = tqdm(total=sum(len(t.said) for t in talks), desc="turns", unit="turn", disable=not progress)
    # A connection for each request: some servers end theirs after a stream without a word, as the next one is written.
    connector = TCPConnector(limit=0, force_close=True)
    timeout = ClientTimeout(total=None, sock_connect=10)
    async with ClientSession(headers=server.headers, connector=connector, timeout=timeout) as session:

        async def converse(talk: Talk) -> None:
            await sleep(talk.arrival)
            for index in range(len(talk.said)):
                if index:
                    await sleep(talk.thinks[index])
                talk.say(index)
                async with slots:
                    turn, answer = await _ask(session, server, talk, index, clock)
                talk.messages.append({"role": "assistant", "content": answer})
                turns.append(turn)
                bar.update()

        with bar:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for talk in talks:
                        tasks.create_task(converse(talk))
            except ExceptionGroup as group:
                # The first conversation that failed ended the others.
                raise group.exceptions[0] from None
    return clock() - started, turns


async def _ask(
    session: ClientSession, server: Server, talk: Talk, index: int, clock: Callable[[], float]
) -> tuple[Turn, str]:
    body = {
        "model": server.model,
        "messages": talk.messages,
        "max_tokens": talk.answers[index],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = clock()
    first: float | None = None
    usage: dict[str, Any] = {}
    pieces: list[str] = []
    async with session.post(server.chat, json=body) as response:
        if response.status != 200:
            raise ServerError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if "error" in chunk:
                raise ServerError(str(chunk["error"].get("message", chunk["error"]))[:300])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta", {})
                text = delta.get("content") or delta.get("reasoning_content")
                if text:
                    first = first or clock()
                    pieces.append(text)
    ended = clock()
    if first is None:
        raise ServerError("an answer without text")
    details = usage.get("prompt_tokens_details") or {}
    turn = Turn(
        index,
        first - started,
        ended - started,
        usage.get("prompt_tokens"),
        usage.get("completion_tokens") or len(pieces),
        details.get("cached_tokens"),
    )
    return turn, "".join(pieces)


async def served_model(server: Server) -> str:
    """The first that the server names. Raises `ServerError`."""
    async with (
        ClientSession(headers=server.headers, timeout=ClientTimeout(total=10)) as session,
        session.get(f"{server.root}/v1/models") as response,
    ):
        if response.status != 200:
            raise ServerError(f"HTTP {response.status}: {(await response.text())[:300]}")
        return (await response.json(content_type=None))["data"][0]["id"]


def summarize(turns: Sequence[Turn], seconds: float) -> dict[str, Any]:
    """The figures of a run that took `seconds`."""
    first, later = ([t for t in turns if (t.index > 0) is wanted] for wanted in (False, True))
    output = sum(turn.output_tokens for turn in turns)
    per_token = [(t.whole - t.first_token) / (t.output_tokens - 1) for t in turns if t.output_tokens > 1]
    prompts = [turn.prompt_tokens for turn in turns if turn.prompt_tokens is not None]
    return {
        "ttft_first_ms": _spread([turn.first_token for turn in first]),
        "ttft_later_ms": _spread([turn.first_token for turn in later]),
        "tpot_ms": _spread(per_token),
        "requests": len(turns),
        "seconds": seconds,
        "req_s": len(turns) / seconds,
        "output_tok_s": output / seconds,
        "prompt_tokens": sum(prompts) if len(prompts) == len(turns) else None,
        "output_tokens": output,
        "cached_share": _cached_share(turns),
        "cached_share_later": _cached_share(later),
    }


def _cached_share(turns: Sequence[Turn]) -> float | None:
    told = [
        (turn.cached_tokens, turn.prompt_tokens)
        for turn in turns
        if turn.cached_tokens is not None and turn.prompt_tokens is not None
    ]
    total = sum(prompt for _, prompt in told)
    return sum(cached for cached, _ in told) / total if total and len(told) == len(turns) else None


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds: mean, median and the 99th percentile (nearest rank); None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p99 = ordered[-(-99 * len(ordered) // 100) - 1]
    mean, median = statistics.fmean(ordered), statistics.median(ordered)
    return {"mean": 1e3 * mean, "p50": 1e3 * median, "p99": 1e3 * p99}
