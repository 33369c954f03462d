"""Conversations over HTTP on any OpenAI-compatible server: times to the first token, throughput, what came from its cache.

A conversation sends a turn, reads the answer to its end, thinks, and sends the next, with all that was said before it.
The same client measures every server; prompts are words that a seed draws, and the server's own usage says how many
tokens they were. The cached share is what the server tells, and missing where it tells nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from tqdm import tqdm

from .report import number, table, write_json

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend father"
).split()
"""Words that nearly every tokenizer has whole, with the space before them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in words, which are about as many tokens."""

    conversations: int
    running: int
    """Requests under way at once, at most."""
    turns: int
    systems: int
    """Different system prompts, dealt out in turn; 0: none."""
    system_words: int
    first_words: int
    """First message of a conversation."""
    user_words: int
    """Each later message."""
    answer_tokens: int
    think: float = 0.0
    """Seconds between an answer and the next turn, on average; exponentially distributed."""
    arrivals: float = 0.0
    """New conversations per second (a Poisson process); 0: all at once."""
    seed: int = 1


WORKLOADS = {
    "multiturn": Workload(8, 8, 4, 1, 512, 64, 64, 64),
    "pressure": Workload(16, 4, 4, 1, 512, 64, 64, 64),
    "agentic": Workload(24, 6, 4, 4, 3072, 512, 64, 64, think=1.0),
    "random": Workload(64, 8, 1, 0, 0, 512, 0, 64),
}
"""Many talk at once; more talk than run; agents with long system prompts of a few kinds; nothing ever repeats."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client saw of one request; seconds."""

    index: int
    """In its conversation."""
    first_token: float
    whole: float
    prompt_tokens: int
    output_tokens: int
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
    def chat(self) -> str:
        return f"{_root(self.base_url)}/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    workload = WORKLOADS[args.workload]
    changed = {f.name: getattr(args, f.name) for f in fields(Workload) if getattr(args, f.name) is not None}
    workload = replace(workload, **changed)
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    try:
        model, seconds, turns = asyncio.run(_measure(args.base_url, args.model, key, workload))
    except (ServerError, ClientError, OSError, TimeoutError) as error:
        parser.exit(1, f"tierax bench online: {args.base_url}: {str(error) or type(error).__name__}\n")
    report = {
        "base_url": args.base_url,
        "model": model,
        "workload": {"name": args.workload, **asdict(workload)},
        **summarize(turns, seconds),
    }
    if args.json is not None:
        write_json(report, args.json)
    else:
        print(table([f"{args.workload} on {model}", ""], _rows(report)))
    return 0


def summarize(turns: Sequence[Turn], seconds: float) -> dict[str, Any]:
    """The figures of a run that took `seconds`."""
    first, later = ([t for t in turns if (t.index > 0) is wanted] for wanted in (False, True))
    output = sum(turn.output_tokens for turn in turns)
    per_token = [(t.whole - t.first_token) / (t.output_tokens - 1) for t in turns if t.output_tokens > 1]
    return {
        "ttft_first_ms": _spread([turn.first_token for turn in first]),
        "ttft_later_ms": _spread([turn.first_token for turn in later]),
        "tpot_ms": _spread(per_token),
        "requests": len(turns),
        "seconds": seconds,
        "req_s": len(turns) / seconds,
        "output_tok_s": output / seconds,
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "output_tokens": output,
        "cached_share": _cached_share(turns),
        "cached_share_later": _cached_share(later),
    }


def _cached_share(turns: Sequence[Turn]) -> float | None:
    told = [(turn.cached_tokens, turn.prompt_tokens) for turn in turns if turn.cached_tokens is not None]
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


async def run(
    server: Server,
    workload: Workload,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    progress: bool = False,
) -> tuple[float, list[Turn]]:
    """Seconds that all conversations took, and their turns. Raises `ServerError` at the first answer that is none."""
    rng = random.Random(workload.seed)
    systems = [_text(rng, workload.system_words) for _ in range(workload.systems)]
    talks: list[_Talk] = []
    arrival = 0.0
    for i in range(workload.conversations):
        arrival += rng.expovariate(workload.arrivals) if workload.arrivals else 0.0
        talks.append(_Talk(rng, workload, systems[i % len(systems)] if systems else None, arrival))
    turns: list[Turn] = []
    slots = asyncio.Semaphore(workload.running)
    started = clock()
    bar = tqdm(total=workload.conversations * workload.turns, desc="turns", unit="turn", disable=not progress)
    connector, timeout = TCPConnector(limit=0), ClientTimeout(total=None, sock_connect=10)
    async with ClientSession(headers=server.headers, connector=connector, timeout=timeout) as session:

        async def play(talk: _Talk) -> None:
            await sleep(talk.arrival)
            for index in range(workload.turns):
                if index:
                    await sleep(talk.thinks[index])
                talk.say(index)
                async with slots:
                    turn, answer = await _ask(session, server, talk.messages, index, workload, clock)
                talk.messages.append({"role": "assistant", "content": answer})
                turns.append(turn)
                bar.update()

        with bar:
            async with asyncio.TaskGroup() as tasks:
                for talk in talks:
                    tasks.create_task(play(talk))
    return clock() - started, turns


class _Talk:
    """One conversation: all that chance decides is drawn when it is made, so that no server's speed changes it."""

    def __init__(self, rng: random.Random, workload: Workload, system: str | None, arrival: float) -> None:
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        lengths = [workload.first_words] + [workload.user_words] * (workload.turns - 1)
        self._said = [_text(rng, words) for words in lengths]
        self.thinks = [rng.expovariate(1 / workload.think) if workload.think else 0.0 for _ in lengths]
        self.arrival = arrival

    def say(self, index: int) -> None:
        self.messages.append({"role": "user", "content": self._said[index]})


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


async def _ask(
    session: ClientSession,
    server: Server,
    messages: list[dict[str, str]],
    index: int,
    workload: Workload,
    clock: Callable[[], float],
) -> tuple[Turn, str]:
    body = {
        "model": server.model,
        "messages": messages,
        "max_tokens": workload.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = clock()
    first: float | None = None
    usage: dict[str, Any] | None = None
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
    if first is None or usage is None:
        raise ServerError("an answer without text" if first is None else "an answer without usage")
    details = usage.get("prompt_tokens_details") or {}
    turn = Turn(
        index,
        first - started,
        ended - started,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        details.get("cached_tokens"),
    )
    return turn, "".join(pieces)


async def _measure(
    base_url: str, model: str | None, key: str | None, workload: Workload
) -> tuple[str, float, list[Turn]]:
    if model is None:
        model = await _served_model(Server(base_url, "", key))
    try:
        seconds, turns = await run(Server(base_url, model, key), workload, progress=sys.stderr.isatty())
    except ExceptionGroup as group:
        # The first conversation that failed ended the others.
        raise group.exceptions[0] from None
    return model, seconds, turns


async def _served_model(server: Server) -> str:
    timeout = ClientTimeout(total=10)
    url = f"{_root(server.base_url)}/v1/models"
    async with (
        ClientSession(headers=server.headers, timeout=timeout) as session,
        session.get(url) as response,
    ):
        if response.status != 200:
            raise ServerError(f"HTTP {response.status}: {(await response.text())[:300]}")
        return (await response.json(content_type=None))["data"][0]["id"]


def _root(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")


def _rows(report: dict[str, Any]) -> list[list[str]]:
    def times(name: str) -> str:
        spread = report[name]
        return "-" if spread is None else " / ".join(number(spread[key]) for key in ("mean", "p50", "p99"))

    def share(name: str) -> str:
        return "not told" if report[name] is None else f"{report[name]:.1%}"

    return [
        ["TTFT of first turns, ms: mean / p50 / p99", times("ttft_first_ms")],
        ["TTFT of later turns, ms", times("ttft_later_ms")],
        ["TPOT, ms", times("tpot_ms")],
        ["requests/s", number(report["req_s"])],
        ["output tok/s", number(report["output_tok_s"])],
        ["cached share of prompt tokens", share("cached_share")],
        ["cached share, later turns", share("cached_share_later")],
        ["requests", str(report["requests"])],
        ["seconds", number(report["seconds"])],
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tierax bench online", description=__doc__, allow_abbrev=False)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", metavar="URL")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="multiturn")
    for field in fields(Workload):
        kind = float if field.name in ("think", "arrivals") else int
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=_at_least_0(kind), metavar="N", help="instead of the workload's own")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is the standard output")
    return parser


def _at_least_0(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not 0 <= value < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0")
        return value

    return convert


if __name__ == "__main__":
    sys.exit(main())
