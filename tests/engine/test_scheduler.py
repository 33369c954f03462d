"""What a step holds: budgets, chunks, and what requests share."""

from __future__ import annotations

import pytest

from helpers.fake_executor import solo
from helpers.fake_rig import Rig
from tierax.engine.request import Request

PAGE_SIZES = (1, 4, 16)


def sequence(start: int, count: int) -> list[int]:
    """A prompt of its own: no two starts below 1,000 share a token."""
    return [start * 1000 + index for index in range(count)]


# --- one step


@pytest.mark.parametrize("budget", [1, 2, 7, 317])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_budget_gives_the_same_tokens(budget: int, page_size: int) -> None:
    rig = Rig(pages=400 // page_size, page_size=page_size, budget=budget)
    requests = [rig.add(sequence(n, length), 8, seed=n) for n, length in enumerate((1, 2, 30, 17, 5))]
    rig.run()
    for request in requests:
        rig.expect_solo(request)
    assert rig.loop.stats.computed_tokens >= sum(len(r.tokens) - 1 for r in requests)


def test_a_long_prompt_is_cut_into_chunks_that_run_beside_decodes() -> None:
    rig = Rig(budget=8)
    short = rig.add(sequence(1, 3), 30)
    rig.step()
    long = rig.add(sequence(2, 50), 2)
    rig.run()
    mixed = [plan for plan in rig.device.plans if plan.chunks and plan.decodes]
    assert [plan.num_tokens for plan in mixed[:6]] == [8] * 6
    assert rig.device.computed(long)[:50] == list(range(50))
    rig.expect_solo(short)
    rig.expect_solo(long)


def test_the_next_step_is_submitted_before_the_last_one_is_collected() -> None:
    rig = Rig()
    request = rig.add(sequence(1, 4), 5)
    rig.step()
    assert (len(rig.device.plans), request.num_output) == (1, 0)
    rig.step()
    assert (len(rig.device.plans), request.num_output) == (2, 1)


def test_a_step_takes_no_more_requests_than_there_are_slots() -> None:
    rig = Rig(seqs=2, budget=100)
    requests = [rig.add(sequence(n, 5), 4) for n in range(5)]
    while not rig.loop.idle:
        rig.step()
        assert len(rig.loop.scheduler.running) <= 2
    for request in requests:
        rig.expect_solo(request)


# --- sharing


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_full_hit_still_computes_its_last_token(page_size: int) -> None:
    rig = Rig(page_size=page_size)
    prompt = sequence(1, 2 * page_size)
    first, second, third = (_run_one(rig, prompt) for _ in range(3))
    for again in (second, third):
        assert rig.output(again) == rig.output(first)
        assert again.cached_tokens == (2 * page_size - 1) // page_size * page_size
        assert rig.device.computed(again)[0] == again.cached_tokens


def _run_one(rig: Rig, prompt: list[int]) -> Request:
    request = rig.add(prompt)
    rig.run()
    rig.expect_solo(request)
    return request


@pytest.mark.parametrize("budget", [3, 10, 64])
def test_a_common_prefix_that_arrives_together_is_computed_once(budget: int) -> None:
    rig = Rig(page_size=4, budget=budget)
    prefix = sequence(1, 20)
    first = rig.add([*prefix, 7, 8, 9], 1)
    second = rig.add([*prefix, 5, 6], 1)
    third = rig.add(prefix, 1)
    rig.run()
    assert len(rig.device.computed(first)) == 23
    assert len(rig.device.computed(second)) == 2
    assert len(rig.device.computed(third)) == 4, "the page of the last token is computed again"
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 20, 16)
    assert rig.loop.stats.computed_tokens == 29
    if budget == 64:
        assert len(rig.device.plans) == 1, "all in one step"
    for request in (first, second, third):
        rig.expect_solo(request)


def test_what_an_aborted_prefill_has_computed_is_not_computed_again() -> None:
    rig = Rig(page_size=4, budget=8)
    prompt = sequence(1, 40)
    first, second = rig.add(prompt, 2), rig.add(prompt, 2)
    rig.step()
    rig.step()
    assert first.num_computed == 16
    rig.loop.abort(first.id)
    rig.run()
    assert rig.device.computed(second)[0] == 16
    assert second.cached_tokens == 16
    rig.expect_solo(second)


def test_the_followers_of_a_prefill_share_each_page_as_it_comes() -> None:
    # The second is admitted in the step in which the first is cut, then both run side by side.
    rig = Rig(page_size=4, budget=16, seqs=4)
    prompt = sequence(1, 12)
    first = rig.add([*prompt, *sequence(2, 20)], 1)
    rig.step()
    second = rig.add([*prompt, *sequence(3, 9)], 1)
    rig.run()
    assert rig.device.computed(second) == list(range(12, 21))
    rig.expect_solo(first)
    rig.expect_solo(second)


def test_identical_requests_in_a_full_pool_keep_their_own_answers() -> None:
    rig = Rig(page_size=4, pages=10, budget=64)
    twins = [rig.add(sequence(1, 12), 8), rig.add(sequence(1, 12), 8)]
    rig.step()
    filler = rig.add(sequence(2, 24), 6)
    rig.run()
    for request in (*twins, filler):
        rig.expect_solo(request)


def test_a_prompt_follows_the_answer_that_is_being_written() -> None:
    # With two tokens a step the answer grows as fast as the prompt that repeats it is computed.
    rig = Rig(page_size=4, budget=2, pages=64)
    writer = rig.add(sequence(1, 8), 40)
    while writer.num_output < 6:
        rig.step()
    follower = rig.add([*sequence(1, 8), *solo(writer)], 3)
    rig.run()
    computed = [position for position in rig.device.computed(follower) if position < 48]
    assert computed[:3] == [12, 13, 16], "in the middle of a page the writer has finished it"
    assert follower.cached_tokens == 48 - len(computed)
    rig.expect_solo(writer)
    rig.expect_solo(follower)


def test_the_choices_of_one_prompt_share_its_prefill() -> None:
    rig = Rig(page_size=4, budget=64)
    choices = [rig.add(sequence(1, 18), 5, seed=seed) for seed in (11, 12, 13)]
    rig.run()
    assert [len(rig.device.computed(r)) - 4 for r in choices] == [18, 2, 2]
    assert len({tuple(rig.output(r)) for r in choices}) == 3
    for choice in choices:
        rig.expect_solo(choice)


def test_the_answer_is_reused_by_the_next_turn() -> None:
    rig = Rig(page_size=4)
    first = _run_one(rig, sequence(1, 10))
    turn = rig.add([*first.tokens, *sequence(2, 5)])
    rig.run()
    assert turn.cached_tokens >= len(first.tokens) - 4
    rig.expect_solo(turn)


def test_tenants_share_nothing_and_their_own_requests_do() -> None:
    rig = Rig(page_size=4)
    prompt = sequence(1, 13)
    cached = []
    for namespace in (b"s1", b"s1", b"s2", b"", b"\0s1"):
        request = rig.add(prompt, namespace=namespace)
        rig.run()
        rig.expect_solo(request)
        cached.append(request.cached_tokens)
    assert cached == [0, 12, 0, 0, 0]


def test_hits_count_once_per_request_and_never_what_is_recomputed() -> None:
    rig = Rig(page_size=4, pages=14, seqs=4, budget=24)
    prompts = [sequence(n, 10 + n % 7) for n in range(60)]
    first = [rig.add(prompt, 12) for prompt in prompts]
    rig.run()
    stats = rig.loop.stats
    assert stats.retractions > 0
    assert stats.cached_tokens == 0
    assert stats.prompt_tokens == sum(len(prompt) for prompt in prompts)
    again = [rig.add(prompt, 12) for prompt in prompts[-4:]] + [rig.add(prompts[-1], 12) for _ in range(3)]
    rig.run()
    assert stats.cached_tokens == sum(r.cached_tokens for r in again) > 0
    for request in (*first, *again):
        rig.expect_solo(request)
