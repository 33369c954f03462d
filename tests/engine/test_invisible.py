"""The cache is invisible: on the real executor, tokens depend on nothing but the request itself."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.plain_forward import plain_logprobs
from helpers.sampling_reference import choose
from helpers.tiny_engine import Run, TinyDevice, TinyModel, output
from tierax.cache.manager import WRITE_POLICIES
from tierax.cache.radix_tree import DEVICE
from tierax.engine.request import Request, SamplingParams
from tierax.engine.schedule_policy import LPM
from tierax.engine.step import StepFunctions, StepShapes
from tierax.models.transformer import Decoder

PAGE_SIZES = (1, 4, 16)
MIXES = 67
"""Per page size."""
TIER_MIXES = 12


@pytest.fixture(scope="module")
def stacked() -> TinyModel:
    return TinyModel(stacked=True)


@pytest.fixture(scope="module")
def devices(stacked: TinyModel) -> dict[int, TinyDevice]:
    made: list[StepFunctions] = []

    def shared(decoder: Decoder, shapes: StepShapes) -> StepFunctions:
        return made[0] if made else made.append(StepFunctions(decoder, shapes)) or made[0]

    return {
        size: TinyDevice(stacked, size, tokens_in_pool=768, coarse=True, functions=shared)
        for size in PAGE_SIZES
    }


def same_tokens(request: Request, reference: Request, model: TinyModel) -> int:
    """Asserts that two runs of a request agree up to a near tie; returns how many positions were compared.

    What is shorter, for it was aborted, is compared as far as it goes.
    """
    ours, theirs = output(request), output(reference)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            known = reference.tokens[: reference.num_prompt + index]
            logits = plain_logprobs(model.params, model.config, known, [len(known) - 1])[0]
            here = replace(reference, tokens=array("i", known), lease=None)
            assert choose(np.asarray(logits), here) is None, (
                f"token {index}: {one}, without the cache {other}"
            )
            return index
    if request.finish_reason != "abort":
        assert (len(ours), request.finish_reason) == (len(theirs), reference.finish_reason)
    return min(len(ours), len(theirs))


# --- random mixes


@pytest.mark.slow
def test_a_mixture_of_experts_answers_the_same_over_three_tiers(tmp_path: Path) -> None:
    """Its tokens are shared out anew in every batch; one layer of the model has a plain MLP."""
    device = TinyDevice(TinyModel("qwen3-moe", stacked=True), 4, tokens_in_pool=256, coarse=True)
    rng = random.Random(1)
    prefix = [rng.randrange(256) for _ in range(24)]
    prompts = [prefix + [rng.randrange(256) for _ in range(rng.randint(1, 9))] for _ in range(6)]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    reference = device.run(enabled=False)
    references = []
    for prompt in prompts:
        references.append(reference.add(prompt, params))
        reference.finish()  # each alone
    found: Counter[str] = Counter()
    compared = 0
    for restart in range(2):
        run = device.run(host_pages=64, directory=tmp_path, prefetch="wait_complete")
        for part in range(2):
            ours = [run.add(prompt, params) for prompt in prompts]  # all in one batch
            run.finish()
            for request in ours:
                found.update(request.cached_by_tier)
            compared += sum(same_tokens(r, o, device.model) for r, o in zip(ours, references, strict=True))
            if not restart and not part:
                run.cache.clear(DEVICE)
        run.close()
    assert compared > 150
    assert min(found.values()) > 20, found


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_mixes_equal_a_run_without_cache(devices: dict[int, TinyDevice], page_size: int) -> None:
    device = devices[page_size]
    compared = retractions = hits = evictions = 0
    for seed in range(MIXES):
        ours, references, stats = _run_mix(device, random.Random(seed * 16 + page_size))
        compared += sum(
            same_tokens(r, other, device.model) for r, other in zip(ours, references, strict=True)
        )
        retractions += stats.retractions
        hits += stats.cached_tokens
        evictions += stats.evicted_pages
    assert compared > 15 * MIXES
    assert min(retractions, hits, evictions) > 20, "the mixes are too tame"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_mixes_over_three_tiers(
    devices: dict[int, TinyDevice], page_size: int, tmp_path: Path
) -> None:
    """Tiny tiers, so that pages go down and come up all the time, and restarts in the middle."""
    device = devices[page_size]
    compared = 0
    found: Counter[str] = Counter()
    for seed in range(TIER_MIXES):
        rng = random.Random(seed * 16 + page_size)
        prefixes = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(3)]
        wanted = [_ask(rng, prefixes) for _ in range(9)]
        reference = device.run(enabled=False)
        references = [reference.add(p, params, seed=s, stop_ids=ids) for p, params, s, ids in wanted]
        reference.finish()
        longest = max(len(prompt) + params.max_tokens for prompt, params, *_ in wanted)
        least = -(-longest // page_size)
        ours: list[Request] = []
        for part in range(3):
            run = device.run(
                pages=min(int(least * rng.choice([1, 1.2, 2])) + 1, device.pages),
                host_pages=int(least * rng.choice([0.7, 2, 5])) + 1,
                budget=rng.choice([3, 16]),
                directory=tmp_path / str(seed) if seed % 4 else None,
                disk_pages=rng.choice([None, None, 2 * least]),
                write_policy=rng.choice(WRITE_POLICIES),
                prefetch=rng.choice(["best_effort", "wait_complete", "timeout=300ms"]),
            )
            for prompt, params, s, ids in wanted[part * 3 : part * 3 + 3]:
                ours.append(run.add(prompt, params, seed=s, stop_ids=ids))
                for _ in range(rng.randint(0, 4)):
                    run.step()
                if rng.random() < 0.1:
                    run.loop.abort(ours[-1].id)
                if rng.random() < 0.5:
                    run.finish()
                    run.cache.clear(DEVICE)
            run.finish()
            run.close()
        compared += sum(
            same_tokens(r, other, device.model) for r, other in zip(ours, references, strict=True)
        )
        for request in ours:
            found.update(request.cached_by_tier)
    assert compared > 60 * TIER_MIXES
    assert min(found.values()) > 10, f"the mixes are too tame: {found}"


def _run_mix(device: TinyDevice, rng: random.Random):
    prefixes = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(2)]
    wanted = [_ask(rng, prefixes) for _ in range(rng.randint(3, 6))]
    longest = max(len(prompt) + params.max_tokens for prompt, params, *_ in wanted)
    least = -(-longest // device.page_size)

    reference = device.run(enabled=False)
    references = [reference.add(p, params, seed=s, stop_ids=ids) for p, params, s, ids in wanted]
    reference.finish()

    run = device.run(
        pages=min(int(least * rng.choice([1, 1, 1.2, 1.5, 3])) + 1, device.pages),
        budget=rng.choice([1, 3, 16, 16]),
        policy=LPM(max_age=0.1) if rng.random() < 0.5 else None,
    )
    ours = []
    spread = rng.choice([0, 4])
    for prompt, params, seed, ids in wanted:
        ours.append(run.add(prompt, params, seed=seed, stop_ids=ids))
        for _ in range(rng.randint(0, spread)):
            run.step()
        if rng.random() < 0.15:
            run.loop.abort(rng.choice(ours).id)
    for _ in range(rng.randint(0, 12)):
        run.step()
    if rng.random() < 0.3:
        run.loop.abort(rng.choice(ours).id)
    run.finish()
    return ours, references, run.loop.stats


def _ask(
    rng: random.Random, prefixes: Sequence[Sequence[int]]
) -> tuple[list[int], SamplingParams, int, list[int]]:
    prompt = list(rng.choice(prefixes)[: rng.randint(0, 40)])
    prompt += [rng.randrange(256) for _ in range(rng.randint(1, 8))]
    drawn = rng.random() < 0.6
    params = SamplingParams(
        max_tokens=rng.choice([1, 6, 12, 24]),
        temperature=rng.choice([0.5, 1.0]) if drawn else 0.0,
        top_k=rng.choice([0, 0, 20]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        min_tokens=rng.choice([0, 0, 4]),
        logit_bias={rng.randrange(256): 5.0} if rng.random() < 0.2 else {},
    )
    return prompt, params, rng.randrange(1 << 63), rng.sample(range(256), rng.choice([0, 0, 20]))


# --- what must not matter to one request


SEEDED = SamplingParams(max_tokens=24, temperature=1.0, frequency_penalty=0.4, top_p=0.95)
PROMPT = [(7 * n) % 256 for n in range(30)]


def _others(run: Run, count: int, *, seeded: bool) -> None:
    for n in range(count):
        seed = 42 if seeded else 1000 + n
        run.add([n + 1] * (5 + 3 * n), replace(SEEDED, temperature=0.7, presence_penalty=0.2), seed=seed)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_seeded_request_is_the_same_in_any_company(devices: dict[int, TinyDevice], page_size: int) -> None:
    device = devices[page_size]
    alone = device.run()
    expected = alone.add(PROMPT, SEEDED, seed=42)
    alone.finish()
    assert len(set(output(expected))) > 8, "it does draw"

    def check(run: Run, request: Request) -> None:
        run.finish()
        assert same_tokens(request, expected, device.model) > 12

    for seeded in (False, True):
        for before in (0, 3):
            run = device.run()
            _others(run, before, seeded=seeded)
            request = run.add(PROMPT, SEEDED, seed=42)
            _others(run, 3 - before, seeded=seeded)
            check(run, request)
            assert len(run.deltas) == 4

    for budget in (1, 5):
        run = device.run(budget=budget)
        check(run, run.add(PROMPT, SEEDED, seed=42))

    # The one admitted last is the one that gives way.
    run = device.run(pages=-(-72 // page_size))
    first = run.add([9] * 20, replace(SEEDED, max_tokens=40), seed=1)
    request = run.add(PROMPT, SEEDED, seed=42)
    check(run, request)
    assert request.residency > 1
    assert len(output(first)) == 40


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_however_the_earlier_request_ended(devices: dict[int, TinyDevice], page_size: int) -> None:
    device = devices[page_size]
    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    cold = device.run(enabled=False)
    expected = cold.add(PROMPT, greedy)
    cold.finish()
    for ending in ("end token", "length", "abort"):
        run = device.run()
        stop_ids = [output(expected)[5]] if ending == "end token" else []
        first = run.add(PROMPT, greedy, stop_ids=stop_ids)
        while ending == "abort" and len(output(first)) < 3:
            run.step()
        run.loop.abort(first.id) if ending == "abort" else run.finish()
        again = run.add(PROMPT, greedy)
        run.finish()
        assert same_tokens(again, expected, device.model) > 8
        # What the last step had computed but not delivered may be there or not; the delivered part must be.
        longer = run.add(first.tokens, greedy)
        run.finish()
        assert longer.cached_tokens >= (len(first.tokens) - 1) // page_size * page_size
        rest = cold.add(first.tokens, greedy)
        cold.finish()
        assert same_tokens(longer, rest, device.model) > 8


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_full_hit_writes_to_no_shared_page(devices: dict[int, TinyDevice], page_size: int) -> None:
    device = devices[page_size]
    run = device.run()
    prompt = PROMPT[:8]
    first = run.add(prompt)
    run.finish()
    # A copy: a view of a donated array would make the next step copy the whole pool.
    before = np.array(device.pool.array)
    lease = run.cache.open(b"", array("i", prompt), 7)
    pages = list(lease.pages)
    run.cache.release(lease)
    for _ in range(2):
        again = run.add(prompt)
        run.finish()
        assert output(again) == output(first)
        assert again.cached_tokens == 8 // page_size * page_size - page_size
    np.testing.assert_array_equal(np.array(device.pool.array)[pages], before[pages])


def test_tenants_share_nothing(devices: dict[int, TinyDevice]) -> None:
    device = devices[16]
    run = device.run()
    prompt = [n % 251 for n in range(50)]
    cached, tokens = [], []
    for namespace in (b"salt:s1", b"salt:s1", b"salt:s2", b"", b"adapter:s1", b"s1"):
        request = run.add(prompt, namespace=namespace)
        run.finish()
        cached.append(request.cached_tokens)
        tokens.append(output(request))
    assert cached == [0, 48, 0, 0, 0, 0], "the second is the control: sharing does work"
    assert tokens == [tokens[0]] * 6
