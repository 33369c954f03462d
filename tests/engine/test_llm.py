"""The offline face: one output per prompt, in order, whatever the prompts are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.byte_tokenizer import BOS, EOS, IM_END, IM_START
from helpers.offline_llm import GREEDY, OPTIONS, numbers
from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, Constraint, SamplingParams
from tierax.engine.chat_template import TemplateError
from tierax.engine.validate import ParameterError

A_TO_Z = "abcdefghijklmnopqrstuvwxyz"


def test_scores_of_a_prompts_end(llm: LLM) -> None:
    prompt = A_TO_Z * 2
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    [whole] = llm.generate([prompt], params, use_tqdm=False)
    [end] = llm.generate([prompt], replace(params, prompt_logprobs_start=40), use_tqdm=False)
    assert whole.prompt_logprobs is not None
    assert end.prompt_logprobs is not None
    assert (whole.cached_tokens, end.cached_tokens) == (0, 36)
    assert end.prompt_logprobs[:40] == [None] * 40
    for one, other in zip(whole.prompt_logprobs[40:], end.prompt_logprobs[40:], strict=True):
        assert one is not None
        assert other is not None
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
    [none] = llm.generate([prompt], replace(params, prompt_logprobs_start=90), use_tqdm=False)
    assert none.prompt_logprobs == [None] * 52
    with pytest.raises(ParameterError, match="prompt_logprobs_start must be at least 1"):
        llm.generate([prompt], replace(params, prompt_logprobs_start=0))


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    from_text, from_ids = llm.generate(["hello", list(b"hello")], GREEDY)
    assert from_text.prompt_token_ids == list(b"hello")
    assert len(from_text.token_ids) == 8
    assert from_text.finish_reason == "length"
    assert from_text.text == llm.engine.tokenizer.decode(from_text.token_ids)
    assert from_text.error is None
    assert from_text.logprobs is None
    assert numbers(from_text) == numbers(from_ids)


@pytest.mark.parametrize("prompt", ["hello", list(b"hello"), tuple(b"hello")])
def test_a_bare_prompt_is_one_item(llm: LLM, prompt: Any) -> None:
    outputs = llm.generate(prompt, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [list(b"hello")]


def test_text_is_no_conversation(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="must be a list of messages"):
        llm.chat("hi")  # pyright: ignore[reportArgumentType]


def test_nothing_gives_nothing(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


def test_many_more_prompts_than_can_run_keep_their_order(llm: LLM) -> None:
    prompts = [f"{A_TO_Z[i % 26]} number {i}" for i in range(300)]
    params = [SamplingParams(max_tokens=1 + i % 3, temperature=0, ignore_eos=True) for i in range(300)]
    outputs = llm.generate(prompts, params)
    assert [bytes(o.prompt_token_ids).decode() for o in outputs] == prompts
    assert [len(o.token_ids) for o in outputs] == [1 + i % 3 for i in range(300)]
    again = llm.generate(prompts[::-1], params[::-1])[::-1]
    assert [numbers(o) for o in again] == [numbers(o) for o in outputs]


def test_default_parameters(llm: LLM) -> None:
    (output,) = llm.generate(["x" * 20])
    assert output.error is None
    assert output.finish_reason == "stop" or len(output.token_ids) == 108, (
        "clipped to what the context leaves"
    )


def test_bad_prompts_are_errors_in_their_places(llm: LLM) -> None:
    prompts: list[Any] = ["good", "x" * 500, "", "bad \ud800", 7, b"bytes", [5, "x"], [10**6], [], "good too"]
    outputs = llm.generate(prompts, GREEDY)
    errors = [output.error or "" for output in outputs]
    assert [bool(error) for error in errors] == [False] + 8 * [True] + [False]
    for error, words in zip(
        errors[1:9],
        ["500 tokens", "empty", "surrogate U+D800", "not int", "not bytes", "'x'", "1000000", "empty"],
        strict=True,
    ):
        assert words in error
    assert outputs[1].prompt_token_ids == list(b"x" * 500)
    assert [outputs[3].text, outputs[3].token_ids, outputs[3].finish_reason] == ["", [], "error"]
    assert numbers(outputs[0]) == numbers(llm.generate(["good"], GREEDY)[0])
    assert len(outputs[9].token_ids) == 8


def test_duplicates_bad_ones_and_several_choices_stay_aligned(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, n=2, seed=3, ignore_eos=True)
    outputs = llm.generate(["a", "x" * 500, "a", "b"], params)
    assert [output.error is None for output in outputs] == [True, False, True, True]
    assert [len(output.choices) for output in outputs] == [2, 1, 2, 2]
    assert numbers(outputs[0]) == numbers(outputs[2])
    first, second = outputs[0].choices
    assert first.token_ids != second.token_ids
    assert (outputs[0].text, outputs[0].token_ids) == (first.text, first.token_ids)
    (alone,) = llm.generate(["a"], SamplingParams(max_tokens=6, seed=3, ignore_eos=True))
    assert alone.token_ids == first.token_ids


def test_bad_parameters_of_one_item_spoil_only_it(llm: LLM) -> None:
    params: list[Any] = [GREEDY, SamplingParams(temperature=-1), GREEDY, None, SamplingParams(n=0)]
    outputs = llm.generate(["a", "b", "c", "d", "e"], params)
    assert [output.error is None for output in outputs] == [True, False, True, False, False]
    assert "temperature must be at least 0" in (outputs[1].error or "")
    assert "SamplingParams is expected, not NoneType" in (outputs[3].error or "")
    assert outputs[4].prompt_token_ids == list(b"e")


def test_mistakes_of_the_whole_call_raise(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="temperature must be"):
        llm.generate(["a", "b"], SamplingParams(temperature=float("nan")))
    with pytest.raises(ParameterError, match="3 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    assert llm.generate(["a"], GREEDY)[0].error is None


def test_logprobs_and_end_token(llm: LLM) -> None:
    (free,) = llm.generate(["abc"], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2))
    assert free.logprobs is not None
    assert [entry.token_id for entry in free.logprobs] == free.token_ids
    for entry in free.logprobs:
        assert entry.top[0] == (entry.token_id, entry.logprob), "greedy takes the likeliest"
        assert len(entry.top) == 2
    end = free.token_ids[3]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0, stop_token_ids=[end])
    (ended,) = llm.generate(["abc"], params)
    assert ended.token_ids == free.token_ids[: free.token_ids.index(end)]
    assert ended.finish_reason == "stop"
    assert [entry.token_id for entry in ended.logprobs or []] == ended.token_ids


def test_cached_tokens_by_tier(llm: LLM) -> None:
    cold, warm = (llm.generate([A_TO_Z.upper()], GREEDY)[0] for _ in range(2))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 24, "all whole pages of 4 but for the last token's"
    assert warm.cached_by_tier == {"device": 24, "host": 0, "disk": 0}
    assert numbers(cold) == numbers(warm)
    # Together: the second finds what the first is computing.
    together = llm.generate([A_TO_Z[::-1]] * 2, GREEDY)
    assert [output.cached_tokens for output in together] == [0, 24]


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, GREEDY)
    assert one.prompt_token_ids == [
        *(IM_START, *b"system\nbe brief", IM_END, *b"\n"),
        *(IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"),
    ]
    assert not {BOS, EOS} & set(one.prompt_token_ids)
    several = llm.chat([conversation, [{"role": "user", "content": "hi"}]], GREEDY)
    assert numbers(several[0]) == numbers(one)
    assert len(several[1].prompt_token_ids) < len(one.prompt_token_ids)


def test_chat_continues_a_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well,"}]
    (output,) = llm.chat(messages, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert bytes(output.prompt_token_ids[-5:]) == b"well,"


def test_bad_conversations_are_errors_in_their_places(llm: LLM) -> None:
    good = [{"role": "user", "content": "hi"}]
    bad: list[Any] = [
        [],
        [{"role": "pope", "content": "x"}],
        [{"role": "user", "content": 5}],
        "text",
        [good],
    ]
    outputs = llm.chat([good, *bad, good], GREEDY)
    assert [output.error is None for output in outputs] == [True] + 5 * [False] + [True]
    assert "'pope' is unknown" in (outputs[2].error or "")
    # A list that starts with a message is one conversation.
    (single,) = llm.chat([*good, "junk"], GREEDY)  # pyright: ignore[reportArgumentType]
    assert "messages[1] must be an object" in (single.error or "")


def test_a_model_without_chat_template(tmp_path: Path) -> None:
    write_tiny_text_model(tmp_path, chat_template=False)
    with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(TemplateError, match="use generate"):
        llm.chat([{"role": "user", "content": "hi"}])


# --- constraints


def test_answers_match_and_a_refusal_is_one_items_error(llm: LLM) -> None:
    def held(constraint: Constraint | None) -> SamplingParams:
        return SamplingParams(max_tokens=30, temperature=1, seed=3, constraint=constraint)

    dates = Constraint.regex(r"\d{4}-\d\d")
    outputs = llm.generate(
        ["a"] * 4, [held(dates), held(Constraint.json_schema({"not": {}})), held(None), held(dates)]
    )
    assert re.fullmatch(r"\d{4}-\d\d", outputs[0].text)
    assert [output.finish_reason for output in outputs[:2]] == ["stop", "error"]
    assert outputs[1].error is not None
    assert "not" in outputs[1].error
    assert outputs[2].error is None
    assert outputs[3].text == outputs[0].text


def test_choices_of_one_prompt_match_each_by_itself(llm: LLM) -> None:
    words = Constraint.choice(["one", "two", "three", "twelve"])
    params = SamplingParams(max_tokens=9, temperature=2, seed=1, n=8, constraint=words, logprobs=1)
    [output] = llm.generate("a", params)
    texts = [choice.text for choice in output.choices]
    assert set(texts) <= {"one", "two", "three", "twelve"}
    assert len(set(texts)) > 1
    for choice in output.choices:
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids == list(choice.text.encode())


def test_a_prompts_own_log_probs_come_beside_a_constraint(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0, prompt_logprobs=1, constraint=Constraint.choice(["yes", "no"])
    )
    [output] = llm.generate("abc", params)
    assert output.text in ("yes", "no")
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 3


def test_what_is_no_constraint_is_refused_for_all(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="must be a Constraint"):
        llm.generate("a", SamplingParams(constraint="[a-z]+"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ParameterError, match="max_tokens 0"):
        llm.generate("a", SamplingParams(max_tokens=0, prompt_logprobs=0, constraint=Constraint.regex("a")))
