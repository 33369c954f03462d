"""Copies between host and device that hang, raise or end with the device: they cost hits only.

The real loop and mover under a tiny real model.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from helpers.fault_stage import COPY, KEPT, LENGTH, OPTIONS, PAGE, WHOLE, Stage, Start, prompt
from helpers.faulty_run import PATIENCE_S
from helpers.tiny_engine import output
from tierax.cache.moves import Outcome
from tierax.cache.radix_tree import DEVICE
from tierax.engine.request import SamplingParams


def test_a_host_page_that_is_being_loaded_is_not_given_to_others(
    stage: Stage, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load is held up between host and device, while others want every row of a host that is just large enough."""
    run = start(stored=True, pages=60, host_pages=KEPT + 1, prefetch="wait_complete")
    stage.ask(run, 0)
    run.finish()
    run.cache.clear(DEVICE)
    gate = threading.Event()
    upload = stage.device.pool.upload

    def held_up(staging: Any, count: int) -> None:
        assert gate.wait(PATIENCE_S)
        upload(staging, count)

    monkeypatch.setattr(stage.device.pool, "upload", held_up)
    request, others = run.add(prompt(0), OPTIONS), [run.add(prompt(name), OPTIONS) for name in (5, 6)]
    run.until(lambda: all(other.finish_reason for other in others))
    assert request.first_scheduled is None
    assert run.cache.host.in_use >= WHOLE // PAGE
    gate.set()
    run.until(lambda: request.finish_reason is not None)
    assert request.cached_by_tier == {"device": 0, "host": WHOLE, "disk": 0}
    for name, asked in zip((0, 5, 6), (request, *others), strict=True):
        assert output(asked) == stage.right(name)
    run.finish()
    assert run.cache.host.available == run.cache.host.num_pages


def test_a_load_that_hangs_is_given_up_in_time(
    stage: Stage, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(stored=True, prefetch="wait_complete", max_wait=0.5)
    stage.ask(run, 0)
    run.finish()
    run.cache.clear(DEVICE)
    gate = threading.Event()
    upload = stage.device.pool.upload
    monkeypatch.setattr(stage.device.pool, "upload", lambda *staged: (gate.wait(PATIENCE_S), upload(*staged)))
    run.idle_tick = 0.01
    request = stage.ask(run, 0)
    assert 0.5 <= run.waited(request) <= 0.5 + COPY
    assert request.cached_tokens == 0
    gate.set()
    run.finish()
    run.cache.clear(DEVICE)
    assert stage.ask(run, 0).cached_by_tier["host"] == WHOLE, "the next load is as good as any"


@pytest.mark.parametrize("what", ["upload", "scatter", "take_staging", "gather"])
def test_a_copy_that_raises_costs_hits_only(
    stage: Stage, start: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = start(stored=True, prefetch="wait_complete", max_wait=0.5, idle_tick=0.001)
    stage.ask(run, 0)
    run.finish()
    run.cache.clear(DEVICE)

    def broken(*_: Any) -> None:
        raise RuntimeError("this copy does not work")

    with monkeypatch.context() as patch:
        patch.setattr(stage.device.pool, what, broken)
        assert stage.ask(run, 0).cached_tokens == (WHOLE if what == "gather" else 0)
        stage.ask(run, 5)
        run.finish()
    stats = run.tiers.mover.stats
    if what == "gather":
        assert run.tiers.writer.stats.save_failures >= KEPT
        assert not run.on_disk() & set(run.keys(prompt(5)))
    elif what != "take_staging":
        assert stats.load.failures[Outcome.IO_ERROR] >= WHOLE // PAGE
    run.cache.clear(DEVICE)
    assert stage.ask(run, 0).cached_by_tier["host"] == WHOLE
    stage.ask(run, 5)
    run.finish()
    run.cache.clear(DEVICE)
    assert stage.ask(run, 5).cached_by_tier["host"] == WHOLE, "what was not saved has been since"
    stage.expect_recovery(run, 5)


@pytest.mark.parametrize("after", range(1, 14))
def test_the_device_is_lost_in_the_middle_of_every_kind_of_copy(
    stage: Stage, start: Start, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Reads (of 0), loads (of 1), saves and writes (of 5 and 6) are under way when a step fails."""
    run = start(stored=True, pages=40, host_pages=40, prefetch="wait_complete", budget=8)
    stage.ask(run, 1)
    run.finish()
    run.cache.clear(DEVICE)
    run.store.delay("read", 0.0, 0.01)
    run.store.delay("write", 0.0, 0.02)
    collect, steps = stage.device.executor.collect, iter(range(1, 1000))

    def failing() -> Any:
        if next(steps) == after:
            raise RuntimeError("the device is lost")
        return collect()

    monkeypatch.setattr(stage.device.executor, "collect", failing)
    requests = {name: run.add(prompt(name), OPTIONS) for name in (5, 1, 0, 6)}
    run.until(lambda: all(request.finish_reason for request in requests.values()))
    reasons = [request.finish_reason for request in requests.values()]
    assert "error" in reasons
    for name, request in requests.items():
        if request.finish_reason != "error":
            assert output(request) == stage.right(name)
        else:
            assert output(request) == stage.right(name)[: len(output(request))]
    assert run.loop.stats.faults == 1
    run.finish()
    run.store.heal()
    for name in (0, 1, 5, 6):
        stage.ask(run, name)
    run.finish()
    stage.expect_recovery(run, 5)


def test_many_requests_many_of_them_aborted_leave_nothing_pinned(stage: Stage, start: Start) -> None:
    rng = random.Random(4)
    run = start(stored=True, prefetch="wait_complete", pages=60, host_pages=30, disk_pages=60)
    short = SamplingParams(max_tokens=2, temperature=0.0)
    hits = 0
    for _ in range(250):
        request = run.add(prompt(rng.randrange(5), rng.randrange(5, LENGTH)), short)
        for _ in range(rng.randrange(6)):
            run.step()
        if rng.random() < 0.3:
            run.loop.abort(request.id)
        if rng.random() < 0.05:
            run.cache.clear(DEVICE)
        hits += request.cached_tokens
    run.finish()
    assert hits > 0
    assert run.cache.host.available == run.cache.host.num_pages
    assert run.cache.available() == run.cache.num_pages
    assert run.tiers.index is not None
    run.tiers.index.clear()
    assert len(run.tiers.index) == 0
    run.tiers.index.check()
