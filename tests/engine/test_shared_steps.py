"""Steps of several prompts: no longer than is efficient, since all their first tokens wait for all of it."""

from __future__ import annotations

import pytest

from helpers.fake_rig import Rig
from tierax.engine.request import Request


def sequence(start: int, count: int) -> list[int]:
    """A prompt of its own: no two starts below 1,000 share a token."""
    return [start * 1000 + index for index in range(count)]


def chunks(rig: Rig) -> list[list[tuple[str, int]]]:
    """Prompt tokens of each step, by request."""
    return [
        [
            (row.request.id, row.count)
            for row in (*plan.chunks, *plan.decodes)
            if row.start < row.request.num_prompt
        ]
        for plan in rig.device.plans
    ]


def steps_to_first_token(rig: Rig, request: Request) -> int:
    return next(
        step
        for step, plan in enumerate(rig.device.plans)
        if any(row.request is request and row.sample for row in (*plan.chunks, *plan.decodes))
    )


def test_a_prompt_by_itself_fills_the_step() -> None:
    rig = Rig(budget=32, shared=8)
    request = rig.add(sequence(1, 50), 1)
    rig.run()
    assert chunks(rig) == [[("r0", 32)], [("r0", 18)]]
    rig.expect_solo(request)


def test_several_share_a_step_up_to_the_bound_and_first_tokens_come_earlier() -> None:
    prompts = [sequence(n, 6) for n in range(4)]
    apart, together = Rig(budget=32, shared=8), Rig(budget=32)
    for rig in (apart, together):
        requests = [rig.add(prompt, 1) for prompt in prompts]
        rig.run()
        for request in requests:
            rig.expect_solo(request)
    assert chunks(together) == [[("r0", 6), ("r1", 6), ("r2", 6), ("r3", 6)]]
    assert chunks(apart) == [[("r0", 6), ("r1", 2)], [("r1", 4), ("r2", 4)], [("r2", 2), ("r3", 6)]]


def test_nobody_joins_a_step_that_one_prompt_has_made_long() -> None:
    rig = Rig(budget=32, shared=8)
    long, short = rig.add(sequence(1, 35), 1), rig.add(sequence(2, 4), 1)
    rig.run()
    assert chunks(rig) == [[("r0", 32)], [("r0", 3), ("r1", 4)]]
    for request in (long, short):
        rig.expect_solo(request)


def test_a_step_that_is_long_anyway_is_filled() -> None:
    rig = Rig(budget=32, shared=8)
    requests = [rig.add(sequence(1, 52), 1), rig.add(sequence(2, 4), 1), rig.add(sequence(3, 30), 1)]
    rig.run()
    assert chunks(rig) == [[("r0", 32)], [("r0", 20), ("r1", 4), ("r2", 8)], [("r2", 22)]]
    for request in requests:
        rig.expect_solo(request)


@pytest.mark.parametrize(("shared", "steps"), [(8, 3), (3, 1)])
def test_decodes_count(shared: int, steps: int) -> None:
    """Three of them leave room for one prompt of five in eight tokens; where they fill the bound alone, there is none."""
    rig = Rig(seqs=6, budget=24, shared=shared)
    running = [rig.add(sequence(n, 2), 30) for n in range(3)]
    while any(request.num_output < 2 for request in running):
        rig.step()
    late = [rig.add(sequence(10 + n, 5), 1) for n in range(3)]
    rig.run()
    assert len({steps_to_first_token(rig, request) for request in late}) == steps
    for request in (*running, *late):
        rig.expect_solo(request)


def test_urgent_prompts_leave_the_others_what_is_left_of_the_bound() -> None:
    rig = Rig(budget=32, shared=8)
    later, urgent = rig.add(sequence(1, 6), 1, priority=5), rig.add(sequence(2, 5), 1, priority=-5)
    rig.run()
    assert chunks(rig) == [[("r1", 5), ("r0", 3)], [("r0", 3)]]
    for request in (later, urgent):
        rig.expect_solo(request)
