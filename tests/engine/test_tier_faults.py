"""Whatever the disk does, it costs hits only: right answers, bounded waits, honest counters, and recovery by itself.

The real loop, mover and store with faults injected, under a tiny real model.
"""

from __future__ import annotations

import shutil

import pytest

from helpers.fault_stage import COPY, KEPT, OPTIONS, PAGE, STEP, WHOLE, Stage, Start, prompt
from helpers.faulty_store import Fault
from helpers.tiny_engine import output
from tierax.cache.writer import LOOK_EVERY, PAUSE
from tierax.engine.request import SamplingParams

POLICIES = {"best_effort": 0.0, "timeout=300ms": 0.3, "wait_complete": 10.0}
"""With the seconds that each may wait here."""
READ_FAULTS = {
    Fault.EIO: "io_error",
    Fault.SHORT: "corrupt",
    Fault.FLIPPED: "corrupt",
    Fault.DENIED: "denied",
    Fault.VANISHED: "missing",
}
WRITE_FAULTS = {Fault.EIO: "io_error", Fault.NO_SPACE: "no_space", Fault.DENIED: "denied"}


def hits(policy: str, expected: int) -> range:
    """Who does not wait for the disk gets what happens to have arrived."""
    return range(0 if policy == "best_effort" else expected, expected + 1)


# --- reads


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_a_page_that_cannot_be_read_cuts_the_hit_there(
    stage: Stage, start: Start, fault: Fault, policy: str
) -> None:
    run = start(stored=True, prefetch=policy)
    run.store.inject("read", fault, [run.keys(prompt(0))[1]])
    request = stage.ask(run, 0)
    assert run.waited(request) <= STEP, "a failure is an answer, too: nobody waits for more"
    assert request.cached_tokens in hits(policy, PAGE)
    run.finish()
    reads, failed = run.tiers.mover.stats.read, run.tiers.prefetcher.stats.failed_pages
    assert failed[READ_FAULTS[fault]] >= 1
    # A bad page goes, and what hangs below it: some of that may have been asked for still.
    assert set(failed) <= {READ_FAULTS[fault], "missing"}
    assert sum(failed.values()) == sum(reads.failures.values()) == WHOLE // PAGE - reads.pages
    if READ_FAULTS[fault] in ("io_error", "denied"):
        assert sum(failed.values()) == 1, "its neighbours arrived"
    run.clock.advance(20.0)
    assert stage.ask(run, 1).cached_tokens in hits(policy, WHOLE), "others are well"
    stage.expect_recovery(run, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stalled_read_delays_its_own_request_only_and_not_for_long(
    stage: Stage, start: Start, policy: str
) -> None:
    run = start(stored=True, prefetch=policy, idle_tick=0.01)
    run.store.inject("read", Fault.STALLED, run.keys(prompt(0))[3:5])
    request, other = run.add(prompt(0), OPTIONS), run.add(prompt(9), OPTIONS)
    run.until(lambda: bool(request.finish_reason and other.finish_reason))
    assert output(request) == stage.right(0)
    assert output(other) == stage.right(9)
    assert run.waited(other) <= 3 * STEP, "what is not on the disk waits for nobody"
    assert POLICIES[policy] <= run.waited(request) <= POLICIES[policy] + COPY
    assert request.cached_tokens in hits(policy, 3 * PAGE)
    assert run.tiers.prefetcher.stats.timed_out == 1
    assert run.store.stalled == 2
    run.clock.advance(30.0)
    run.idle_tick = 0.0
    run.cache.clear()
    assert stage.ask(run, 1).cached_tokens in hits(policy, WHOLE), "others are well"
    assert run.store.release() == 2
    run.finish()
    assert run.tiers.prefetcher.stats.failed_pages == {}
    stage.expect_recovery(run, 0)


def test_what_has_arrived_is_used_though_others_wait_for_longer(stage: Stage, start: Start) -> None:
    run = start(stored=True, prefetch="wait_complete")
    run.store.inject("read", Fault.STALLED, run.keys(prompt(0)))
    first, second = run.add(prompt(0), OPTIONS), run.add(prompt(1), OPTIONS)
    run.until(lambda: second.finish_reason is not None, "the end of the second")
    assert first.first_scheduled is None
    assert second.cached_by_tier["disk"] == WHOLE
    run.store.release()
    run.until(lambda: first.finish_reason is not None, "the end of the first")
    assert first.cached_by_tier["disk"] == WHOLE
    assert [output(first), output(second)] == [stage.right(0), stage.right(1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slow_disk_is_waited_for_as_long_as_the_policy_says(
    stage: Stage, start: Start, policy: str
) -> None:
    run = start(stored=True, prefetch=policy, idle_tick=0.005)
    run.store.delay("read", 0.3, 0.4)
    request = stage.ask(run, 0)
    assert run.waited(request) <= POLICIES[policy] + COPY
    assert request.cached_tokens == (WHOLE if policy == "wait_complete" else 0)
    assert run.tiers.prefetcher.stats.timed_out == (policy != "wait_complete")
    stage.expect_recovery(run, 0)


def test_the_bound_of_all_waits_holds_for_those_that_would_wait_for_ever(stage: Stage, start: Start) -> None:
    run = start(stored=True, prefetch="wait_complete", max_wait=0.5, idle_tick=0.01)
    run.store.inject("read", Fault.STALLED)
    requests = [run.add(prompt(name), OPTIONS) for name in range(4)]
    run.until(lambda: all(request.finish_reason for request in requests))
    for name, request in enumerate(requests):
        assert output(request) == stage.right(name)
        assert 0.5 <= run.waited(request) <= 0.5 + COPY
    stage.expect_recovery(run, 0)


def test_requests_that_leave_while_the_disk_stalls_hold_nothing(stage: Stage, start: Start) -> None:
    run = start(stored=True, prefetch="wait_complete", pages=24, host_pages=20, idle_tick=0.01)
    run.store.inject("read", Fault.STALLED, share=0.3)
    for turn in range(40):
        request = run.add(prompt(turn % 4), OPTIONS)
        for _ in range(turn % 7):
            run.step()
        run.loop.abort(request.id)
        if turn % 10 == 9:
            run.store.release()
    run.store.heal()
    run.finish()
    assert run.cache.host.available == run.cache.host.num_pages
    stage.expect_recovery(run, 0)


# --- writes


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_a_disk_that_takes_nothing_is_left_alone_for_a_while(
    stage: Stage, start: Start, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.store.inject("write", fault)
    for name in range(4):
        stage.ask(run, name)
    assert run.clock() < PAUSE, "the test itself took too long"
    run.finish()
    stats = run.tiers.writer.stats
    assert list(stats.failed_pages) == [WRITE_FAULTS[fault]]
    assert stats.failed_pages[WRITE_FAULTS[fault]] == run.store.calls["write"]
    assert run.store.calls["write"] <= run.cache.host.num_pages // 2, "what may be in flight at once"
    assert stats.written_pages == 0
    assert not run.on_disk()
    assert len(caplog.records) == 1, "once is enough"
    assert WRITE_FAULTS[fault] in caplog.text
    assert stage.ask(run, 0).cached_tokens == WHOLE, "the upper tiers are as good as ever"
    run.finish()

    run.store.heal()
    run.clock.advance(PAUSE)
    # Nobody asks for anything: what is owed is written all the same.
    run.finish()
    assert run.on_disk() == {
        key for name in range(4) for key in run.keys(prompt(name) + stage.right(name)[:5])
    }
    assert stats.written_pages == 4 * KEPT
    stage.expect_recovery(run, 2)


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.FLIPPED])
def test_a_disk_that_lies_about_writes_is_found_out(stage: Stage, start: Start, fault: Fault) -> None:
    run = start()
    bad = run.keys(prompt(0))[4]
    run.store.inject("write", fault, [bad])
    stage.ask(run, 0)
    run.finish()
    assert run.tiers.writer.stats.failed_pages == {}
    assert bad in run.on_disk()
    run.store.heal()
    run.forget()
    assert stage.ask(run, 0).cached_tokens == 4 * PAGE
    failed = run.tiers.prefetcher.stats.failed_pages
    assert failed["corrupt"] == 1
    assert set(failed) <= {"corrupt", "missing"}, (
        "what hangs below it goes too, and may have been asked for still"
    )
    stage.expect_recovery(run, 0)


def test_stalled_writes_hold_up_nobody(stage: Stage, start: Start) -> None:
    run = start(host_pages=24, idle_tick=0.01)
    run.store.inject("write", Fault.STALLED)
    for name in range(6):
        assert run.waited(stage.ask(run, name)) <= STEP
    assert run.tiers.writer.stats.written_pages == 0
    assert 0 < run.store.stalled <= 12, "half of the host stays for others"
    assert stage.ask(run, 5).cached_tokens == WHOLE
    run.clock.advance(30.0)
    run.store.heal()
    run.finish()
    assert run.tiers.writer.stats.written_pages >= 12
    stage.expect_recovery(run, 0)


def test_a_slow_disk_is_written_to_at_its_own_pace(stage: Stage, start: Start) -> None:
    run = start(host_pages=128)
    run.store.delay("write", 0.02, 0.05)
    for name in range(6):
        stage.ask(run, name)
    assert run.tiers.writer.stats.written_pages < 6 * KEPT
    run.finish()
    assert run.tiers.writer.stats.written_pages == 6 * KEPT
    assert len(run.on_disk()) == 6 * KEPT


def test_one_bad_page_fails_neither_its_heads_nor_other_branches(stage: Stage, start: Start) -> None:
    run = start()
    short = run.answer(prompt(0)[: 3 * PAGE + 1], SamplingParams(max_tokens=1, temperature=0.0))
    run.finish()
    assert len(run.on_disk()) == len(run.keys(short.tokens)) == 3
    keys = run.keys(prompt(0))[:8]
    rule = run.store.inject("write", Fault.EIO, keys[-1:])
    run.answer(prompt(0, 8 * PAGE), SamplingParams(max_tokens=1, temperature=0.0))
    run.answer(prompt(0)[: 7 * PAGE] + prompt(7, 9), SamplingParams(max_tokens=1, temperature=0.0))
    run.finish()
    stats = run.tiers.writer.stats
    assert (rule.hits, stats.failed_pages) == (1, {"io_error": 1})
    assert run.on_disk() >= set(keys[:7])
    assert keys[7] not in run.on_disk()
    run.store.heal()
    run.clock.advance(PAUSE)
    run.finish()
    assert run.on_disk() == {*keys, *run.keys(prompt(0)[: 7 * PAGE] + prompt(7, 9))}
    assert run.store.calls["write"] == len(run.on_disk()) + 1, "each page once, and the bad one again"


def test_what_cannot_be_deleted_stops_the_writing_and_is_deleted_later(stage: Stage, start: Start) -> None:
    run = start(disk_pages=2 * KEPT)
    run.store.inject("delete", Fault.EIO)
    for name in range(8):
        stage.ask(run, name)
        run.finish()
        run.clock.advance(PAUSE / 2)
    stats = run.tiers.writer.stats
    assert stats.failed_deletes >= KEPT
    assert len(run.on_disk()) <= 4 * KEPT, "it stops growing once it is known that nothing can be deleted"
    run.store.heal()
    run.idle_tick = 0.01
    run.until(lambda: len(run.on_disk()) <= 2 * KEPT, "the deleting")
    run.clock.advance(PAUSE)
    stage.expect_recovery(run, 7)
    assert len(run.on_disk()) <= 2 * KEPT


def test_others_who_fill_the_file_system_get_the_space_that_the_cache_had(stage: Stage, start: Start) -> None:
    floor = 10**9
    run = start(free_floor=floor)
    assert run.tiers.index is not None
    run.store.free = 2 * floor
    for name in range(2):
        stage.ask(run, name)
    run.finish()
    assert len(run.on_disk()) == 2 * KEPT
    run.store.free = floor - 5 * run.tiers.record_bytes
    run.clock.advance(LOOK_EVERY)
    stage.ask(run, 2)
    run.finish()
    assert len(run.on_disk()) == 2 * KEPT - 5, "and nothing was written meanwhile"
    assert run.tiers.index.stats.evicted_pages["space_floor"] == 5
    run.store.free = 2 * floor
    stage.expect_recovery(run, 2)
    assert len(run.on_disk()) > 2 * KEPT


def test_a_directory_that_is_removed_under_it_is_made_again(stage: Stage, start: Start) -> None:
    run = start(stored=True)
    assert stage.ask(run, 0).cached_tokens == WHOLE
    run.forget()
    assert run.store.local is not None
    shutil.rmtree(run.store.local)
    for name in range(4):
        assert stage.ask(run, name).cached_tokens == 0
    run.finish()
    assert run.tiers.prefetcher.stats.failed_pages["missing"] >= 4
    stage.expect_recovery(run, 0)
