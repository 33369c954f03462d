"""Responses that are continued, fetched, cancelled and deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from helpers.byte_tokenizer import IM_END
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import eventually
from helpers.named_events import stream_events
from helpers.responses_client import CALL, CLOCK, EVENT, RESPONSES, hermes, prompt_text, refusal, respond

pytestmark = pytest.mark.asyncio


async def test_a_continued_response_keeps_its_tokens(serve):
    """Broken bytes come back as they were: as text they would be other tokens."""
    live = await serve(lambda request, index: [0xFF, *b"a", 0x80, IM_END])
    first = await respond(live, "Hi", instructions="Be")
    second = await respond(live, "More", instructions="Be", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    before, after = (request.tokens.tolist() for request in live.engine.made)
    assert first["output"][0]["content"][0]["text"] == "\ufffda\ufffd"
    assert after[: len(before)] == before
    rest = live.engine.tokenizer.encode(
        "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n", add_bos=False
    )
    assert after[len(before) : -4] == rest
    third = await respond(live, "?", instructions="Be", previous_response_id=second["id"])
    assert live.engine.made[2].tokens.tolist()[: len(after)] == after
    assert third["status"] == "completed"


@pytest.mark.parametrize(("fields", "output"), [({"max_output_tokens": 2}, b"ab"), ({"stop": "c"}, b"abc")])
async def test_an_answer_without_end_token_gets_the_template_s(serve, fields, output):
    live = await serve(say("abcd"))
    first = await respond(live, **fields)
    await respond(live, "More", previous_response_id=first["id"])
    before, after = (request.tokens.tolist() for request in live.engine.made)
    assert before[live.engine.made[0].num_prompt :] == list(output)
    assert after[: len(before) + 1] == [*before, IM_END]


async def test_other_instructions_are_not_carried_over(serve):
    live = await serve(say("ok"))
    first = await respond(live, "Hi", instructions="Be")
    await respond(live, "More", previous_response_id=first["id"])
    assert prompt_text(live.engine) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_tool_results_continue_a_response(serve):
    def script(request, index):
        return [*(CALL if request.num_prompt < 400 else "Noon").encode(), IM_END]

    live = await serve(engine=hermes(script))
    first = await respond(live, "x" * 100, tools=[CLOCK])
    call = first["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00 " * 20}
    second = await respond(live, [result], tools=[CLOCK], previous_response_id=first["id"])
    assert second["output"][0]["content"][0]["text"] == "Noon"
    assert CALL + "<|im_end|>\n<|im_start|>tool\n12:00 " in prompt_text(live.engine)


async def test_stored_responses_can_be_fetched_and_deleted(serve):
    live = await serve(say("ok"))
    answer = await respond(live)
    path = f"{RESPONSES}/{answer['id']}"
    assert await live.get(path) == (200, answer)
    assert (await live.get(path, params={"stream": "true"}))[0] == 400
    events = await stream_events(live, RESPONSES, {"input": "Hi"})
    streamed = events[-1]["response"]
    assert await live.get(f"{RESPONSES}/{streamed['id']}") == (200, streamed)
    deleted = {"id": answer["id"], "object": "response.deleted", "deleted": True}
    assert await live.request("DELETE", path) == (200, deleted)
    for method, tail in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        status, gone = await live.request(method, path + tail)
        assert (status, gone["error"]["code"]) == (404, "response_not_found")
    error = await refusal(live, 404, previous_response_id=answer["id"])
    assert (error["param"], error["code"]) == ("previous_response_id", "response_not_found")


async def test_store_false_leaves_nothing(serve):
    live = await serve(say("ok"))
    answer = await respond(live, store=False)
    assert answer["store"] is False
    assert (await live.get(f"{RESPONSES}/{answer['id']}"))[0] == 404


async def test_tenants_do_not_see_each_other(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("red-key red\nblue-key blue\nred-too red\n")
    live = await serve(say("ok"), api_key_file=str(keys))

    def by(key: str) -> dict[str, Any]:
        return {"headers": {"Authorization": f"Bearer {key}"}}

    status, answer = await live.post(RESPONSES, {"input": "Hi"}, **by("red-key"))
    assert status == 200
    path = f"{RESPONSES}/{answer['id']}"
    continuing = {"input": "x", "previous_response_id": answer["id"]}
    assert (await live.get(path, **by("red-too")))[0] == 200
    assert (await live.get(path, **by("blue-key")))[0] == 404
    assert (await live.get(path + "/input_items", **by("blue-key")))[0] == 404
    assert (await live.request("DELETE", path, **by("blue-key")))[0] == 404
    assert (await live.post(RESPONSES, continuing, **by("blue-key")))[0] == 404
    assert (await live.post(RESPONSES, continuing, **by("red-too")))[0] == 200


async def test_a_salt_stays_with_its_conversation(serve):
    live = await serve(say("ok"))
    first = await respond(live, cache_salt="s")
    await respond(live, "More", previous_response_id=first["id"])
    await respond(live, "More", previous_response_id=first["id"], cache_salt="t")
    namespaces = [request.namespace for request in live.engine.made]
    assert namespaces[0] == namespaces[1] != namespaces[2]
    assert b"s" in namespaces[0]


async def test_truncation_leaves_out_the_oldest_turns(serve):
    live = await serve(engine=FakeEngine(say("ok"), context_length=300))
    turns = [{"role": role, "content": str(i) * 40} for i in range(5) for role in ("user", "assistant")]
    items = [*turns, {"role": "user", "content": "last"}]
    assert (await refusal(live, 400, input=items))["code"] == "context_length_exceeded"
    await respond(live, items, truncation="auto", instructions="Be")
    text = prompt_text(live.engine)
    assert text.startswith("<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\n")
    assert (str(2) * 40 in text, str(3) * 40 in text, "last" in text) == (False, True, True)
    assert len(text.encode()) > 150
    whole = await respond(live, items[-3:], truncation="auto")
    assert str(4) * 40 in prompt_text(live.engine)
    await respond(
        live, [{"role": "user", "content": "x" * 20}], truncation="auto", previous_response_id=whole["id"]
    )
    assert (
        live.engine.made[-1].tokens.tolist()[: live.engine.made[-2].num_prompt]
        == (live.engine.made[-2].tokens.tolist()[: live.engine.made[-2].num_prompt])
    )
    error = await refusal(live, 400, input="x" * 400, truncation="auto")
    assert error["code"] == "context_length_exceeded"


async def test_a_running_response_can_be_seen_and_cancelled(serve):
    live = await serve(babble, step_seconds=0.005)
    response = await live.session.post(live.url + RESPONSES, json={"input": "Hi", "stream": True})
    await response.content.readline()
    created = json.loads((await response.content.readline())[6:])["response"]
    path = f"{RESPONSES}/{created['id']}"
    status, seen = await live.get(path)
    assert (status, seen["status"]) == (200, "in_progress")
    status, cancelled = await live.post(path + "/cancel", {})
    assert (status, cancelled["status"]) == (200, "cancelled")
    Response.model_validate(cancelled, strict=True)
    rest = (await response.text()).strip().split("\n\n")
    last = json.loads(rest[-1].partition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    EVENT.validate_python(last, strict=True)
    await eventually(lambda: not live.thread.running and not live.thread.waiting)
    assert await live.get(path) == (200, last["response"])
    assert (await live.post(path + "/cancel", {}))[0] == 400


async def test_a_key_can_cancel_all_that_it_may_have(serve, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"key": "one", "max_concurrency": 1}]))
    live = await serve(babble, step_seconds=0.005, api_key_file=str(keys))
    live.session.headers["Authorization"] = "Bearer one"
    response = await live.session.post(live.url + RESPONSES, json={"input": "Hi", "stream": True})
    await response.content.readline()
    created = json.loads((await response.content.readline())[6:])["response"]
    assert (await live.post(RESPONSES, {"input": "Hi"}))[0] == 429
    assert (await live.post(f"{RESPONSES}/{created['id']}/cancel", {}))[0] == 200
    await response.text()
    await respond(live, max_output_tokens=2)


async def test_an_ended_response_cannot_be_cancelled(serve):
    live = await serve(say("ok"))
    answer = await respond(live)
    status, error = await live.post(f"{RESPONSES}/{answer['id']}/cancel", {})
    assert (status, error["error"]["code"]) == (400, "response_ended")
