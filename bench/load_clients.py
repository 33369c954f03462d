"""The clients of the load benchmark: who reads to the end, who leaves, who sends nonsense; and what they saw."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientSession

CHAT = "/v1/chat/completions"
TIE = 1e-3
"""Two likeliest tokens as close as this may change places when a batch is padded otherwise."""
_WORDS = "river stone lamp seven quiet paper north engine salt garden under copper window letter slow".split()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the clients do: `leave` and `bad` are shares of the calls."""

    clients: int = 256
    seconds: float = 60.0
    leave: float = 0.2
    bad: float = 0.05
    conversations: int = 24
    max_tokens: int = 32
    seed: int = 1


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    finished: int = 0
    left: int = 0
    refused: int = 0
    """Bad requests that were answered as such."""
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    """Seconds to the first token, of the finished."""
    ties: int = 0
    """Answers that differ from the solo run's from a near tie on."""
    unequal: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Solo:
    """A request's answer on the quiet server."""

    body: dict[str, Any]
    token_ids: list[int]
    finish_reason: str
    sure: int
    """So many of the tokens were chosen clearly."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server told of itself at one time."""

    rss_bytes: float
    open_fds: float
    tasks: float
    busy: float
    """Requests that run or wait."""
    pages_in_use: float
    lag: dict[float, float]
    """Times that the event loop was late by at most so many seconds, counted since the start."""


class Server:
    """A running server, as a client sees it."""

    def __init__(self, session: ClientSession, url: str, headers: dict[str, str]) -> None:
        self.session = session
        self.url = url
        self.headers = headers

    def post(self, body: Any) -> Any:
        """An answer to a chat, to be used as `async with`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.session.post(self.url + CHAT, data=data, headers=self.headers)

    async def sample(self) -> Sample:
        async with self.session.get(self.url + "/metrics", headers=self.headers) as response:
            response.raise_for_status()
            lines = (await response.text()).splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        lag = "tierax_event_loop_lag_seconds_bucket"
        return Sample(
            rss_bytes=float(found["tierax_process_resident_memory_bytes"]),
            open_fds=float(found["tierax_process_open_fds"]),
            tasks=float(found["tierax_event_loop_tasks"]),
            busy=float(found["tierax_requests_running"]) + float(found["tierax_requests_waiting"]),
            pages_in_use=float(found['tierax_pages{state="in_use",tier="device"}']),
            lag={float(k[len(lag) + 5 : -2]): float(v) for k, v in found.items() if k.startswith(lag)},
        )


def conversations(workload: Workload) -> list[dict[str, Any]]:
    """The good requests; groups of four share a system prompt."""
    rng = random.Random(workload.seed)

    def words(count: int) -> str:
        return " ".join(rng.choices(_WORDS, k=count))

    systems = [words(rng.randint(10, 30)) for _ in range(-(-workload.conversations // 4))]
    return [
        {
            "messages": [
                {"role": "system", "content": systems[n // 4]},
                {"role": "user", "content": words(rng.randint(3, 20))},
            ],
            "temperature": 0,
            "max_tokens": rng.randint(max(1, workload.max_tokens // 4), workload.max_tokens),
            "return_token_ids": True,
        }
        for n in range(workload.conversations)
    ]


BAD: tuple[Any, ...] = (
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}], "top_p": 7},
    {"messages": [{"role": "user", "content": "x"}], "model": "no-such-model"},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
    {"messages": "x", "stream": True},
    b'{"messages": [',
    b"[" * 5000,
)


async def solo_run(server: Server, body: dict[str, Any]) -> Solo:
    async with server.post(body | {"logprobs": True, "top_logprobs": 2}) as response:
        response.raise_for_status()
        choice = (await response.json())["choices"][0]
    sure = 0
    for token in choice["logprobs"]["content"]:
        first, second = (top["logprob"] for top in token["top_logprobs"])
        if first - second < TIE:
            break
        sure += 1
    return Solo(body | {"stream": True}, choice["token_ids"], choice["finish_reason"], sure)


async def client(
    server: Server,
    workload: Workload,
    solos: Sequence[Solo],
    rng: random.Random,
    tally: Tally,
    deadline: float,
) -> None:
    # Not all at the same moment.
    await asyncio.sleep(rng.random() * min(1.0, workload.seconds / 10))
    while time.perf_counter() < deadline:
        dice = rng.random()
        try:
            if dice < workload.bad:
                await _send_nonsense(server, rng.choice(BAD), tally)
            elif dice < workload.bad + workload.leave:
                await _leave(server, rng.choice(solos), rng)
                tally.left += 1
            else:
                await _chat(server, rng.choice(solos), tally)
        except (ClientError, OSError, TimeoutError) as error:
            tally.failed.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)


async def _send_nonsense(server: Server, body: Any, tally: Tally) -> None:
    async with server.post(body) as response:
        if 400 <= response.status < 500:
            tally.refused += 1
        else:
            tally.failed.append(f"a bad request was answered with {response.status}")
        await response.read()


async def _leave(server: Server, solo: Solo, rng: random.Random) -> None:
    """Goes away before the answer has begun, or in the midst of it."""
    body = solo.body | {"stream": rng.random() < 0.7}
    chunks = rng.randrange(6)

    async def begin() -> None:
        async with server.post(body) as response:
            for _ in range(chunks):
                await response.content.readline()
            response.close()

    with suppress(TimeoutError):
        await asyncio.wait_for(begin(), timeout=0.01 + rng.random() * 0.5)


async def _chat(server: Server, solo: Solo, tally: Tally) -> None:
    started = time.perf_counter()
    first: float | None = None
    token_ids: list[int] = []
    reason = None
    async with server.post(solo.body) as response:
        if response.status != 200:
            tally.failed.append(f"{response.status}: {(await response.text())[:200]}")
            await asyncio.sleep(0.1)
            return
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                tally.failed.append(str(chunk["error"]["message"]))
                return
            for choice in chunk["choices"]:
                got = choice.get("token_ids") or []
                if got and first is None:
                    first = time.perf_counter() - started
                token_ids += got
                reason = choice["finish_reason"] or reason
    tally.finished += 1
    tally.tokens += len(token_ids)
    tally.ttft.append(first if first is not None else time.perf_counter() - started)
    if token_ids != solo.token_ids or reason != solo.finish_reason:
        if solo.sure < len(solo.token_ids) and token_ids[: solo.sure] == solo.token_ids[: solo.sure]:
            tally.ties += 1
        else:
            tally.unequal.append(f"{token_ids} ({reason}) instead of {solo.token_ids} ({solo.finish_reason})")
