"""Conversations of agents that share system prompts and wait between their turns: a workload that a seed fixes.

A think time is counted in requests that others send meanwhile, not in seconds: a run never sleeps, and the order in
which the conversations take turns hardly depends on how fast the engine under test is.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in tokens. The defaults are what the table of `tierax bench cache` is measured with."""

    conversations: int = 24
    running: int = 6
    """Requests under way at once, at most."""
    systems: int = 4
    """Different system prompts, dealt out in turn."""
    system_tokens: int = 3072
    first_tokens: int = 512
    """First message of each conversation."""
    user_tokens: int = 64
    """Each later message."""
    answer_tokens: int = 64
    most_turns: int = 8
    mean_turns: float = 3.7
    device_tokens: int = 20_480
    """Capacity of the device tier in the rows that keep it small: about 1.2 times what runs at once."""
    uncached: tuple[int, int] | None = (8, 16)
    """First and last (exclusive) of the conversations that stand for all where nothing is cached: there a request costs
    the same whoever came before, and all of them would take longer than any two other rows. The queue of the first
    requests weighs more among few: their mean time to the first token is up to an eighth above that of all. None: all."""
    seed: int = 20_260

    @property
    def longest(self) -> int:
        """Tokens of the longest possible conversation, its last answer included."""
        later = (self.most_turns - 1) * (self.user_tokens + self.answer_tokens)
        return self.system_tokens + self.first_tokens + later + self.answer_tokens


QUICK = Workload(
    conversations=6,
    running=2,
    systems=3,
    system_tokens=1024,
    first_tokens=256,
    user_tokens=32,
    answer_tokens=32,
    device_tokens=3328,
    uncached=None,
)


@dataclass(slots=True, eq=False)
class Conversation:
    """One agent's: what it will say, and what has been said so far."""

    index: int
    messages: list[list[int]]
    """User messages by turn; the first one begins with the system prompt."""
    thinks: list[int]
    """Requests of others that pass before each turn after the first."""
    history: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.answers) == len(self.messages)

    def prompt(self) -> list[int]:
        """All that was said, and the next message."""
        return self.history + self.messages[len(self.answers)]

    def hear(self, answer: Tokens) -> None:
        """The answer to `prompt()`."""
        self.history = [*self.prompt(), *answer]
        self.answers.append(list(answer))

    def prompts(self) -> list[list[int]]:
        """The prompts of the turns that are over."""
        prompts, history = [], []
        for message, answer in zip(self.messages, self.answers, strict=False):
            prompts.append(history + message)
            history = [*prompts[-1], *answer]
        return prompts


class Agents:
    """Conversations, and whose turn is next."""

    def __init__(self, workload: Workload, vocab_size: int, part: tuple[int, int] | None = None) -> None:
        """All of the workload's conversations, or those from `part[0]` up to `part[1]`."""
        self.conversations = make_conversations(workload, vocab_size)[slice(*(part or (None,)))]
        self._due = {at: at for at in range(len(self.conversations))}
        """By idle conversation's place: how many requests must have been sent before it goes on."""
        self._most_running = workload.running
        self._sent = self._answered = 0

    @property
    def num_requests(self) -> int:
        """In all."""
        return sum(len(c.messages) for c in self.conversations)

    def next(self) -> Conversation | None:
        """The conversation that sends its prompt now; None when no more may, or all are over or under way.

        If everybody still thinks, the one who is done first does not wait.
        """
        if not self._due or self._sent - self._answered >= self._most_running:
            return None
        at = min(self._due, key=lambda i: (self._due[i], i))
        del self._due[at]
        self._sent += 1
        return self.conversations[at]

    def answered(self, conversation: Conversation, answer: Tokens) -> None:
        """Ends a turn; the conversation thinks, if it has another."""
        conversation.hear(answer)
        self._answered += 1
        if not conversation.finished:
            think = conversation.thinks[len(conversation.answers) - 1]
            self._due[self.conversations.index(conversation)] = self._sent + think


def make_conversations(workload: Workload, vocab_size: int) -> list[Conversation]:
    """The same for the same workload and vocabulary. Tokens are random: nothing is shared but the system prompts."""
    rng = random.Random(workload.seed)
    # The first ids are often special tokens.
    vocabulary = range(min(256, vocab_size // 2), vocab_size)

    def words(count: int) -> list[int]:
        return rng.choices(vocabulary, k=count)

    systems = [words(workload.system_tokens) for _ in range(workload.systems)]
    away = max(1, workload.conversations - workload.running)
    conversations = []
    for index, turns in enumerate(turn_counts(workload, rng)):
        first = systems[index % workload.systems] + words(workload.first_tokens)
        later = [words(workload.user_tokens) for _ in range(turns - 1)]
        thinks = [max(1, round(away * rng.uniform(0.5, 1.5))) for _ in later]
        conversations.append(Conversation(index, [first, *later], thinks))
    return conversations


def turn_counts(workload: Workload, rng: random.Random) -> list[int]:
    """Turns by conversation, 1 to `most_turns`, with the workload's mean as nearly as whole numbers allow.

    Raises ValueError for a mean that no such numbers have.
    """
    if not 1 <= workload.mean_turns <= workload.most_turns:
        raise ValueError(f"a mean of {workload.mean_turns} turns lies outside 1 to {workload.most_turns}")
    counts = [rng.randint(1, workload.most_turns) for _ in range(workload.conversations)]
    wanted = round(workload.mean_turns * workload.conversations)
    while (excess := sum(counts) - wanted) != 0:
        step = -1 if excess > 0 else 1
        index = rng.randrange(len(counts))
        if 1 <= counts[index] + step <= workload.most_turns:
            counts[index] += step
    return counts


@dataclass(frozen=True, slots=True)
class Ideal:
    """What a cache that never forgets would do with these conversations."""

    hit_rate: float
    """Cached prompt tokens per prompt token, in whole pages; at least one token of each prompt is computed."""
    hit_rate_own: float
    """The same behind the system prompts."""
    pages: int
    """Different pages that were ever filled."""


def ideal_cache(conversations: Iterable[Conversation], page_size: int, system_tokens: int) -> Ideal:
    """Plays finished conversations through a plain set of prefixes; their order does not matter but for whose turn
    it is within each. The KV of an answer's last token is never computed, so it is no part of a prefix.
    """
    seen: set[int] = set()
    prompted = cached = own_prompted = own_cached = 0
    for conversation in conversations:
        for prompt, answer in zip(conversation.prompts(), conversation.answers, strict=True):
            hit = 0
            for end, prefix in _prefixes(prompt[:-1], page_size):
                if prefix not in seen:
                    break
                hit = end
            seen.update(prefix for _, prefix in _prefixes([*prompt, *answer][:-1], page_size))
            prompted += len(prompt)
            cached += hit
            own_prompted += len(prompt) - system_tokens
            own_cached += max(0, hit - system_tokens)
    return Ideal(cached / prompted, own_cached / own_prompted, len(seen))


def _prefixes(tokens: Tokens, page_size: int) -> Iterable[tuple[int, int]]:
    """`(end, name)` of each prefix of whole pages; a name stands for all of the tokens before `end`."""
    name = 0
    for end in range(page_size, len(tokens) + 1, page_size):
        name = hash((name, *tokens[end - page_size : end]))
        yield end, name
