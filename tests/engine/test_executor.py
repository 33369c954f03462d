"""The real executor: any limits, no compilation after warm-up, and faults after the pool was given away."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_engine import Run, TinyDevice, TinyModel, output
from tierax.engine.compile_counter import CompileCounter
from tierax.engine.constraint import Constraint
from tierax.engine.grammar import GrammarCompiler
from tierax.engine.request import Request, SamplingParams
from tierax.engine.stats import EngineStats
from tierax.engine.step import StepFunctions, StepShapes, bucket_of, buckets
from tierax.models.transformer import Decoder

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


class FaultyFunctions(StepFunctions):
    """Runs a step, so that its donated buffers are gone, and then fails where it was told to."""

    def __init__(self, decoder: Decoder, shapes: StepShapes) -> None:
        super().__init__(decoder, shapes)
        self.fail_after: str | None = None
        self.forward = _Failing("forward", self.forward, self)  # pyright: ignore[reportAttributeAccessIssue]
        self.sample = _Failing("sample", self.sample, self)  # pyright: ignore[reportAttributeAccessIssue]


class _Failing:
    def __init__(self, name: str, program: Any, owner: FaultyFunctions) -> None:
        self.name = name
        self.program = program
        self.owner = owner
        self.prepare = program.prepare

    def __call__(self, *args: Any, **options: Any) -> Any:
        result = self.program(*args, **options)
        if self.owner.fail_after == self.name:
            self.owner.fail_after = None
            raise RuntimeError(f"injected after {self.name}")
        return result


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


class Shared:
    """One set of functions for devices that differ in their token limit only, so that little is compiled twice."""

    def __init__(self) -> None:
        self.functions: FaultyFunctions | None = None

    def __call__(self, decoder: Decoder, shapes: StepShapes) -> FaultyFunctions:
        if self.functions is None:
            self.functions = FaultyFunctions(decoder, shapes)
        return self.functions

    def device(self, model: TinyModel, limit: int, page_size: int = 16) -> TinyDevice:
        return TinyDevice(
            model, page_size, tokens_in_pool=512, seqs=3, budget=limit, context=400, functions=self
        )


@pytest.fixture(scope="module")
def shared() -> Shared:
    return Shared()


@pytest.fixture(scope="module")
def device(model: TinyModel, shared: Shared) -> TinyDevice:
    """Limits of 7 tokens and 3 requests, neither of them a power of two; warm."""
    made = shared.device(model, 7)
    list(made.executor.warm_up())
    return made


@pytest.fixture(scope="module")
def device_of_single_tokens(model: TinyModel, shared: Shared) -> TinyDevice:
    """The same with pages of one token; warm."""
    made = shared.device(model, 7, page_size=1)
    list(made.executor.warm_up())
    return made


@contextmanager
def nothing_compiles() -> Iterator[None]:
    stats = EngineStats()
    counter = CompileCounter(stats)
    try:
        yield
    finally:
        counter.close()
    assert (stats.compiles, stats.loaded_programs) == (0, 0)


def finished(run: Run, *requests: Request) -> list[list[int]]:
    run.finish()
    assert all(request.finish_reason in ("length", "stop") for request in requests)
    return [output(request) for request in requests]


# --- nothing compiles after warm-up


def test_warm_up_changes_nothing(device: TinyDevice) -> None:
    run = device.run()
    before = finished(run, run.add(range(20), GREEDY))
    list(device.executor.warm_up())
    again = device.run()
    assert finished(again, again.add(range(20), GREEDY)) == before
    assert device.executor.num_programs == 4 + 3


def test_the_counter_would_see_a_compilation() -> None:
    with pytest.raises(AssertionError), nothing_compiles():
        jax.jit(lambda x: x * 3 + 1)(np.arange(5))


@pytest.mark.parametrize(("name", "tight_pages"), [("device", 3), ("device_of_single_tokens", 48)])
def test_nothing_compiles_over_lengths_batches_and_hits(
    request: pytest.FixtureRequest, name: str, tight_pages: int
) -> None:
    device: TinyDevice = request.getfixturevalue(name)
    with nothing_compiles():
        run = device.run()
        for length in (*range(1, 40), 63, 64, 65, 200, 385):
            run.add([length, *range(length - 1)], replace(GREEDY, max_tokens=1 + length % 3))
            if length % 3 == 0:
                run.finish()
        run.finish()
        for length in (1, 15, 16, 17, 32, 33, 48, 64, 100):
            run.add([100, *range(length)], replace(GREEDY, max_tokens=3))
            run.finish()
        assert run.loop.stats.cached_tokens > 200
        for together in (1, 2, 3, 4, 5, 9):
            for n in range(together):
                run.add([n] * 5, GREEDY)
            run.finish()
        tight = device.run(pages=tight_pages)
        for n in range(3):
            tight.add([n] * 10, replace(GREEDY, max_tokens=30))
        tight.finish()
        assert tight.loop.stats.retractions > 0


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1e-6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": -1},
    {"temperature": 1.0, "min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"logit_bias": {3: 4.0, 200: -100.0}},
    {"min_tokens": 4},
    {"logprobs": 0},
    {"logprobs": 20},
    {"seed": 7, "temperature": 1.0, "n": 4},
    {"ignore_eos": True},
    {"constraint": Constraint.regex("[a-c]{3}")},
    {"constraint": Constraint.regex("[a-c]wxyz[a-c]{3}"), "temperature": 1.0, "logprobs": 2},
    {"constraint": Constraint.regex("wxyz[a-c]+"), "frequency_penalty": 0.5, "min_tokens": 3},
    {"constraint": Constraint.choice(["abcdefghijklm", "b"])},
]


def test_no_option_compiles_anything(device: TinyDevice) -> None:
    grammars = GrammarCompiler(byte_tokenizer(), 256, frozenset())

    def add(run: Run, prompt: list[int], number: int, options: dict[str, Any]) -> None:
        params = replace(GREEDY, **options)
        compiled = None if params.constraint is None else grammars.compile(params.constraint)
        matcher = None if compiled is None else compiled.matcher(frozenset([1, 2]))
        run.add(prompt, params, seed=number, stop_ids=[1, 2], matcher=matcher)

    with nothing_compiles():
        run = device.run()
        for number, options in enumerate(OPTIONS):
            add(run, [number, 2, 3], number, options)
            run.finish()
        for number, options in enumerate(OPTIONS):
            add(run, [9] * (number + 1), number, options)
        run.finish()
    assert run.loop.stats.masks > 0
    assert run.loop.stats.jumped_tokens > 0
    tops = [delta.logprobs[0].top for delta in run.deltas["r11"] if delta.logprobs]
    assert [len(top) for top in tops[:1]] == [20]


# --- limits


def test_buckets_are_powers_of_two_and_the_limit_itself() -> None:
    assert buckets(1) == (1,)
    assert buckets(7) == (1, 2, 4, 7)
    assert buckets(8) == (1, 2, 4, 8)
    assert buckets(317) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 317)
    assert [bucket_of(n, buckets(7)) for n in range(1, 8)] == [1, 2, 4, 4, 7, 7, 7]


def test_odd_limits_run_full_and_give_the_same_tokens(
    model: TinyModel, device: TinyDevice, shared: Shared
) -> None:
    prompts = [[(n * k) % 256 for n in range(length)] for k, length in ((3, 330), (5, 9), (7, 1))]
    tokens = []
    for limit in (1, 7, 317):
        run = (device if limit == 7 else shared.device(model, limit)).run()
        requests = [run.add(prompt, GREEDY) for prompt in prompts]
        run.step()
        assert run.loop.stats.computed_tokens == limit, "the first step is full"
        tokens.append(finished(run, *requests))
    assert tokens[0] == tokens[1] == tokens[2]


# --- log-probs and state per slot


def test_log_probs_go_to_those_who_asked(device: TinyDevice) -> None:
    run = device.run()
    plain = run.add([5, 6, 7], GREEDY)
    asked = run.add([5, 6, 7], replace(GREEDY, logprobs=3))
    chosen = run.add([5, 6, 8], replace(GREEDY, logprobs=0))
    finished(run, plain, asked, chosen)
    assert all(not delta.logprobs for delta in run.deltas[plain.id])
    for delta in run.deltas[asked.id]:
        (entry,) = delta.logprobs
        assert [entry.token_id] == delta.token_ids
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        assert entry.top[0][1] > entry.top[1][1] > entry.top[2][1]
    assert all(delta.logprobs[0].top == () for delta in run.deltas[chosen.id])


def test_a_slot_keeps_nothing_for_a_later_request_of_the_same_name(device: TinyDevice) -> None:
    penalised = replace(GREEDY, frequency_penalty=2.0, presence_penalty=1.0)
    run = device.run()
    first = finished(run, run.add([5, 6, 7], penalised))
    run.deltas.clear()
    # The same id, slot and number of admissions again, with other biases.
    biased = finished(run, run.add([5, 6, 7], replace(penalised, logit_bias={44: 100.0})))
    assert biased[0][0] == 44
    run.deltas.clear()
    assert finished(run, run.add([5, 6, 7], penalised)) == first


# --- faults


@pytest.mark.parametrize("after", ["forward", "sample"])
def test_a_fault_after_donation_costs_the_running_and_no_more(
    device: TinyDevice, shared: Shared, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    healthy = device.run()
    prompts = [list(range(n, n + 40)) for n in range(5)]
    expected = finished(healthy, *(healthy.add(prompt, GREEDY) for prompt in prompts))

    run = device.run()
    requests = [run.add(prompt, GREEDY) for prompt in prompts]
    while not requests[0].num_output:
        run.step()
    given_away = device.pool.array
    assert shared.functions is not None
    shared.functions.fail_after = after
    running = list(run.loop.scheduler.running)
    run.step()
    assert given_away.is_deleted()
    assert not device.pool.array.is_deleted()
    assert running
    assert [r.finish_reason for r in running] == ["error"] * len(running)
    assert f"injected after {after}" in (run.deltas[running[0].id][-1].error or "")
    run.finish()
    for request, tokens in zip(requests, expected, strict=True):
        if request not in running:
            assert output(request) == tokens
    again = run.add(prompts[0], GREEDY)
    assert finished(run, again) == [expected[0]]
    assert again.cached_tokens == 0


def test_the_pool_is_given_away_and_replaced_in_every_step(device: TinyDevice) -> None:
    run = device.run()
    run.add([1, 2, 3], replace(GREEDY, max_tokens=100))
    for _ in range(60):
        before = device.pool.array
        run.step()
        assert before.is_deleted()
        assert device.pool.array is not before
    run.finish()
    assert np.isfinite(np.array(device.pool.array)).all()


def test_a_page_out_of_range_is_caught_before_the_device_sees_it(
    device: TinyDevice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    run = device.run()
    request = run.add([1, 2, 3], GREEDY)
    run.step()
    assert request.lease is not None
    request.lease.pages[0] = device.pages
    run.loop.step()
    assert request.finish_reason == "error"
    assert "page out of range" in (run.deltas[request.id][-1].error or "")
    run.finish()
    healthy = run.add([1, 2, 3], GREEDY)
    finished(run, healthy)
