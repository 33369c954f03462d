"""Engines that write to one disk: what one has computed another finds, though nobody has told it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_executor import ManualClock
from helpers.fake_rig import Rig
from helpers.tiered_rig import PAGE_BYTES, TieredRig
from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, SamplingParams
from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.shared_index import SharedIndex
from tierax.cache.moves import Outcome
from tierax.cache.policies.policy import Use
from tierax.engine.config import EngineConfig
from tierax.engine.disk_tier import DiskTier, open_disk
from tierax.engine.request import Request


def prompt(name: int, length: int) -> list[int]:
    return [name * 1000 + i for i in range(length)]


def serve(rig: Rig, tokens: list[int], **options: object) -> Request:
    request = rig.add(tokens, max_tokens=2, **options)
    rig.run()
    rig.expect_solo(request)
    return request


def pair(prefetch: str = "wait_complete") -> tuple[TieredRig, TieredRig]:
    first = TieredRig(shared=True, pages=64, host_pages=64)
    return first, TieredRig(shared=True, pages=64, host_pages=64, store=first.store, prefetch=prefetch)


def test_a_conversation_goes_on_where_nobody_has_heard_of_it() -> None:
    first, second = pair()
    began = serve(first, prompt(1, 90))
    more = [*began.tokens[:92], 7, 8, 9, 10]
    request = serve(second, more)
    assert request.cached_by_tier == {"device": 0, "host": 0, "disk": 88}
    assert second.device.computed(request)[0] == 88
    # And on to where it began.
    back = serve(first, [*request.tokens[:98], 11, 12, 13])
    assert back.cached_by_tier == {"device": 88, "host": 0, "disk": 8}


def test_what_nobody_knows_costs_one_question() -> None:
    _, second = pair()
    assert serve(second, prompt(1, 200)).cached_tokens == 0
    assert len(second.questions.asked) == 1
    # A moment later it is known to be absent; and what is stored here need not be asked for.
    serve(second, prompt(1, 200))
    assert len(second.questions.asked) == 1


@pytest.mark.parametrize("stored", [1, 2, 15, 16, 17, 40, 49])
def test_the_end_of_what_is_stored_is_found_in_few_rounds(stored: int) -> None:
    first, second = pair()
    serve(first, prompt(1, 4 * stored + 1))
    request = serve(second, [*prompt(1, 4 * stored), *prompt(2, 200 - 4 * stored)])
    assert request.cached_by_tier["disk"] == min(4 * stored, 196)
    assert len(second.questions.asked) <= 1 + 16 + 16


def test_a_part_that_is_known_is_read_at_once_and_the_rest_when_it_is_found() -> None:
    first, _ = pair()
    serve(first, prompt(1, 41))
    second = TieredRig(shared=True, pages=64, host_pages=64, store=first.store)
    serve(first, [*prompt(1, 41), *prompt(2, 39)])
    second.mover.delay = lambda kind: 1.0 if kind == "read" else 0.0
    second.questions.held = True
    request = second.add([*prompt(1, 41), *prompt(2, 39)], max_tokens=2)
    second.step()
    assert [move.pages for move in second.mover.moves] == [10]
    second.questions.answer()
    second.step()
    assert [move.pages for move in second.mover.moves] == [10, 9]
    second.clock.advance(1.0)
    second.run()
    assert request.cached_by_tier == {"device": 0, "host": 0, "disk": 76}
    second.expect_solo(request)


def test_a_store_that_does_not_answer_delays_one_request_as_long_as_its_policy_says() -> None:
    first, second = pair(prefetch="timeout=300ms")
    serve(first, prompt(1, 40))
    second.questions.held = True
    request = second.add(prompt(1, 40), max_tokens=2)
    while request.finish_reason is None:
        if not second.step():
            second.clock.advance(0.01)
    assert request.first_scheduled is not None
    assert 0.3 <= request.first_scheduled <= 0.32
    before = second.clock.now
    other = serve(second, prompt(2, 40))
    assert other.first_scheduled == before, "the store is not asked for a while"
    second.clock.advance(10)
    second.questions.answer()
    third = serve(second, prompt(3, 40))
    assert third.cached_tokens == 0
    assert len(second.questions.asked) > 2, "then it is asked again"


def test_a_failing_store_is_not_asked_for_a_while_and_best_effort_never_asks() -> None:
    first, second = pair()
    serve(first, prompt(1, 40))
    second.questions.fault = Outcome.IO_ERROR
    assert serve(second, prompt(1, 40)).cached_tokens == 0
    serve(second, prompt(2, 40))
    assert len(second.questions.asked) == 1
    third = TieredRig(shared=True, prefetch="best_effort", store=first.store, pages=64)
    assert third.index is not None
    third.index.clear()
    serve(third, prompt(1, 40))
    assert third.questions.asked == []


def test_aborted_while_it_is_asked() -> None:
    first, second = pair()
    serve(first, prompt(1, 40))
    second.questions.held = True
    request = second.add(prompt(1, 40))
    second.step()
    second.loop.abort(request.id)
    second.questions.answer()
    second.run()
    assert serve(second, prompt(1, 40)).cached_by_tier["disk"] == 36


def test_how_a_store_is_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ticks = itertools.count(1)
    clock = ManualClock()

    def use() -> Use:
        return Use(next(ticks), clock())

    def opened(**options: Any) -> DiskTier:
        config = EngineConfig(model_path="x", host_disk_cache_dir=str(tmp_path), **options)
        return open_disk(config, PAGE_BYTES, {"model": "x"}, use, clock=clock)

    alone = opened()
    assert (type(alone.index), alone.fleet) == (DiskIndex, None)
    shared = opened(disk_cache_shared=True)
    assert shared.fleet is not None
    reader = opened(disk_cache_shared=True, disk_cache_read_only=True)
    assert (type(reader.index), reader.fleet) == (SharedIndex, None)
    assert "other servers share it" not in caplog.text
    opened()
    assert "other servers share it" in caplog.text
    shared.fleet.close()
    caplog.clear()
    opened()
    assert "other servers share it" not in caplog.text


def test_two_engines_on_one_directory(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_text_model(model)

    def engine() -> LLM:
        return LLM(
            str(model),
            host_disk_cache_dir=str(tmp_path / "kv"),
            disk_cache_shared=True,
            disk_cache_refresh=0,
            page_size=8,
            context_length=128,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            device_cache_size="1MiB",
            host_cache_size="2MiB",
            prefetch_policy="wait_complete",
            skip_warmup=True,
            compile_cache_dir=str(tmp_path / "compiled"),
        )

    greedy = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    tokens = [i * 7 % 250 for i in range(50)]
    with engine() as first, engine() as second:
        began = first.generate([tokens], greedy)[0]
        tiers = first.engine.tiers
        assert tiers is not None
        assert tiers.mover.close(30), "what it has computed is on the disk"
        more = [*tokens, *began.token_ids, 3, 4, 5]
        answer = second.generate([more], greedy)[0]
        assert answer.cached_by_tier == {"device": 0, "host": 0, "disk": 56}
        again = second.generate([more], greedy)[0]
        assert answer.token_ids == again.token_ids
