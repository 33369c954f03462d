"""Reasoning in chat, and the fields of chat bodies that steer it or are hints."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.chat_templates import HERMES_TEMPLATE
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import CHAT, MESSAGES, Live

pytestmark = pytest.mark.asyncio

TEXT = "<think>\nHm, a 🙂.\n</think>\n\nYes, sir."


def thinking(text: str = TEXT, template: str = HERMES_TEMPLATE) -> FakeEngine:
    return FakeEngine(say(text), template=template)


async def both_ways(live: Live, **fields: Any) -> tuple[str | None, str | None, str]:
    """(content, reasoning, finish reason) of a chat, which must be the same streamed and whole."""
    whole = await live.chat(**fields)
    ChatCompletion.model_validate(whole, strict=True)
    choice = whole["choices"][0]
    content: str | None = None
    reasoning: str | None = None
    reason = ""
    for chunk in await live.stream(CHAT, **fields):
        ChatCompletionChunk.model_validate(chunk, strict=True)
        (told,) = chunk["choices"]
        assert not reason
        if (text := told["delta"].get("content")) is not None:
            assert reasoning is None or text, "no empty content after reasoning"
            content = (content or "") + text
        if (text := told["delta"].get("reasoning_content")) is not None:
            assert content is None, "reasoning comes before content"
            reasoning = (reasoning or "") + text
        reason = told["finish_reason"] or ""
    message = choice["message"]
    streamed = (content, reasoning, reason)
    assert streamed == (message["content"], message.get("reasoning_content"), choice["finish_reason"])
    return streamed


async def test_reasoning_is_told_apart(serve):
    live = await serve(engine=thinking())
    assert await both_ways(live) == ("Yes, sir.", "Hm, a 🙂.", "stop")
    assert await both_ways(live, separate_reasoning=True) == ("Yes, sir.", "Hm, a 🙂.", "stop")
    assert await both_ways(live, separate_reasoning=False) == (TEXT, None, "stop")


async def test_the_prompt_may_open_the_reasoning(serve):
    live = await serve(engine=thinking("so it is\n</think>\n\nYes."))
    fields: dict[str, Any] = {"chat_template_kwargs": {"opens_thinking": True}}
    assert await both_ways(live, **fields) == ("Yes.", "so it is", "stop")
    assert await both_ways(live, **fields, max_tokens=8) == (None, "so it is", "length")
    assert await both_ways(live, **fields, separate_reasoning=False) == (
        *("so it is\n</think>\n\nYes.", None),
        "stop",
    )


async def test_thinking_can_be_turned_off(serve):
    live = await serve(engine=thinking("Yes."))
    await both_ways(live)
    on = live.engine.made[-1].num_prompt
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert await both_ways(live, **off) == ("Yes.", None, "stop")
        assert live.engine.made[-1].num_prompt == on + len("<think>\n\n</think>\n\n")
    mixed: dict[str, Any] = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    await live.chat(**mixed)
    assert live.engine.made[-1].num_prompt == on
    await live.chat(reasoning_effort="high")
    assert live.engine.made[-1].num_prompt == on


async def test_continuing_a_message_in_the_middle_of_its_reasoning(serve):
    live = await serve(engine=thinking("so.</think>Yes."))

    async def go_on(content: str) -> tuple[str | None, str | None, str]:
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        return await both_ways(live, messages=messages, continue_final_message=True)

    assert await go_on("<think>Hm,") == ("Yes.", "so.", "stop")
    assert await go_on("Well,") == ("so.</think>Yes.", None, "stop")


async def test_an_answer_of_reasoning_alone_may_come_back(serve):
    live = await serve(engine=thinking("<think>so"))
    message = (await live.chat())["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "so")
    await live.chat(messages=[*MESSAGES, message, {"role": "user", "content": "And?"}])
    bad = [{"role": "assistant", "content": "x", "reasoning_content": 5}]
    status, answer = await live.post(CHAT, {"messages": bad})
    assert (status, answer["error"]["param"]) == (400, "messages[0].reasoning_content")


async def test_a_user_who_talks_of_tags_changes_nothing(serve):
    live = await serve(engine=thinking("Yes."))
    messages = [{"role": "user", "content": "What is <think>"}]
    assert await both_ways(live, messages=messages) == ("Yes.", None, "stop")


async def test_cut_off_and_stopped(serve):
    live = await serve(engine=thinking())
    assert await both_ways(live, max_tokens=len("<think>\nHm")) == (None, "Hm", "length")
    assert await both_ways(live, max_tokens=len("<thi")) == ("<thi", None, "length")
    assert await both_ways(live, stop=["m, a"]) == (None, "H", "stop")
    assert await both_ways(live, stop=["</think>"]) == (None, "Hm, a 🙂.\n", "stop")
    assert await both_ways(live, stop=[", s"]) == ("Yes", "Hm, a 🙂.", "stop")


async def test_logprobs_cover_the_whole_text(serve):
    live = await serve(engine=thinking())
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "n": 2}
    whole = await live.chat(**fields)
    chunks = await live.stream(CHAT, **fields)
    for choice in whole["choices"]:
        content = choice["logprobs"]["content"]
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == TEXT
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]] == content
        assert [i for part in parts for i in part.get("token_ids", [])] == choice["token_ids"]


@pytest.mark.parametrize("setting", ["think", "none"])
async def test_the_parser_can_be_named(serve, setting):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    live = await serve(engine=thinking(template=plain), reasoning_parser=setting)
    told = {"think": ("Yes, sir.", "Hm, a 🙂.", "stop"), "none": (TEXT, None, "stop")}
    assert await both_ways(live) == told[setting]


async def test_a_template_without_reasoning_gets_plain_text(serve):
    live = await serve(say(TEXT))
    assert await both_ways(live) == (TEXT, None, "stop")


async def test_openai_client_reads_reasoning(serve):
    live = await serve(engine=thinking())
    fields: dict[str, Any] = {"model": "fake", "messages": MESSAGES}
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as client:
        message = (await client.chat.completions.create(**fields)).choices[0].message
        assert (message.content, message.to_dict()["reasoning_content"]) == ("Yes, sir.", "Hm, a 🙂.")
        reasoning = ""
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            reasoning += chunk.choices[0].delta.to_dict().get("reasoning_content", "")  # pyright: ignore[reportOperatorIssue]
        assert reasoning == "Hm, a 🙂."
        async with client.chat.completions.stream(**fields) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Yes, sir."


async def test_hints_are_accepted(serve):
    live = await serve(say("fine"))
    answer = await live.chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        verbosity="low",
        reasoning_effort="low",
        parallel_tool_calls=True,
    )
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "fine", "refusal": None}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"separate_reasoning": "no"}, "separate_reasoning"),
        ({"metadata": [1]}, "metadata"),
        ({"user": 5}, "user"),
    ],
)
async def test_bad_hints_are_named(serve, fields, param):
    live = await serve(say("fine"))
    status, answer = await live.post(CHAT, {"messages": MESSAGES} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    await live.chat()


async def test_adding_no_generation_prompt(serve):
    live = await serve(say("fine"))
    await live.chat(add_generation_prompt=False)
    request = live.engine.made[-1]
    text = live.engine.tokenizer.decode(request.tokens[: request.num_prompt], skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"
