"""Constrained requests in the real loop on a fake device: masks, ends, forced tokens, and every kind of trouble."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest

from helpers.byte_tokenizer import byte_tokenizer
from helpers.fake_rig import Rig
from helpers.script_matcher import ScriptMatcher
from tierax.engine.request import Request
from tierax.engine.text import IncrementalText

PROMPT = list(range(1, 14))
LETTERS = range(97, 100)
STOP = 7


def word(text: str) -> list[set[int]]:
    """Forced bytes, all below 100."""
    return [{byte} for byte in text.encode()]


def add(rig: Rig, steps: Sequence[set[int]], most: int = 40, **options: Any) -> Request:
    matcher = ScriptMatcher(steps, stop_ids=[STOP], complete=options.pop("complete", ()))
    return rig.add(PROMPT, most, matcher=matcher, stop_ids=[STOP], **options)


def expect(rig: Rig, request: Request) -> None:
    matcher = request.matcher
    assert isinstance(matcher, ScriptMatcher)
    rig.expect_solo(request, matcher.again())


def rows_of(rig: Rig, request: Request) -> list[int]:
    """Tokens that each step computed for a request after its prompt."""
    return [
        row.count
        for plan in rig.device.plans
        for row in plan.rows
        if row.request is request and row.start >= request.num_prompt
    ]


# --- masks and ends


def test_a_mask_decides_and_the_text_ends_with_the_constraint() -> None:
    rig = Rig()
    request = add(rig, [set(LETTERS)] * 5)
    rig.run()
    expect(rig, request)
    assert set(rig.output(request)) <= set(LETTERS)
    assert (request.finish_reason, request.num_output) == ("stop", 5)
    assert rig.deltas[request.id][-1].token_ids != [], "the last token brings the end with it"


def test_an_end_token_comes_where_the_text_may_end_and_nowhere_else() -> None:
    ends = []
    for seed in range(30):
        rig = Rig()
        request = add(rig, [set(LETTERS)] * 6, complete=[2, 4], seed=seed)
        rig.run()
        expect(rig, request)
        ends.append(request.num_output if rig.output(request)[-1] == STOP else -request.num_output)
    assert set(ends) == {3, 5, -6}


def test_a_length_cuts_a_text_and_says_so_unless_it_is_whole() -> None:
    rig = Rig()
    cut, whole = add(rig, [set(LETTERS)] * 5, 4), add(rig, [set(LETTERS)] * 5, 5)
    rig.run()
    assert (cut.finish_reason, whole.finish_reason) == ("length", "stop")


def test_neighbours_without_a_constraint_lose_nothing() -> None:
    alone = Rig()
    expected = [alone.add(PROMPT, 12, seed=n) for n in range(3)]
    alone.run()
    rig = Rig(seqs=5)
    free = [rig.add(PROMPT, 12, seed=n) for n in range(3)]
    bound = [add(rig, [set(LETTERS)] * 20, seed=n) for n in range(2)]
    rig.run()
    assert [rig.output(r) for r in free] == [alone.output(r) for r in expected]
    for request in free:
        rig.expect_solo(request)
    for request in bound:
        expect(rig, request)


def test_a_step_without_constraints_is_submitted_whole() -> None:
    rig = Rig()
    rig.add(PROMPT, 4)
    rig.run()
    assert rig.loop.stats.masks == rig.loop.stats.constrained_tokens == 0
    assert not any(plan.constrained for plan in rig.device.plans)


def test_a_constraint_costs_no_step_but_the_one_after_the_end() -> None:
    plain, bound = Rig(), Rig()
    plain.add(PROMPT, 9)
    add(bound, [set(LETTERS)] * 9)
    plain.run()
    bound.run()
    assert bound.loop.stats.steps == plain.loop.stats.steps + 1


def test_a_text_that_can_have_no_token_ends_at_once() -> None:
    rig = Rig()
    request = add(rig, [])
    rig.run()
    assert (request.finish_reason, rig.output(request)) == ("stop", [])


def test_a_stop_string_still_counts() -> None:
    rig = Rig()
    text = IncrementalText(byte_tokenizer(), stop=["ab"])
    request = add(rig, [{97}, {98}, {99}, {97}], text=text)
    rig.run()
    assert request.finish_reason == "stop"
    assert rig.output(request) == [97, 98]
    assert "".join(delta.text for delta in rig.deltas[request.id]) == ""


# --- forced tokens


def test_forced_tokens_are_computed_in_one_chunk() -> None:
    rig = Rig()
    request = add(rig, [set(LETTERS), *word("Hello"), set(LETTERS), set(LETTERS)])
    rig.run()
    expect(rig, request)
    assert rig.loop.stats.jumped_tokens == 5
    assert rows_of(rig, request) == [1, 5, 1, 1], "the last row was on its way when the text ended"


def test_forced_tokens_at_the_start_follow_the_prompt() -> None:
    rig = Rig()
    request = add(rig, [*word("Hello"), set(LETTERS)])
    rig.run()
    expect(rig, request)
    assert rig.loop.stats.jumped_tokens == 5
    assert rows_of(rig, request)[0] == 5


def test_a_text_may_be_forced_to_its_end() -> None:
    rig = Rig()
    request = add(rig, [set(LETTERS), *word("end")])
    rig.run()
    expect(rig, request)
    assert request.finish_reason == "stop"
    assert rows_of(rig, request) == [1]


@pytest.mark.parametrize(("others", "jumped"), [(3, 2), (7, 0)])
def test_a_jump_that_saves_too_little_is_not_made(others: int, jumped: int) -> None:
    """It would lengthen the step of all who run."""
    rig = Rig(seqs=8, pages=128)
    request = add(rig, [set(LETTERS), *word("Hi"), set(LETTERS)])
    for _ in range(others):
        rig.add(PROMPT, 30)
    rig.run()
    expect(rig, request)
    assert rig.loop.stats.jumped_tokens == jumped


def test_a_single_forced_token_is_sampled() -> None:
    rig = Rig()
    request = add(rig, [set(LETTERS), *word("H"), set(LETTERS)])
    rig.run()
    expect(rig, request)
    assert rig.loop.stats.jumped_tokens == 0


@pytest.mark.parametrize("options", [{"logprobs": 0}, {"frequency_penalty": 0.5}])
def test_who_needs_every_token_sampled_gets_the_same_ones_without_a_jump(options: dict[str, Any]) -> None:
    rig = Rig()
    steps = [set(LETTERS), *word("Hello"), set(LETTERS)]
    request, jumping = add(rig, steps, **options), add(rig, steps)
    rig.run()
    expect(rig, request)
    assert rig.output(request) == rig.output(jumping)
    assert rig.loop.stats.jumped_tokens == 5
    if "logprobs" in options:
        assert [len(delta.logprobs) for delta in rig.deltas[request.id]] == [1] * 7


@pytest.mark.parametrize("most", [1, 2, 3, 6, 7])
def test_a_length_may_fall_into_forced_tokens(most: int) -> None:
    rig = Rig()
    request = add(rig, [set(LETTERS), *word("Hello"), set(LETTERS)], most)
    rig.run()
    expect(rig, request)
    assert request.num_output == most
    assert request.finish_reason == ("stop" if most == 7 else "length")


def test_a_stop_string_may_fall_into_forced_tokens() -> None:
    rig = Rig()
    text = IncrementalText(byte_tokenizer(), stop=["ell"])
    request = add(rig, [set(LETTERS), *word("Hello Worlc")], text=text)
    rig.run()
    assert rig.output(request)[1:] == list(b"Hell")
    assert "".join(delta.text for delta in rig.deltas[request.id])[1:] == "H"


def test_forced_tokens_of_two_answers_share_pages_but_count_as_no_hits() -> None:
    rig = Rig(page_size=4)
    steps = [*word("Hello my World"), set(LETTERS), set(LETTERS)]
    requests = [add(rig, steps, seed=n) for n in range(3)]
    rig.run()
    for request in requests:
        expect(rig, request)
        assert request.cached_tokens < request.num_prompt
    assert rig.loop.stats.cached_tokens == sum(request.cached_tokens for request in requests)
    assert len(rig.device.computed(requests[2])) < len(rig.device.computed(requests[0]))


def test_forced_tokens_beyond_a_step_take_several() -> None:
    rig = Rig(budget=4)
    request = add(rig, [set(LETTERS), *word("Hello my World"), set(LETTERS)])
    rig.run()
    expect(rig, request)
    assert rows_of(rig, request)[:5] == [1, 4, 4, 4, 2]


# --- trouble


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_a_constraint_that_fails_ends_its_request_and_no_other() -> None:
    rig = Rig()
    matcher = ScriptMatcher([set(LETTERS)] * 9, fails_at=3)
    doomed = rig.add(PROMPT, 20, matcher=matcher)
    fine, free = add(rig, [set(LETTERS)] * 9), rig.add(PROMPT, 12)
    rig.run()
    assert doomed.finish_reason == "error"
    assert doomed.num_output == 4
    assert rig.deltas[doomed.id][-1].error == "the script fails here"
    expect(rig, fine)
    rig.expect_solo(free)


@pytest.mark.parametrize("where", ["submit_error", "choose_error", "collect_error"])
def test_a_fault_ends_what_runs_and_the_rest_goes_on(where: str, quiet: None) -> None:
    rig = Rig(seqs=2)
    requests = [add(rig, [set(LETTERS), *word("Hello"), *[set(LETTERS)] * 4], seed=n) for n in range(4)]
    rig.step()
    rig.step()
    setattr(rig.device, where, RuntimeError("lost"))
    rig.run()
    assert [r.finish_reason for r in requests] == ["error", "error", "stop", "stop"]
    assert rig.loop.stats.faults == 1
    for request in requests[2:]:
        expect(rig, request)


def test_an_abort_in_every_step_leaves_nothing_behind() -> None:
    for steps in range(12):
        rig = Rig()
        request = add(rig, [set(LETTERS), *word("Hello"), *[set(LETTERS)] * 4])
        other = add(rig, [set(LETTERS)] * 9)
        for _ in range(steps):
            rig.step()
        rig.loop.abort(request.id)
        rig.run()
        expect(rig, other)


def test_a_callback_may_abort_a_neighbour_whose_mask_is_next() -> None:
    rig = Rig()
    first = rig.request(PROMPT, 9, id="first", matcher=ScriptMatcher([set(LETTERS)] * 9))
    second = rig.request(PROMPT, 9, id="second", matcher=ScriptMatcher([*word("Hello"), set(LETTERS)]))
    first.on_delta = lambda delta: rig.loop.abort("second")
    rig.loop.add(first)
    rig.loop.add(second)
    rig.run()
    assert (first.finish_reason, second.finish_reason) == ("stop", "abort")


def random_script(rng: random.Random) -> ScriptMatcher:
    steps: list[set[int]] = []
    while len(steps) < rng.choice([1, 20, 40]):
        free = [set(rng.sample(range(10, 100), rng.choice([2, 30]))) for _ in range(rng.randint(0, 3))]
        steps += [*free, *word("Hello my World"[: rng.randint(0, 14)])]
    complete = [place for place in range(len(steps)) if rng.random() < 0.1]
    return ScriptMatcher(steps or [{50}], stop_ids=[STOP], complete=complete)


@pytest.mark.parametrize("round", range(6))
def test_random_mixes(round: int, quiet: None) -> None:
    retractions = jumped = 0
    for seed in range(round * 40, (round + 1) * 40):
        stats = run_mix(random.Random(seed)).loop.stats
        retractions += stats.retractions
        jumped += stats.jumped_tokens
    assert min(retractions, jumped) > 5, "the mixes are too tame"


def run_mix(rng: random.Random) -> Rig:
    page_size = rng.choice([1, 4, 16])
    rig = Rig(
        pages=max(3, int(-(-36 // page_size) * rng.choice([1, 1, 1.3, 3]))),
        page_size=page_size,
        seqs=rng.randint(2, 6),
        budget=rng.choice([1, 2, 7, 24, 317]),
        enabled=rng.random() < 0.8,
    )
    arrivals = sorted(rng.randrange(rng.choice([1, 20])) for _ in range(rng.randint(3, 9)))
    requests = []
    for step in range(6000):
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            bound = rng.random() < 0.7
            request = rig.request(
                [rng.randrange(3) for _ in range(rng.randint(1, 8))],
                rng.choice([5, 28]),
                seed=rng.randrange(3),
                stop_ids=[STOP] if bound else rng.sample(range(100), rng.choice([0, 3])),
                matcher=random_script(rng) if bound else None,
                logprobs=rng.choice([None, None, 0]),
            )
            rig.loop.add(request)
            requests.append(request)
        if rig.loop.idle and not arrivals:
            break
        if rig.loop.request_ids and rng.random() < 0.02:
            rig.loop.abort(rng.choice(rig.loop.request_ids))
        if rng.random() < 0.004:
            where = rng.choice(["submit_error", "choose_error", "collect_error"])
            if where != "choose_error":
                setattr(rig.device, where, RuntimeError("lost"))
        if not rig.step():
            rig.clock.advance(0.001)
    else:
        raise AssertionError("not idle after 6,000 steps")
    assert rig.cache.in_use == 0
    for request in requests:
        if request.finish_reason not in ("abort", "error"):
            matcher = request.matcher
            rig.expect_solo(request, matcher.again() if isinstance(matcher, ScriptMatcher) else None)
        assert request.cached_tokens < request.num_prompt
    assert rig.loop.stats.cached_tokens == sum(request.cached_tokens for request in requests)
    return rig
