"""Constrained answers of a real, tiny model: they match, whatever is cached, shared, aborted, or taken away meanwhile."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_engine import Run, TinyDevice, TinyModel, output
from tierax.engine.constraint import Constraint
from tierax.engine.grammar import GrammarCompiler
from tierax.engine.request import Request, SamplingParams
from tierax.engine.stats import EngineStats
from tierax.engine.text import IncrementalText

END = 3
"""Of the tiny model, whose tokens from 0 to 255 stand for bytes."""
TOKENIZER = byte_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER, 256, frozenset([END]))
DRAWN = SamplingParams(max_tokens=60, temperature=1.0)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["alpha", "beta"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "kind"]
        and len(value["name"]) <= 6
        and 0 <= value["age"] <= 120
        and value["kind"] in ("alpha", "beta")
    )


def balanced(text: str) -> bool:
    return re.fullmatch(r"\(*[ab]+\)*", text) is not None and text.count("(") == text.count(")")


CASES: list[tuple[Constraint, Callable[[str], bool]]] = [
    (Constraint.regex("yes(no)?"), lambda text: text in ("yes", "yesno")),
    (Constraint.regex("[a-f]{2,5}-[0-9]{3}"), lambda text: bool(re.fullmatch("[a-f]{2,5}-[0-9]{3}", text))),
    (Constraint.regex(r"<.{2,9}?>: \d{1,3}"), lambda text: bool(re.fullmatch(r"<.{2,9}>: [0-9]{1,3}", text))),
    (Constraint.choice(["red", "redder", "a longer one"]), lambda t: t in ("red", "redder", "a longer one")),
    (Constraint.json_schema(PERSON), is_person),
    (Constraint.grammar('start: "(" start ")" | /[ab]{1,3}/'), balanced),
]


@pytest.fixture(scope="module")
def device() -> TinyDevice:
    return TinyDevice(TinyModel(stacked=True), 4, tokens_in_pool=512, budget=24, context=160, coarse=True)


def add(
    run: Run, prompt: list[int], constraint: Constraint | None, params: SamplingParams, seed: int = 0
) -> Request:
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset([END]))
    compiled = None if constraint is None else GRAMMARS.compile(constraint)
    return run.add(
        prompt,
        params,
        seed=seed,
        stop_ids=sorted(stops),
        matcher=None if compiled is None else compiled.matcher(stops),
    )


def text_of(request: Request) -> str:
    tokens = output(request)
    if tokens and tokens[-1] in request.stop_ids:
        tokens.pop()
    return bytes(tokens).decode()


def check(request: Request, holds: Callable[[str], bool]) -> None:
    assert request.finish_reason in ("stop", "length")
    if request.finish_reason == "stop":
        assert holds(text_of(request)), text_of(request)
    else:
        assert request.num_output == request.params.max_tokens


# --- every kind of constraint


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_answer_matches(device: TinyDevice, case: int) -> None:
    constraint, holds = CASES[case]
    run = device.run()
    requests = [add(run, [1, 2, case], constraint, DRAWN, seed=n) for n in range(12)]
    run.finish()
    for request in requests:
        check(request, holds)
    assert sum(request.finish_reason == "stop" for request in requests) >= 8


def test_tokens_follow_from_the_seed_whoever_shares_the_batch(device: TinyDevice) -> None:
    def answers(together: bool) -> list[list[int]]:
        run = device.run()
        requests = []
        for number, (constraint, _) in enumerate(CASES):
            requests.append(add(run, [1, 2, number], constraint, DRAWN, seed=7))
            if not together:
                run.finish()
        run.finish()
        return [output(request) for request in requests]

    first = answers(together=True)
    assert first == answers(together=True) == answers(together=False)


def test_neighbours_without_a_constraint_say_the_same(device: TinyDevice) -> None:
    prompts = [[9, n, 4] for n in range(3)]
    plain = device.run()
    expected = [add(plain, prompt, None, DRAWN, seed=n) for n, prompt in enumerate(prompts)]
    plain.finish()
    mixed = device.run()
    free = [add(mixed, prompt, None, DRAWN, seed=n) for n, prompt in enumerate(prompts)]
    for number, (constraint, _) in enumerate(CASES):
        add(mixed, [5, number], constraint, DRAWN, seed=number)
    mixed.finish()
    assert [output(r) for r in free] == [output(r) for r in expected]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"repetition_penalty": 1.3, "frequency_penalty": 1.0},
        {"logit_bias": {ord("x"): 100.0, ord("y"): -100.0}},
        {"min_tokens": 4},
        {"logprobs": 3},
        {"ignore_eos": True},
        {"stop_token_ids": [5, 6]},
        {"max_tokens": 5},
    ],
)
def test_it_goes_with_every_other_parameter(device: TinyDevice, options: dict[str, object]) -> None:
    run = device.run()
    params = replace(DRAWN, **options)
    requests = [
        (add(run, [4, n, number], constraint, params, seed=n), holds)
        for n in range(2)
        for number, (constraint, holds) in enumerate(CASES)
    ]
    run.finish()
    for request, holds in requests:
        check(request, holds)


def test_log_probs_are_the_models_own_and_one_for_each_token(device: TinyDevice) -> None:
    run = device.run()
    constraint = Constraint.regex("[ab]forced[ab]{3}")
    asked = add(run, [1, 2, 3], constraint, replace(DRAWN, logprobs=3), seed=5)
    plain = add(run, [1, 2, 3], constraint, DRAWN, seed=5)
    run.finish()
    assert output(asked) == output(plain)
    assert run.loop.stats.jumped_tokens == 6
    entries = [entry for delta in run.deltas[asked.id] for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == output(asked)
    assert all(entry.logprob <= entry.top[0][1] for entry in entries)
    assert any(entry.token_id != entry.top[0][0] for entry in entries), "the top is what the model would say"


def test_end_tokens_of_all_sources_end_an_answer(device: TinyDevice) -> None:
    seen = set()
    for seed in range(40):
        run = device.run()
        bias = dict.fromkeys((7, END, ord("n")), 20.0)
        params = replace(DRAWN, temperature=3.0, stop_token_ids=[7], logit_bias=bias)
        request = add(run, [1, 2], Constraint.regex("yes(no)?"), params, seed=seed)
        run.finish()
        assert request.finish_reason == "stop"
        assert text_of(request) in ("yes", "yesno")
        seen.add(output(request)[-1])
    assert seen == {7, END, ord("o")}


def test_min_tokens_keep_end_tokens_out_but_cannot_lengthen_what_is_whole(device: TinyDevice) -> None:
    params = replace(DRAWN, min_tokens=5, logit_bias={END: 100.0})
    run = device.run()
    more = add(run, [1], Constraint.regex("[ab]+"), params)
    whole = add(run, [1], Constraint.regex("ab?"), replace(params, min_tokens=9))
    run.finish()
    assert (more.finish_reason, len(text_of(more))) == ("stop", 5)
    assert (whole.finish_reason, text_of(whole)) == ("stop", "ab")


def test_text_comes_with_the_tokens_and_stop_strings_count(device: TinyDevice) -> None:
    run = device.run()
    request = add(run, [1, 2], Constraint.regex("[ab]{2}forced[ab]{9}"), DRAWN, seed=1)
    request.text = IncrementalText(TOKENIZER, stop=["rce"])
    run.finish()
    text = "".join(delta.text for delta in run.deltas[request.id])
    assert (request.finish_reason, text[2:]) == ("stop", "fo")


# --- the cache and little room


def test_cached_and_cold_answers_are_the_same(device: TinyDevice) -> None:
    prompt = [(n * 7) % 250 for n in range(40)]
    run = device.run()
    for constraint, _ in CASES:
        cold = add(run, prompt, constraint, DRAWN, seed=3)
        run.finish()
        warm = add(run, prompt, constraint, DRAWN, seed=3)
        run.finish()
        assert warm.cached_tokens > 0
        assert output(warm) == output(cold)


def test_an_answers_own_pages_are_hits_for_the_next_turn(device: TinyDevice) -> None:
    run = device.run()
    first = add(run, [1, 2, 3], Constraint.regex("[ab]{4}a long forced text[ab]{4}"), DRAWN)
    run.finish()
    second = add(run, [*first.tokens, 9], None, DRAWN)
    run.finish()
    assert second.cached_tokens >= len(first.tokens) - 4


def test_random_mixes_in_little_room(device: TinyDevice) -> None:
    retractions = jumped = 0
    for seed in range(16):
        stats = run_mix(device, random.Random(seed))
        retractions += stats.retractions
        jumped += stats.jumped_tokens
    assert min(retractions, jumped) > 1, "the mixes are too tame"


def run_mix(device: TinyDevice, rng: random.Random) -> EngineStats:
    plans = [
        (
            [rng.randrange(4) for _ in range(rng.randint(1, 25))],
            rng.choice([*CASES, None]),
            replace(DRAWN, logprobs=rng.choice([None, None, 1]), max_tokens=rng.choice([8, 40])),
            rng.randrange(3),
        )
        for _ in range(7)
    ]
    expected = []
    for prompt, case, params, seed in plans:
        alone = device.run(enabled=False)
        request = add(alone, prompt, case[0] if case else None, params, seed)
        alone.finish()
        expected.append(output(request))
    run = device.run(pages=rng.choice([18, 20, 60]), enabled=rng.random() < 0.7)
    requests = []
    for prompt, case, params, seed in plans:
        requests.append(add(run, prompt, case[0] if case else None, params, seed))
        for _ in range(rng.randrange(4)):
            run.step()
        if rng.random() < 0.1:
            run.loop.abort(requests[-1].id)
    run.finish()
    for request, (_, case, _, _), tokens in zip(requests, plans, expected, strict=True):
        if request.finish_reason == "abort":
            assert output(request) == tokens[: request.num_output]
            continue
        assert output(request) == tokens
        if case is not None:
            check(request, case[1])
    return run.loop.stats
