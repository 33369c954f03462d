"""Who goes first, who gives way when pages run out, and that nobody waits for ever."""

from __future__ import annotations

import itertools

import pytest

from helpers.fake_rig import FakeTransfers, Rig
from tierax.engine.request import Request, Status
from tierax.engine.schedule_policy import FCFS, LPM


def sequence(start: int, count: int) -> list[int]:
    """A prompt of its own: no two starts below 1,000 share a token."""
    return [start * 1000 + index for index in range(count)]


# --- pages run out


def test_the_youngest_gives_way_and_comes_back_with_the_same_answer() -> None:
    rig = Rig(page_size=4, pages=9, seqs=3, budget=32)
    old, young = rig.add(sequence(1, 8), 20), rig.add(sequence(2, 8), 20)
    states = set()
    while not rig.loop.idle:
        rig.step()
        states.add((old.status, young.status))
    assert rig.loop.stats.retractions > 0
    assert (Status.RUNNING, Status.WAITING) in states
    assert (Status.WAITING, Status.RUNNING) not in states
    rig.expect_solo(old)
    rig.expect_solo(young)
    assert young.residency > 1


def test_a_retracted_request_goes_before_those_who_never_ran() -> None:
    rig = Rig(page_size=4, pages=9, seqs=2, budget=32)
    old, young = rig.add(sequence(1, 8), 20), rig.add(sequence(2, 8), 20)
    third = rig.add(sequence(3, 8), 20)
    while rig.loop.scheduler.running != [old]:
        rig.step()
    assert list(rig.loop.scheduler.waiting) == [young, third]
    rig.run()
    for request in (old, young, third):
        rig.expect_solo(request)


def test_admission_leaves_room_for_the_next_token_of_those_that_run() -> None:
    rig = Rig(page_size=4, pages=4, budget=16)
    first = rig.add(sequence(1, 4), 4)
    rig.step()
    second = rig.add(sequence(2, 8), 4)
    rig.run()
    assert rig.loop.stats.retractions == 0
    rig.expect_solo(first)
    rig.expect_solo(second)


def test_a_request_that_fills_the_pool_alone_ends_by_length() -> None:
    rig = Rig(page_size=4, pages=8, budget=16)
    alone = rig.add(sequence(1, 20), 100)
    rig.run()
    assert len(alone.tokens) == 32
    assert alone.finish_reason == "length"
    follower = rig.add(sequence(2, 20), 100)
    rig.run()
    rig.expect_solo(alone)
    rig.expect_solo(follower)


def test_a_token_in_flight_survives_a_retraction() -> None:
    # Page 1 and a pool of 12: each decode needs a page, so that the young one is caught with a token in flight.
    rig = Rig(page_size=1, pages=12, seqs=2, budget=16)
    old, young = rig.add(sequence(1, 4), 8), rig.add(sequence(2, 3), 8)
    caught = False
    while not rig.loop.idle:
        before = young.in_flight
        rig.step()
        caught |= young.status is Status.WAITING and before > 0
    assert caught
    rig.expect_solo(old)
    rig.expect_solo(young)


# --- nobody waits for ever


@pytest.mark.parametrize(("budget", "most"), [(1, 5), (2, 3), (16, 2), (128, 2)])
def test_a_stream_advances_while_prompts_keep_arriving(budget: int, most: int) -> None:
    rig = Rig(page_size=16, pages=400, seqs=4, budget=budget)
    stream = rig.add(sequence(0, 4), 60)
    lengths = itertools.count(1)
    waits: list[int] = []
    waited = 0
    while stream.finish_reason is None:
        if len(rig.loop.scheduler.waiting) < 2:
            rig.add(sequence(next(lengths), 64), 1)
        before = stream.num_output
        rig.step()
        waited = 0 if stream.num_output > before else waited + 1
        waits.append(waited)
    assert max(waits[20:]) <= most
    rig.expect_solo(stream)


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_a_prompt_advances_while_streams_fill_the_budget(budget: int) -> None:
    rig = Rig(page_size=4, pages=300, seqs=8, budget=budget)
    streams = [rig.add(sequence(n, 1), 80) for n in range(7)]
    while not all(stream.num_output for stream in streams):
        rig.step()
    prompt = rig.add(sequence(50, 20), 2)
    before = len(rig.device.plans)
    while prompt.num_output == 0:
        rig.step()
    steps = rig.device.plans[before:]
    assert len(steps) <= 2 * 20 + 8
    for stream in streams:
        turns = [n for n, step in enumerate(steps) if any(row.request is stream for row in step.rows)]
        gaps = [after - turn for turn, after in itertools.pairwise([-1, *turns, len(steps)])]
        assert max(gaps) <= 2 * -(-7 // budget) + 1, "the streams take turns"
    rig.run()
    for request in (*streams, prompt):
        rig.expect_solo(request)


def test_no_share_is_kept_for_prompts_that_have_no_slot() -> None:
    rig = Rig(seqs=2, budget=2, pages=64)
    running = [rig.add(sequence(n, 1), 40) for n in range(2)]
    waiting = rig.add(sequence(9, 1), 1)
    while not all(r.num_output for r in running):
        rig.step()
    steps = len(rig.device.plans)
    before = sum(r.num_output for r in running)
    for _ in range(10):
        rig.step()
    assert len(rig.device.plans) - steps == 10
    assert sum(r.num_output for r in running) - before == 20
    rig.run()
    rig.expect_solo(waiting)


def test_a_large_request_is_not_passed_by_small_ones_for_ever() -> None:
    rig = Rig(page_size=4, pages=16, seqs=4, budget=16)
    small = [rig.add(sequence(n, 6), 6) for n in range(3)]
    large = rig.add(sequence(90, 50), 4)
    later = [rig.add(sequence(100 + n, 6), 6) for n in range(6)]
    rig.run()
    assert large.finished_at is not None
    assert all(r.finished_at is not None and r.finished_at > large.finished_at for r in later)
    for request in (*small, large, *later):
        rig.expect_solo(request)


# --- in which order


def test_fcfs_admits_in_order_of_arrival() -> None:
    rig = Rig(seqs=1, budget=64)
    requests = [rig.add(sequence(n % 2, 12), 2) for n in range(6)]
    rig.run()
    assert _admissions(requests) == requests


def test_lpm_admits_what_is_cached_first() -> None:
    rig = Rig(seqs=1, budget=64, policy=LPM())
    rig.add(sequence(1, 24), 1)
    rig.run()
    cold, half, full = (
        rig.add(prompt, 2)
        for prompt in (sequence(2, 24), [*sequence(1, 12), *sequence(3, 12)], sequence(1, 24))
    )
    rig.run()
    assert _admissions([cold, half, full]) == [full, half, cold]
    for request in (cold, half, full):
        rig.expect_solo(request)


def test_lpm_lets_nobody_starve() -> None:
    rig = Rig(seqs=1, budget=64, policy=LPM(max_age=0.5))
    rig.add(sequence(1, 24), 1)
    rig.run()
    cold = rig.add(sequence(2, 24), 1)
    for _ in range(400):
        if len(rig.loop.scheduler.waiting) < 3:
            rig.add(sequence(1, 24), 2)
        rig.step()
    assert cold.first_scheduled is not None
    assert 0.4 < cold.first_scheduled - cold.arrival < 0.7


def test_lpm_compares_the_oldest_only() -> None:
    rig = Rig(seqs=1, budget=64, policy=LPM(window=2))
    rig.add(sequence(1, 24), 1)
    rig.run()
    requests = [rig.add(sequence(n, 24), 1) for n in (2, 3, 1)]
    rig.run()
    assert _admissions(requests) == [requests[0], requests[2], requests[1]]


def _admissions(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda r: r.first_scheduled if r.first_scheduled is not None else 1e9)


def test_a_request_waits_for_its_transfers_and_the_others_pass_it() -> None:
    transfers = FakeTransfers()
    rig = Rig(transfers=transfers, policy=FCFS())
    transfers.ready_at = {"slow": 0.2, "gone": 9.0}
    slow, quick, gone = (rig.add(sequence(n, 8), 3, id=id) for n, id in enumerate(("slow", "quick", "gone")))
    assert transfers.started == ["slow", "quick", "gone"]
    while quick.finish_reason is None:
        rig.step()
    assert rig.clock() < 0.2
    assert slow.status is Status.WAITING
    rig.loop.abort("gone")
    assert gone.finish_reason == "abort"
    rig.run()
    assert slow.first_scheduled is not None
    assert slow.first_scheduled >= 0.2
    assert sorted(transfers.ended) == ["gone", "quick", "slow"]
    assert transfers.polls > 150, "they are polled while nothing runs, too"
    rig.expect_solo(slow)
