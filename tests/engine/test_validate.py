"""Callers' mistakes are named before the engine sees them (DEFECTS d4, d6, g3, g5, c1, c2)."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierax.engine.request import SamplingParams
from tierax.engine.validate import (
    ParameterError,
    check_messages,
    check_prompt,
    check_sampling,
    seed_for_choice,
)

VOCAB = 1000
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", x) for x in (NAN, INF, -INF, -1, -1e-9, 1e9, 100.1, "1", None, True)],
        *[("top_p", x) for x in (NAN, 0, -1, 1.01, INF, "0.5")],
        *[("top_k", x) for x in (-2, 1.5, NAN, 2**31, "5", True)],
        *[("min_p", x) for x in (2, -0.1, NAN)],
        *[("repetition_penalty", x) for x in (0, -1, NAN, INF, 101)],
        *[("frequency_penalty", x) for x in (-2.1, 2.1, NAN)],
        *[("presence_penalty", x) for x in (-2.1, 2.1, NAN)],
        *[("n", x) for x in (0, -1, 129, 10**9, 1.0, None, False)],
        *[("max_tokens", x) for x in (0, -1, 2**31, 1.5, NAN, True, None)],
        *[("min_tokens", x) for x in (-1, 129, 0.5)],
        *[("seed", x) for x in (2**70, 2**63, -(2**63) - 1, 1.0, "7", True)],
        *[("logprobs", x) for x in (-1, 21, 10**6, 2.0, True)],
        *[("stop", x) for x in (["x"] * 1000, [""], ["x" * 1025], "x", [1], None)],
        *[("stop_token_ids", x) for x in ([VOCAB], [-1], [1.0], ["1"], [True], [2**70], 5, [0] * 129)],
        *[
            ("logit_bias", x)
            for x in (
                {999999: 5.0},
                {VOCAB: 5.0},
                {-1: 5.0},
                {"x": 5.0},
                {True: 5.0},
                {1: 101.0},
                {1: -100.5},
                {1: NAN},
                {1: "5"},
                {1: None},
                dict.fromkeys(range(301), 1.0),
                [1],
            )
        ],
        *[("ignore_eos", x) for x in (1, None, "yes")],
        ("skip_special_tokens", 0),
        ("include_stop_str_in_output", "true"),
    ],
)
def test_illegal_values_are_refused_by_name(field: str, value: Any) -> None:
    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(ParameterError, match=field.split("_")[0]) as caught:
        check_sampling(params, vocab_size=VOCAB)
    assert caught.value.param == field
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", x) for x in (0, 0.0, 1e-6, 1, 100.0)],
        *[("top_p", x) for x in (1, 1e-9, 0.5)],
        *[("top_k", x) for x in (-1, 0, 1, 10**6)],
        *[("min_p", x) for x in (0, 1, 0.3)],
        *[("repetition_penalty", x) for x in (1e-3, 1, 100)],
        *[("frequency_penalty", x) for x in (-2, 0, 2.0)],
        *[("n", x) for x in (1, 128)],
        *[("max_tokens", x) for x in (1, 2**31 - 1)],
        *[("min_tokens", x) for x in (0, 128)],
        *[("seed", x) for x in (None, 0, -1, 2**63 - 1, -(2**63))],
        *[("logprobs", x) for x in (None, 0, 20)],
        *[("stop", x) for x in ([], ["a"] * 32, ["x" * 1024], ("a",))],
        *[("stop_token_ids", x) for x in ([], [0, VOCAB - 1])],
        *[("logit_bias", x) for x in ({}, {0: -100, VOCAB - 1: 100.0}, dict.fromkeys(range(300), 1.0))],
    ],
)
def test_legal_values_pass(field: str, value: Any) -> None:
    params = SamplingParams()
    setattr(params, field, value)
    check_sampling(params, vocab_size=VOCAB)


def test_numbers_of_numpy_count_as_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    check_sampling(SamplingParams(temperature=numpy.float32(0.5), top_k=numpy.int64(3)), vocab_size=VOCAB)
    with pytest.raises(ParameterError, match="temperature"):
        check_sampling(SamplingParams(temperature=numpy.float32("nan")), vocab_size=VOCAB)


def test_no_output_is_legal_only_where_allowed() -> None:
    check_sampling(SamplingParams(max_tokens=0), vocab_size=VOCAB, allow_no_tokens=True)
    with pytest.raises(ParameterError, match="at least 1") as caught:
        check_sampling(SamplingParams(max_tokens=0), vocab_size=VOCAB)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ParameterError, match="min_tokens 1 is larger than max_tokens 0"):
        check_sampling(SamplingParams(max_tokens=0, min_tokens=1), vocab_size=VOCAB, allow_no_tokens=True)


@given(st.floats() | st.integers())
def test_an_accepted_temperature_is_a_finite_one_in_range(value: float) -> None:
    try:
        check_sampling(SamplingParams(temperature=value), vocab_size=VOCAB)
    except ParameterError:
        assert not 0 <= value <= 100
    else:
        assert 0 <= value <= 100


def prompt(
    ids: Any, *, context: int = 100, capacity: int = 1000, max_tokens: int = 10, param: str = "prompt"
) -> int:
    return check_prompt(
        ids,
        vocab_size=VOCAB,
        context_length=context,
        capacity_tokens=capacity,
        params=SamplingParams(max_tokens=max_tokens),
        param=param,
    )


@pytest.mark.parametrize(
    "ids",
    [[], (), "", "text", b"x", None, 5, [-1], [VOCAB], [[]], [[1, 2]], ["a"], [1.0], [True], [None], [2**70]],
)
def test_bad_prompts_are_refused(ids: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        prompt(ids)
    assert caught.value.param == "prompt"


def test_the_message_names_the_token_and_the_callers_field() -> None:
    with pytest.raises(
        ParameterError, match="input: token id -1 is outside the vocabulary of 1000"
    ) as caught:
        prompt([1, -1, 2], param="input")
    assert caught.value.param == "input"


def test_output_is_clipped_to_context_and_capacity() -> None:
    assert prompt([1] * 20) == 30
    assert prompt(array("i", [1] * 20)) == 30
    assert prompt([1] * 20, max_tokens=2**31 - 1) == 100
    assert prompt([1] * 20, max_tokens=100, capacity=32) == 32
    assert prompt([1] * 99) == 100


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ParameterError, match=r"1002 tokens and one more .* KV cache's capacity is 784"
    ) as caught:
        prompt([1] * 1002, context=2048, capacity=49 * 16)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ParameterError, match=r"100 tokens and one more .* context length is 100"):
        prompt([1] * 100)
    assert prompt([1] * 100, max_tokens=0) == 100
    with pytest.raises(ParameterError, match="101 tokens, but the context length is 100"):
        prompt([1] * 101, max_tokens=0)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
    ],
)
def test_bad_messages_are_refused(messages: Any, param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        check_messages(messages)
    assert caught.value.param == param


def test_good_messages_pass() -> None:
    check_messages(
        [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "content": "42"},
        ]
    )


@given(st.integers(-(2**63), 2**63 - 1))
def test_choices_have_seeds_of_their_own(seed: int) -> None:
    seeds = [seed_for_choice(seed, index) for index in range(8)]
    assert len(set(seeds)) == 8
    assert seeds == [seed_for_choice(seed, index) for index in range(8)]
    assert all(0 <= s < 2**63 for s in seeds)
    if seed >= 0:
        assert seeds[0] == seed


def test_derived_seeds_stay_the_same_between_versions() -> None:
    assert [seed_for_choice(7, i) for i in range(3)] == [7, 2174948161648732372, 2888775511750995287]
