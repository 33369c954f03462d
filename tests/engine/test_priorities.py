"""Priorities: who goes first, who gives way, and that everybody ends with the answer that he would have had alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fake_rig import FakeTransfers, Rig
from helpers.tiered_rig import TieredRig
from tierax.engine.request import Request, Status
from tierax.engine.schedule_policy import LPM, MAX_WAIT


def sequence(start: int, count: int) -> list[int]:
    """A prompt of its own: no two starts below 1,000 share a token."""
    return [start * 1000 + index for index in range(count)]


def admissions(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda r: r.first_scheduled if r.first_scheduled is not None else 1e9)


# --- who goes first


def test_the_lower_number_goes_first_and_equals_in_order_of_arrival() -> None:
    rig = Rig(seqs=1, budget=64)
    running = rig.add(sequence(0, 4), 8, priority=-9)
    rig.step()
    late, usual, soon, sooner, usual_too = (
        rig.add(sequence(n, 4), 2, priority=priority) for n, priority in enumerate((5, 0, -1, -2, 0), start=1)
    )
    rig.run()
    everybody = [running, sooner, soon, usual, usual_too, late]
    assert admissions(everybody) == everybody
    for request in everybody:
        rig.expect_solo(request)
    assert rig.loop.stats.retractions == 0, "nobody who waited was more urgent than the one who ran"


def test_within_a_priority_the_policy_decides() -> None:
    rig = Rig(seqs=1, budget=64, policy=LPM())
    rig.add(sequence(1, 24), 1)
    rig.run()
    cold, cached, cold_but_urgent = (
        rig.add(sequence(n, 24), 2, priority=priority) for n, priority in ((2, 0), (1, 0), (3, -1))
    )
    rig.run()
    assert admissions([cold, cached, cold_but_urgent]) == [cold_but_urgent, cached, cold]


def test_an_urgent_prompt_is_computed_before_the_rest_of_a_long_one() -> None:
    rig = Rig(page_size=4, pages=200, budget=8, seqs=4)
    long = rig.add(sequence(1, 200), 2, priority=1)
    rig.step()
    urgent = rig.add(sequence(2, 16), 2, priority=0)
    for _ in range(4):
        rig.step()
    assert urgent.num_output > 0
    assert long.num_computed < 40
    rig.run()
    rig.expect_solo(urgent)
    rig.expect_solo(long)


# --- who gives way


def test_a_slot_is_taken_from_the_least_urgent_and_given_back() -> None:
    rig = Rig(page_size=4, pages=100, seqs=2, budget=64)
    low, lower = (rig.add(sequence(n, 10), 40, priority=n) for n in (1, 2))
    while min(low.num_output, lower.num_output) < 9:
        rig.step()
    urgent = rig.add(sequence(3, 10), 5, priority=0)
    rig.step()
    assert urgent.status is Status.RUNNING, "at once, in the very next step"
    assert (low.status, lower.status) == (Status.RUNNING, Status.WAITING)
    rig.run()
    # What it had computed was in the cache still: but for its last page nothing was computed twice.
    positions = rig.device.computed(lower)
    assert 0 < len(positions) - len(set(positions)) <= 4
    assert lower.residency == 2
    assert rig.loop.stats.retractions == 1
    for request in (urgent, low, lower):
        rig.expect_solo(request)


def test_pages_are_taken_from_the_least_urgent() -> None:
    rig = Rig(page_size=4, pages=16, seqs=4, budget=64)
    low = rig.add(sequence(1, 30), 10, priority=7)
    while low.num_output < 3:
        rig.step()
    urgent = rig.add(sequence(2, 40), 4)
    rig.step()
    assert (urgent.status, low.status) == (Status.RUNNING, Status.WAITING)
    rig.run()
    rig.expect_solo(urgent)
    rig.expect_solo(low)


def test_nobody_gives_way_where_it_would_not_help() -> None:
    rig = Rig(page_size=4, pages=16, seqs=4, budget=64)
    equal = rig.add(sequence(1, 24), 12)
    low = rig.add(sequence(2, 8), 12, priority=1)
    while not (equal.num_output and low.num_output):
        rig.step()
    large = rig.add(sequence(3, 50), 2)
    while equal.finish_reason is None:
        rig.step()
        assert large.status is Status.WAITING
        if equal.num_output < 12:
            assert low.status is Status.RUNNING, "large would still have no room"
    rig.run()
    for request in (equal, low, large):
        rig.expect_solo(request)


def test_equals_do_not_displace_each_other() -> None:
    rig = Rig(seqs=1, budget=64)
    first, second = (rig.add(sequence(n, 4), 20, priority=-3) for n in (1, 2))
    rig.run()
    assert rig.loop.stats.retractions == 0
    assert first.finished_at is not None
    assert second.first_scheduled is not None
    assert first.finished_at <= second.first_scheduled


def test_one_who_waits_for_the_disk_takes_nobodys_place() -> None:
    transfers = FakeTransfers()
    transfers.ready_at = {"urgent": 0.2}
    rig = Rig(seqs=1, budget=64, transfers=transfers)
    low = rig.add(sequence(1, 4), 400, priority=1)
    rig.step()
    urgent = rig.add(sequence(2, 4), 2, id="urgent")
    while urgent.first_scheduled is None:
        assert low.status is Status.RUNNING
        rig.step()
    assert rig.clock() >= 0.2
    rig.run()
    rig.expect_solo(low)
    rig.expect_solo(urgent)


def test_when_pages_run_out_the_least_urgent_gives_way_not_the_youngest() -> None:
    rig = Rig(page_size=4, pages=9, seqs=3, budget=32)
    low = rig.add(sequence(1, 8), 20, priority=1)
    rig.step()
    young = rig.add(sequence(2, 8), 20)
    while young.finish_reason is None:
        rig.step()
        assert young.status is not Status.WAITING
    assert rig.loop.stats.retractions > 0
    rig.run()
    rig.expect_solo(low)
    rig.expect_solo(young)


# --- nobody waits for ever


def test_who_has_waited_long_enough_goes_first_and_is_not_displaced_again() -> None:
    rig = Rig(seqs=1, budget=64, pages=100)
    low = rig.add(sequence(999, 8), 30, priority=100)
    rig.step()
    numbers = itertools.count(1)
    urgent: list[Request] = []
    while low.finish_reason is None:
        assert rig.clock() < MAX_WAIT + 6
        if not rig.loop.scheduler.waiting or rig.loop.scheduler.waiting[-1] is low:
            urgent.append(rig.add(sequence(next(numbers) % 900, 30), 30))
        rig.step()
        rig.clock.advance(0.05)
        if low.waited >= MAX_WAIT:
            assert low.status is not Status.WAITING
    assert low.residency > 1
    assert MAX_WAIT <= low.waited < MAX_WAIT + 3
    rig.expect_solo(low)
    rig.run()
    for request in urgent:
        rig.expect_solo(request)


def test_long_waits_count_as_soon_as_priorities_do() -> None:
    transfers = FakeTransfers()
    transfers.ready_at = {"old": MAX_WAIT}
    rig = Rig(seqs=3, budget=64, transfers=transfers)
    old = rig.add(sequence(1, 4), 30, id="old")
    rig.clock.advance(MAX_WAIT - 0.001)
    young = rig.add(sequence(2, 4), 30)
    while old.first_scheduled is None:
        rig.step()
    assert rig.loop.scheduler.running == [young, old], "among equals in order of admission"
    rig.add(sequence(3, 4), 2, priority=5)
    rig.step()
    assert rig.loop.scheduler.running[:2] == [old, young]
    rig.run()
    rig.expect_solo(old)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32), pages=st.integers(12, 40), seqs=st.integers(1, 5), budget=st.integers(1, 40)
)
def test_all_end_with_their_own_answers(seed: int, pages: int, seqs: int, budget: int) -> None:
    random_mix(random.Random(seed), pages, seqs, budget)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_many_mixes(seed: int) -> None:
    source = random.Random(seed)
    random_mix(source, source.randint(12, 40), source.randint(1, 5), source.randint(1, 40))


def random_mix(source: random.Random, pages: int, seqs: int, budget: int) -> None:
    """Requests of all priorities that come, share prefixes, are aborted, and displace each other in a small pool."""
    shape: dict[str, Any] = {"page_size": 4, "pages": pages, "seqs": seqs, "budget": budget}
    shape["policy"] = source.choice([None, LPM()])
    rig = TieredRig(host_pages=2 * pages, **shape) if source.random() < 0.4 else Rig(**shape)
    room = pages * 4
    requests: list[Request] = []
    for number in range(24):
        prompt = sequence(source.randrange(4), source.randrange(12)) + sequence(
            50 + number, source.randint(1, 9)
        )
        output = source.randint(1, 14)
        requests.append(
            rig.add(
                prompt[: room - output - 1],
                output,
                seed=number,
                priority=source.choice((-5, 0, 0, 0, 3, 100)),
            )
        )
        for _ in range(source.randrange(6)):
            rig.step()
        if source.random() < 0.15:
            rig.loop.abort(source.choice(requests).id)
        if source.random() < 0.1:
            # Some have waited for ever by now.
            rig.clock.advance(MAX_WAIT)
    rig.run(20_000)
    for request in requests:
        if request.finish_reason != "abort":
            rig.expect_solo(request)
