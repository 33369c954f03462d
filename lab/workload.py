"""Synthetic conversations in the shape of public chat logs: shared system prompts, growing turns, thinking users."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import dataclass
from itertools import accumulate

from .errors import LabError
from .traces.trace import Trace, TraceRequest

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens, times in seconds; all of them means."""

    sessions: int = 1000
    turns: float = 3.7
    """Geometric: after each turn the session goes on with the same chance."""
    most_turns: int = 40
    systems: int = 20
    """Different system prompts, chosen by Zipf's law."""
    zipf: float = 1.0
    """Its exponent: 0 = all alike."""
    system_tokens: int = 1536
    """Rounded up to whole blocks of 16, so that all sessions of a system prompt share all of it."""
    first_tokens: int = 1230
    """First message; this and the next two are lognormal."""
    user_tokens: int = 200
    answer_tokens: int = 350
    spread: float = 0.8
    """Sigma of the logarithms."""
    think: float = 20.0
    """Exponential: from an answer to the next message."""
    session_rate: float = 1.0
    """Sessions that begin per second, as a Poisson process."""
    token_seconds: float = 0.03
    """Per token of an answer: only for the recorded arrivals of later turns, which a closed run does not use."""
    longest: int = 32_768
    """A session ends before a turn would pass this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise LabError(f"turns: a conversation has at least one, got {self.turns:g}")


PRESETS = {
    "sharegpt": Workload(),
    "assistants": Workload(
        turns=6, system_tokens=4096, first_tokens=400, user_tokens=120, answer_tokens=250, zipf=1.2
    ),
    "single": Workload(turns=1, systems=1, system_tokens=512, first_tokens=600),
}
"""`sharegpt` has 3.7 turns and prompts of 4.2K tokens in the mean; it has the shape of such logs, not their text."""


def make_workload(workload: Workload, name: str = "workload") -> Trace:
    """The same for the same workload. Answers are part of the next prompt, and known."""
    rng = random.Random(workload.seed)
    system_blocks = -(-workload.system_tokens // BLOCK_TOKENS)
    weights = list(accumulate(1 / rank**workload.zipf for rank in range(1, workload.systems + 1)))
    next_block, start = workload.systems * system_blocks, 0.0
    requests: list[TraceRequest] = []
    for number in range(workload.sessions):
        start += rng.expovariate(workload.session_rate)
        system = rng.choices(range(workload.systems), cum_weights=weights)[0]
        blocks = array("i", range(system * system_blocks, (system + 1) * system_blocks))
        lengths = _turns(workload, rng, system_blocks * BLOCK_TOKENS)
        own = -(-lengths[-1][1] // BLOCK_TOKENS) - system_blocks
        blocks.extend(range(next_block, next_block + own))
        next_block += own
        requests += _session(workload, rng, f"s{number}", start, blocks, lengths)
    requests.sort(key=lambda request: request.arrival)
    notes = [
        f"synthetic, seed {workload.seed}: {workload.sessions} sessions of {workload.turns:g} turns,"
        f" {workload.systems} system prompts of {system_blocks * BLOCK_TOKENS} tokens"
    ]
    return Trace(name, requests, BLOCK_TOKENS, notes)


def _turns(workload: Workload, rng: random.Random, system_tokens: int) -> list[tuple[int, int]]:
    """Of each turn: where its prompt ends, and where its answer does, from the start of the session."""
    ends: list[tuple[int, int]] = []
    at = system_tokens
    while len(ends) < workload.most_turns:
        prompt = at + _length(rng, workload.user_tokens if ends else workload.first_tokens, workload.spread)
        at = prompt + _length(rng, workload.answer_tokens, workload.spread)
        if ends and at > workload.longest:
            break
        ends.append((prompt, at))
        if rng.random() >= 1 - 1 / workload.turns:
            break
    return ends


def _length(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def _session(
    workload: Workload,
    rng: random.Random,
    name: str,
    start: float,
    blocks: array[int],
    ends: list[tuple[int, int]],
) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    arrival = start
    for turn, (prompt, end) in enumerate(ends):
        think = rng.expovariate(1 / workload.think) if turn and workload.think else 0.0
        arrival += think
        requests.append(
            TraceRequest(
                arrival=arrival,
                blocks=blocks[: -(-end // BLOCK_TOKENS)],
                prompt_tokens=prompt,
                output_tokens=end - prompt,
                session=name,
                turn=turn,
                think=think if turn else None,
            )
        )
        arrival += (end - prompt) * workload.token_seconds
    return requests
