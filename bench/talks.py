"""What the clients of `tierax bench online` say: conversations that a seed draws, or that a file has.

Words are ones that nearly every tokenizer has whole, so lengths in words are about lengths in tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..lab.traces.trace import Trace, TraceRequest
from ..lab.workload import BLOCK_TOKENS, make_workload
from ..lab.workload import Workload as Shape

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend father"
).split()


class TalkError(Exception):
    """A file that holds no conversations; the message is one line."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in words."""

    conversations: int
    running: int
    """Requests under way at once, at most."""
    turns: float
    """Of each conversation; with a `spread`, in the mean."""
    systems: int
    """Different system prompts (or documents), dealt out in turn, or by Zipf's law with a `spread`; 0: none."""
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
    spread: float = 0.0
    """Sigma of the logarithms of all lengths but the system prompts'; 0: all alike."""

    def scaled(self, factor: float) -> Workload:
        """The same with all lengths multiplied, none below 1 that was not 0."""
        names = ("system_words", "first_words", "user_words", "answer_tokens")
        lengths = {name: getattr(self, name) for name in names}
        return replace(self, **{name: max(round(factor * n), min(n, 1)) for name, n in lengths.items()})


WORKLOADS = {
    "multiturn": Workload(8, 8, 4, 1, 512, 64, 64, 64),
    "pressure": Workload(16, 4, 4, 1, 512, 64, 64, 64),
    "agentic": Workload(24, 6, 4, 4, 3072, 512, 64, 64, think=1.0),
    "rag": Workload(32, 8, 2, 8, 2048, 24, 24, 48),
    "sharegpt-shaped": Workload(32, 8, 3.7, 8, 1536, 1230, 200, 350, think=5.0, spread=0.8),
    "random": Workload(64, 8, 1, 0, 0, 512, 0, 64),
    "tiny": Workload(1000, 8, 1, 0, 0, 6, 0, 1),
}
"""Many talk at once; more talk than run; agents with long system prompts of a few kinds; questions about a few documents;
lengths and turns drawn as in public chat logs; nothing ever repeats; a few words and one token, for what HTTP costs."""


@dataclass
class Talk:
    """One conversation: all that chance decides is drawn when it is made, so that no server's speed changes it."""

    messages: list[dict[str, str]]
    """What is said before the first turn; grows by turns and answers."""
    said: list[str]
    """The user's message of each turn."""
    answers: list[int]
    """Tokens of each answer."""
    thinks: list[float]
    """Seconds before each turn; none before the first."""
    arrival: float

    def say(self, index: int) -> None:
        self.messages.append({"role": "user", "content": self.said[index]})


def make_talks(workload: Workload) -> list[Talk]:
    """The conversations of a workload."""
    rng = random.Random(workload.seed)
    systems = [_text(rng, workload.system_words) for _ in range(workload.systems)]
    if workload.spread:
        return _drawn(workload, rng, systems)
    talks, arrival = [], 0.0
    for number in range(workload.conversations):
        arrival += rng.expovariate(workload.arrivals) if workload.arrivals else 0.0
        lengths = [workload.first_words] + [workload.user_words] * (round(workload.turns) - 1)
        said = [_text(rng, words) for words in lengths]
        answers = [workload.answer_tokens] * len(said)
        opening = _opening(systems[number % len(systems)] if systems else "")
        talks.append(Talk(opening, said, answers, _thinks(rng, workload, len(said)), arrival))
    return talks


def _drawn(workload: Workload, rng: random.Random, systems: Sequence[str]) -> list[Talk]:
    """Lengths, turns and times as the lab draws them."""
    shape = Shape(
        sessions=workload.conversations,
        turns=workload.turns,
        systems=max(1, workload.systems),
        system_tokens=workload.system_words,
        first_tokens=workload.first_words,
        user_tokens=max(1, workload.user_words),
        answer_tokens=workload.answer_tokens,
        spread=workload.spread,
        think=workload.think,
        session_rate=workload.arrivals or 1.0,
        seed=workload.seed,
    )
    talks = []
    for requests in _sessions(make_workload(shape)):
        system_tokens = -(-workload.system_words // BLOCK_TOKENS) * BLOCK_TOKENS
        which = requests[0].blocks[0] * BLOCK_TOKENS // system_tokens if system_tokens else 0
        ends = [system_tokens, *(r.prompt_tokens + r.output_tokens for r in requests)]
        said = [_text(rng, r.prompt_tokens - end) for r, end in zip(requests, ends, strict=False)]
        talks.append(
            Talk(
                _opening(systems[which] if systems else ""),
                said,
                [r.output_tokens for r in requests],
                [r.think or 0.0 for r in requests],
                requests[0].arrival if workload.arrivals else 0.0,
            )
        )
    return talks


def _sessions(trace: Trace) -> list[list[TraceRequest]]:
    """In the order in which they begin, turns in theirs."""
    found: dict[str, list[TraceRequest]] = {}
    for request in trace.requests:
        found.setdefault(request.session, []).append(request)
    return [sorted(requests, key=lambda request: request.turn) for requests in found.values()]


def read_talks(path: Path, workload: Workload) -> list[Talk]:
    """The conversations of a file, as many as the workload has (0: all): what users say in them; answers are the server's own.

    JSON, or JSON lines, of objects with `messages` (OpenAI's form) or `conversations` (ShareGPT's). Raises `TalkError`.
    """
    rng = random.Random(workload.seed)
    talks, arrival = [], 0.0
    for number, row in enumerate(_rows(path)):
        if workload.conversations and number == workload.conversations:
            break
        messages = _messages(row, f"{path}: conversation {number + 1}")
        arrival += rng.expovariate(workload.arrivals) if workload.arrivals else 0.0
        said = [message["content"] for message in messages if message["role"] == "user"]
        opening = [message for message in messages[:1] if message["role"] == "system"]
        if said:
            answers = [workload.answer_tokens] * len(said)
            talks.append(Talk(opening, said, answers, _thinks(rng, workload, len(said)), arrival))
    if not talks:
        raise TalkError(f"{path}: no conversation with a user's message")
    return talks


def _rows(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)
    except OSError as error:
        raise TalkError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise TalkError(f"{path}: not JSON, nor JSON lines: {error}") from None


def _messages(row: Any, place: str) -> list[dict[str, str]]:
    roles = {"human": "user", "gpt": "assistant"}
    found: list[tuple[Any, Any]]
    match row:
        case {"messages": [*turns]}:
            found = [(turn.get("role"), turn.get("content")) for turn in turns if isinstance(turn, dict)]
        case {"conversations": [*turns]}:
            found = [(turn.get("from"), turn.get("value")) for turn in turns if isinstance(turn, dict)]
        case _:
            raise TalkError(f"{place}: has neither messages nor conversations")
    if len(found) < len(turns) or not all(isinstance(part, str) for pair in found for part in pair):
        raise TalkError(f"{place}: a turn is no object with a role and a text")
    texts: list[tuple[str, str]] = found
    return [{"role": roles.get(role, role), "content": text} for role, text in texts]


def _opening(system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _thinks(rng: random.Random, workload: Workload, turns: int) -> list[float]:
    return [rng.expovariate(1 / workload.think) if workload.think else 0.0 for _ in range(turns)]


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))
