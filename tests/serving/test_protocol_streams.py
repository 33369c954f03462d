"""Whatever a model writes, a stream says the same as a whole answer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helpers.byte_tokenizer import BOS, EOS, IM_START
from helpers.chat_templates import HERMES_TEMPLATE
from helpers.fake_engine import FakeEngine
from helpers.live_server import CHAT, COMPLETIONS, MESSAGES
from helpers.streams import TOOL, comparable, put_together

pytestmark = pytest.mark.asyncio


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "</", "<th", "ink>", "<"),
    *(
        '{"name": "f", "arguments": {"a": "é\\ud83d"}}',
        '{"name": "f", "arguments": {"a": [1, "🙂"]}}',
        '{"name": 5}',
    ),
    *(" ", "\n", "abc", "🙂", "é", "{", "}", '"', "\\", "\x00", "\ufffd", "\u2028"),
]
STOPS = ["🙂", "é", "abc", "</think>", "ca", "<", "\n", "}", 'a": ', "\ufffd", "nk>"]


def any_answer(chance: random.Random) -> list[int]:
    """Tokens of tags, calls and texts, whole and cut, with broken characters and special tokens between."""
    tokens: list[int] = []
    for _ in range(chance.randint(0, 9)):
        kind = chance.random()
        if kind < 0.75:
            tokens += chance.choice(PIECES).encode()
        else:
            tokens.append(chance.choice([0xF0, 0x9F, 0xE2, 0x80, 0xFF, 0xC3, 0x28, BOS, IM_START]))
    return [*tokens, EOS]


def any_fields(chance: random.Random) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "stop": chance.sample(STOPS, 2),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "max_tokens": chance.randint(1, 20),
        "return_token_ids": True,
        "logprobs": True,
    }
    return {name: value for name, value in choices.items() if chance.random() < 0.4}


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_a_model_writes_a_stream_says_the_same(serve, seed):
    chance = random.Random(seed)
    written: list[int] = []
    engine = FakeEngine(lambda *_: list(written), template=HERMES_TEMPLATE, context_length=1000)
    live = await serve(engine=engine)
    for _ in range(8):
        written = any_answer(chance)
        fields = any_fields(chance)
        if "logprobs" in fields:
            by_path: dict[str, dict[str, Any]] = {CHAT: {"top_logprobs": 1}, COMPLETIONS: {"logprobs": 1}}
        else:
            by_path = {CHAT: {}, COMPLETIONS: {}}
        by_path[CHAT] |= {"messages": MESSAGES} | ({"tools": [TOOL]} if chance.random() < 0.6 else {})
        by_path[COMPLETIONS] |= {"prompt": "hé"}
        for path, own in by_path.items():
            status, answer = await live.post(path, fields | own)
            assert status == 200, (answer, written)
            streamed = put_together(await live.stream(path, **(fields | own)))
            whole = {choice["index"]: comparable(choice) for choice in answer["choices"]}
            if path == CHAT:
                whole[0]["prompt_token_ids"] = streamed[0]["prompt_token_ids"]
            assert streamed == whole, (written, fields)
