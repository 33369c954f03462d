"""Log-probs of prompts: exact, in chunks, beside other work, whatever the cache holds; and nothing compiles for them."""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers.fake_executor import expected_reading
from helpers.fake_rig import Rig
from helpers.plain_forward import plain_logprobs
from helpers.tiered_rig import TieredRig
from helpers.tiny_engine import Run, TinyDevice, TinyModel, output
from tierax import SamplingParams
from tierax.engine.compile_counter import CompileCounter
from tierax.engine.plan import StepPlan
from tierax.engine.prompt_reader import MAX_PIECE, SMALL_PIECE, PromptReader
from tierax.engine.reading import MeanHidden, PromptScores, claim
from tierax.engine.request import Request, TokenLogprob
from tierax.engine.stats import EngineStats

PAGE, BUDGET = 4, 16
PROMPT = random.Random(7).choices(range(200), k=45)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(stacked=True)


@pytest.fixture(scope="module")
def device(model: TinyModel) -> TinyDevice:
    made = TinyDevice(model, PAGE, budget=BUDGET, coarse=True)
    list(made.executor.warm_up())
    return made


def score(run: Run, prompt: Sequence[int], max_tokens: int = 0, top: int = 3) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=top, logprobs=0)
    return run.add(prompt, params, reading=PromptScores(len(prompt) - 1, top))


def scores_of(request: Request) -> list[TokenLogprob]:
    assert isinstance(request.reading, PromptScores)
    assert request.reading.claimed == request.reading.total == request.reading.done
    return request.reading.logprobs


def expect_exact(model: TinyModel, request: Request) -> None:
    """Every entry is what one plain forward over the whole prompt says."""
    prompt = list(request.tokens[: request.num_prompt])
    truth = plain_logprobs(model.params, model.config, prompt, range(len(prompt)))
    entries = scores_of(request)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for row, entry in zip(truth, entries, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            np.sort(row)[::-1][: len(entry.top)], abs=1e-4
        )
        assert all(value == pytest.approx(row[token], abs=1e-4) for token, value in entry.top)
        better = int((row > row[entry.token_id] + 1e-4).sum())
        assert better < (entry.rank or 0) <= 1 + int((row >= row[entry.token_id] - 1e-4).sum())


# --- exact


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_a_prompt_of_several_chunks_is_scored_exactly(
    device: TinyDevice, model: TinyModel, max_tokens: int
) -> None:
    run = device.run()
    request = score(run, PROMPT, max_tokens)
    run.finish()
    expect_exact(model, request)
    assert len(output(request)) == max_tokens
    assert request.finish_reason == "length"
    # Complete with the first delta, whatever that is.
    assert len(run.deltas[request.id]) == max(1, max_tokens)


@pytest.mark.parametrize("length", [1, 2, BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET + 1])
def test_any_length_ends(device: TinyDevice, model: TinyModel, length: int) -> None:
    run = device.run()
    request = score(run, PROMPT[:length], 0, top=0)
    run.finish()
    expect_exact(model, request)
    assert all(entry.top == () for entry in scores_of(request))


def test_in_the_company_of_others(device: TinyDevice, model: TinyModel) -> None:
    """Ordinary requests get the tokens that they have alone, and the scored ones their scores."""
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    prompts = [PROMPT[:30], PROMPT[5:], PROMPT[10:12]]
    alone = []
    for prompt in prompts:
        run = device.run()
        request = run.add(prompt, greedy)
        run.finish()
        alone.append(output(request))
    run = device.run()
    ordinary, scored = [], []
    for prompt in prompts:
        ordinary.append(run.add(prompt, greedy))
        scored.append(score(run, prompt, max_tokens=2, top=5))
        run.step()
    run.finish()
    assert [output(request) for request in ordinary] == alone
    for request, expected in zip(scored, alone, strict=True):
        expect_exact(model, request)
        assert output(request) == expected[:2]


# --- the cache


def test_what_is_cached_is_scored_all_the_same_and_not_written_again(
    device: TinyDevice, model: TinyModel
) -> None:
    run = device.run()
    run.add(PROMPT)
    run.finish()
    pages = run.cache.open(b"", array("i", PROMPT), len(PROMPT))
    shared = list(pages.pages)
    run.cache.release(pages)
    before, cached = np.asarray(device.pool.array)[shared].copy(), run.cache.evictable
    request = score(run, PROMPT)
    run.finish()
    expect_exact(model, request)
    assert request.cached_tokens == 0
    assert len(shared) == len(PROMPT) // PAGE
    assert np.array_equal(np.asarray(device.pool.array)[shared], before)
    assert run.cache.evictable == cached, "its own copies are given back"


def test_no_shared_page_is_written_again() -> None:
    rig = Rig(pages=32, budget=8)
    rig.add(PROMPT, 1)
    rig.run()
    lease = rig.cache.open(b"", array("i", PROMPT), len(PROMPT))
    shared, written = set(lease.pages), set[int]()
    rig.cache.release(lease)
    submit = rig.device.submit

    def watch(plan: StepPlan) -> None:
        for row in plan.rows:
            assert row.request.lease is not None
            written.update(row.request.lease.pages[row.start // 4 : (row.start + row.count - 1) // 4 + 1])
        submit(plan)

    rig.device.submit = watch
    request = rig.add(PROMPT, 3, reading=PromptScores(len(PROMPT) - 1, 0))
    rig.run()
    rig.expect_solo(request)
    assert len(shared) == len(PROMPT) // 4
    # Its own pages, of which the ones that it has read are given back for the next chunk.
    assert written.isdisjoint(shared)
    assert written


def test_what_it_computed_serves_the_next_request(device: TinyDevice) -> None:
    run = device.run()
    score(run, PROMPT)
    run.finish()
    after = run.add(PROMPT)
    run.finish()
    assert after.cached_tokens == (len(PROMPT) - 1) // PAGE * PAGE


def test_a_request_that_reads_reuses_only_what_it_has_read() -> None:
    request = Request("r", array("i", PROMPT), len(PROMPT), SamplingParams(), 0, frozenset(), 60)
    assert request.reusable == len(PROMPT) - 1
    reading = request.reading = PromptScores(len(PROMPT) - 1, 0)
    assert request.reusable == 0
    assert claim(reading, 0, 16) == range(16)
    assert request.reusable == 16
    # Computed again after a retraction, from the last whole page on: nothing is read twice.
    assert claim(reading, 12, 20) == range(16, 20)
    assert claim(reading, 20, 99) == range(20, 44)
    assert request.reusable == len(PROMPT) - 1
    assert not claim(reading, 45, 46)


# --- from a token on


@pytest.mark.parametrize("start", [1, 2, 16, 17, 30, 44, 45, 99])
def test_what_comes_before_the_first_scored_token_may_be_cached(
    device: TinyDevice, model: TinyModel, start: int
) -> None:
    run = device.run()
    run.add(PROMPT)
    run.finish()
    request = run.add(
        PROMPT,
        SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3, prompt_logprobs_start=start),
        reading=PromptScores(len(PROMPT) - 1, 3, start),
    )
    run.finish()
    assert request.cached_tokens == min(start - 1, len(PROMPT) - 1) // PAGE * PAGE
    truth = plain_logprobs(model.params, model.config, PROMPT, range(len(PROMPT)))
    entries = scores_of(request)
    assert [entry.token_id for entry in entries] == PROMPT[start:]
    for entry, row in zip(entries, truth[start - 1 :], strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)


def test_endings_of_one_new_prefix_compute_it_once() -> None:
    rig = Rig(pages=200, seqs=8, budget=64)
    prefix = [7] * 40
    requests = [rig.add([*prefix, n, n], 0, reading=PromptScores(41, 0, start=40)) for n in range(8)]
    rig.run()
    for request in requests:
        assert isinstance(request.reading, PromptScores)
        assert request.reading.logprobs == expected_reading(request)
        assert len(request.reading.logprobs) == 2
    # The position before the first scored token belongs to each.
    assert rig.loop.stats.computed_tokens == 36 + 8 * 6


def test_the_tiers_bring_up_what_comes_before() -> None:
    prompt = list(range(40))
    rig = TieredRig(pages=32)
    rig.add(prompt, 2)
    rig.run()
    after = TieredRig(pages=32, store=rig.store)
    scored = after.add(prompt, 0, reading=PromptScores(39, 0, start=30))
    whole = after.add(prompt, 0, reading=PromptScores(39, 0))
    after.run()
    assert scored.cached_by_tier == {"device": 0, "host": 0, "disk": 28}
    assert whole.cached_tokens == 0
    for request in (scored, whole):
        assert isinstance(request.reading, PromptScores)
        assert request.reading.logprobs == expected_reading(request)


# --- programs and memory


def test_nothing_compiles_for_them(device: TinyDevice) -> None:
    stats = EngineStats()
    counter = CompileCounter(stats)
    run = device.run()
    for length in range(1, len(PROMPT), 5):
        score(run, PROMPT[:length], max_tokens=length % 2, top=length % 3)
    run.add(PROMPT, SamplingParams(max_tokens=0), reading=MeanHidden(len(PROMPT)))
    run.finish()
    counter.close()
    assert (stats.compiles, stats.loaded_programs) == (0, 0)


def test_pieces_are_bounded_and_cover_everything() -> None:
    functions: Any = None
    assert PromptReader(functions, 1000, 4).sizes == (SMALL_PIECE, MAX_PIECE)
    # 64 MiB of logits.
    assert PromptReader(functions, 151_936, 4).sizes == (SMALL_PIECE, 64)
    assert PromptReader(functions, 10**6, 4).sizes == (SMALL_PIECE, SMALL_PIECE)
    reader = PromptReader(functions, 1000, 4)
    for count in (0, 1, 31, 32, 33, 64, 65, 255, 256, 257, 300, 600):
        columns = np.arange(count, dtype=np.int32).reshape(-1, 1)
        pieces = list(reader._pieces(columns, fill=-1))
        assert all(len(padded) in reader.sizes and n <= len(padded) for n, padded in pieces)
        assert [x for n, padded in pieces for x in padded[:n, 0]] == list(range(count))
        assert all((padded[n:] == -1).all() for n, padded in pieces)


# --- faults, retractions, aborts: on the fake device


@pytest.mark.parametrize("round", range(4))
def test_random_mixes(round: int, caplog: pytest.LogCaptureFixture) -> None:
    """Scored, embedded and ordinary requests in pools that are too small, with aborts and faults."""
    caplog.set_level(logging.CRITICAL)
    retractions = read = 0
    for seed in range(round * 25, round * 25 + 25):
        rng = random.Random(seed)
        rig = Rig(pages=rng.choice([15, 20, 30]), seqs=rng.choice([1, 3, 5]), budget=rng.choice([1, 5, 16]))
        requests = []
        for n in range(rng.randint(2, 8)):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
            kind, max_tokens = rng.randrange(3), rng.choice([0, 0, 1, 25])
            start = rng.choice([1, 1, rng.randint(1, len(prompt) + 1)])
            reading = (None, PromptScores(len(prompt) - 1, 1, start), MeanHidden(len(prompt)))[kind]
            max_tokens = (max_tokens or 30, max_tokens, 0)[kind]
            request = rig.request(prompt, max_tokens, id=f"r{n}", seed=n, reading=reading)
            request.priority = rng.randrange(2)
            requests.append(request)
        for request in requests:
            rig.loop.add(request)
            for _ in range(rng.randint(0, 4)):
                rig.step()
            if rng.random() < 0.05:
                rig.device.collect_error = RuntimeError("lost")
            if rng.random() < 0.05 and rig.loop.request_ids:
                rig.loop.abort(rng.choice(rig.loop.request_ids))
        rig.run()
        retractions += rig.loop.stats.retractions
        for request in requests:
            if request.finish_reason not in ("abort", "error"):
                rig.expect_solo(request)
                read += _expect_read(request)
    assert read > 50
    assert retractions > 5, "the mixes are too tame"


def _expect_read(request: Request) -> bool:
    match request.reading:
        case None:
            return False
        case PromptScores():
            assert request.reading.logprobs == expected_reading(request)
        case MeanHidden():
            assert request.reading.sum is not None
            assert request.reading.sum.tolist() == expected_reading(request)
    assert request.cached_tokens <= request.reading.first or request.reading.first == request.reading.total
    return True


def test_what_a_lost_device_was_about_to_tell_is_read_again() -> None:
    rig = Rig()
    request = rig.add([1] * 20, 1, reading=PromptScores(19, 0))
    assert isinstance(request.reading, PromptScores)
    # As after a retraction with its chunk in flight.
    request.reading.claimed = 8
    rig.loop.scheduler.lose_device()
    assert request.reading.claimed == 0
    rig.run()
    assert request.reading.logprobs == expected_reading(request)


def test_a_fault_loses_nothing_of_those_who_wait() -> None:
    rig = Rig(pages=12, seqs=3, budget=16)
    old = rig.add([1] * 20, 20)
    young = rig.add([2] * 16, 12, reading=PromptScores(15, 0))
    while young.residency == 0 or young.slot >= 0:
        rig.step()
    assert isinstance(young.reading, PromptScores)
    rig.device.submit_error = RuntimeError("lost")
    rig.run()
    assert old.finish_reason == "error"
    rig.expect_solo(young)
    assert young.reading.logprobs == expected_reading(young)
