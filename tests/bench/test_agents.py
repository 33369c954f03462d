"""The workload of agents: its lengths are those that were promised, and a seed fixes all of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tierax.bench.agents import (
    QUICK,
    Agents,
    Conversation,
    Workload,
    ideal_cache,
    make_conversations,
    turn_counts,
)

VOCAB = 49_152


def _play(agents: Agents, workload: Workload) -> list[int]:
    """Answers in the order of sending; returns whose turn it was, by request."""
    order: list[int] = []
    live: list[Conversation] = []
    while True:
        while (conversation := agents.next()) is not None:
            live.append(conversation)
            order.append(conversation.index)
        assert len(live) <= workload.running
        if not live:
            return order
        agents.answered(live.pop(0), [7] * workload.answer_tokens)


@pytest.fixture(scope="module")
def played() -> tuple[Agents, list[int]]:
    agents = Agents(Workload(), VOCAB)
    return agents, _play(agents, Workload())


def test_lengths_are_those_of_the_issue(played: tuple[Agents, list[int]]) -> None:
    conversations = played[0].conversations
    turns = [len(c.messages) for c in conversations]
    assert len(turns) == 24
    assert min(turns) >= 1
    assert max(turns) <= 8
    assert sum(turns) / 24 == pytest.approx(3.7, abs=0.05)
    assert {len(c.messages[0]) for c in conversations} == {3072 + 512}
    assert {len(m) for c in conversations for m in c.messages[1:]} == {64}
    prompts = [p for c in conversations for p in c.prompts()]
    assert sum(map(len, prompts)) / len(prompts) == pytest.approx(3800, rel=0.02)
    assert max(map(len, prompts)) + 64 <= Workload().longest == 3072 + 512 + 7 * 128 + 64


def test_system_prompts_are_four_and_all_else_is_different(played: tuple[Agents, list[int]]) -> None:
    conversations = played[0].conversations
    systems = [tuple(c.messages[0][:3072]) for c in conversations]
    assert sorted(systems.count(s) for s in set(systems)) == [6, 6, 6, 6]
    own = [tuple(c.messages[0][3072:]) for c in conversations]
    own += [tuple(m) for c in conversations for m in c.messages[1:]]
    assert len(set(own)) == len(own) == played[0].num_requests


def test_a_prompt_is_the_whole_history_with_its_answers() -> None:
    conversation = Conversation(0, [[1, 2], [3], [4]], [1, 1])
    assert conversation.prompt() == [1, 2]
    conversation.hear([8])
    assert conversation.prompt() == [1, 2, 8, 3]
    conversation.hear([9])
    assert not conversation.finished
    conversation.hear([10])
    assert conversation.finished
    assert conversation.prompts() == [[1, 2], [1, 2, 8, 3], [1, 2, 8, 3, 9, 4]]


def test_an_infinite_cache_hits_91_percent(played: tuple[Agents, list[int]]) -> None:
    ideal = ideal_cache(played[0].conversations, 16, 3072)
    assert ideal.hit_rate == pytest.approx(0.91, abs=0.005)
    # The device tier of the small rows holds well below two thirds of it.
    assert 0.5 < Workload().device_tokens / (ideal.pages * 16) < 0.61


def test_the_ideal_cache_by_hand() -> None:
    # Pages of 2. Of the first prompt nothing is known; afterwards 1 2 | 3 4 | 5 is, and 6, the last token, is not.
    first = Conversation(0, [[1, 2, 3], [7, 8]], [1], answers=[[4, 5, 6], [0]])
    # Its prompt begins with two known pages, but the last token is always computed.
    second = Conversation(1, [[1, 2, 3, 4]], [], answers=[[9]])
    ideal = ideal_cache([first, second], 2, system_tokens=2)
    # 3 + 8 + 4 prompt tokens; hits 0, 4 and 2.
    assert ideal.hit_rate == 6 / 15
    assert ideal.hit_rate_own == 2 / 9
    # 1 2 | 3 4 | 5 6 | 7 8: the last answer's only token has no KV.
    assert ideal.pages == 4


def test_all_are_alive_and_none_comes_twice_before_most_others(played: tuple[Agents, list[int]]) -> None:
    agents, order = played
    assert len(order) == agents.num_requests == 89
    begun = [order.index(i) for i in range(24)]
    ended = [len(order) - 1 - order[::-1].index(i) for i in range(24)]
    several = [i for i in range(24) if len(agents.conversations[i].messages) > 1]
    assert max(begun) < min(ended[i] for i in several) + 24
    # While the house is full, others send at least half as many requests as there are idle conversations.
    gaps = [
        order.index(i, at + 1) - at for at, i in enumerate(order[:40]) if i in order[at + 1 :] and at < 40
    ]
    assert min(gaps) >= 9
    assert max(gaps) > min(gaps)


def test_no_more_than_six_run_at_once() -> None:
    agents = Agents(Workload(), VOCAB)
    live: list[Conversation] = []
    sizes = []
    for _ in range(40):
        while (conversation := agents.next()) is not None:
            live.append(conversation)
        sizes.append(len(live))
        agents.answered(live.pop(0), [7] * 64)
    assert sizes[:7] == [6] * 7
    assert set(sizes[6:]) == {6}


def test_what_stands_for_all_is_like_all(played: tuple[Agents, list[int]]) -> None:
    agents = Agents(Workload(), VOCAB, Workload().uncached)
    order = _play(agents, Workload())
    assert set(order) == set(range(8, 16))
    few = [len(p) for c in agents.conversations for p in c.prompts()]
    everything = [len(p) for c in played[0].conversations for p in c.prompts()]
    assert sum(few) / len(few) == pytest.approx(sum(everything) / len(everything), rel=0.005)
    assert len(few) == agents.num_requests == len(order) >= 24
    assert len({tuple(c.messages[0][:3072]) for c in agents.conversations}) == 4


def test_a_seed_fixes_everything() -> None:
    def plain(workload: Workload) -> list[tuple[list[list[int]], list[int]]]:
        return [(c.messages, c.thinks) for c in make_conversations(workload, VOCAB)]

    assert plain(QUICK) == plain(QUICK)
    assert plain(QUICK) != plain(replace(QUICK, seed=1))


@pytest.mark.parametrize("mean", [1.0, 2.5, 3.7, 8.0])
def test_turns_have_the_mean(mean: float) -> None:
    workload = replace(QUICK, conversations=10, mean_turns=mean)
    counts = turn_counts(workload, random.Random(3))
    assert sum(counts) == round(10 * mean)
    assert all(1 <= count <= 8 for count in counts)


def test_a_small_vocabulary_does() -> None:
    tokens = {t for c in make_conversations(QUICK, 100) for m in c.messages for t in m}
    assert tokens == set(range(50, 100))
