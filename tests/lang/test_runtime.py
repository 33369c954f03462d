"""Programs over HTTP, against a real server over the scripted engine, or over the real loop with a fake device."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers.byte_tokenizer import IM_END
from helpers.fake_engine import FakeEngine, babble, say
from helpers.live_server import Live, eventually
from helpers.tiered_engine import TieredEngine
from tierax import ProgramError, Runtime, assistant, function, gen, select, system, user
from tierax.serving.config import ServerConfig

pytestmark = pytest.mark.asyncio

Serve = Callable[..., Awaitable[tuple[Live, Runtime]]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(engine, api_key=…)` starts a server; the second part of what it gives is its `Runtime`."""
    started: list[tuple[Live, Runtime]] = []

    async def start(
        engine: FakeEngine, *, key: str | None = None, limits: dict[str, Any] | None = None, **options: Any
    ) -> tuple[Live, Runtime]:
        runtime_options = {name: options.pop(name) for name in ("timeout", "cache_salt") if name in options}
        live = await Live.start(engine, ServerConfig(api_key=key, **(limits or {})), **options)
        runtime = Runtime(live.url + "/", key, **runtime_options)
        started.append((live, runtime))
        return live, runtime

    yield start
    for live, runtime in started:
        await asyncio.to_thread(runtime.close)
        await live.stop()


async def run(program: Any, *args: Any, **kwargs: Any) -> Any:
    return await asyncio.to_thread(program.run, *args, **kwargs)


@function
def two_turns(s):
    s += system("Be brief.") + user("Hi") + assistant(gen("a", max_tokens=9))
    s += user("So?") + assistant("I say " + gen("b", max_tokens=9, temperature=0.5, stop="lo"))


async def test_the_model_reads_what_a_chat_would(serve: Serve) -> None:
    live, runtime = await serve(FakeEngine(say("hello")))
    state = await run(two_turns, backend=runtime)
    assert (state["a"], state["b"]) == ("hello", "hel")
    decode = live.engine.tokenizer.decode
    prompts = [decode(list(r.tokens[: r.num_prompt]), skip_special_tokens=False) for r in live.engine.made]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "So?"},
    ]
    template = live.engine.chat_template
    assert template is not None
    assert prompts[0] == template.render(messages[:2])
    assert prompts[1] == template.render(messages) + "I say "
    assert live.engine.made[1].params.temperature == 0.5
    meta = state.get_meta_info("a")
    assert (meta.finish_reason, meta.prompt_tokens, meta.completion_tokens) == (
        "stop",
        len(live.engine.made[0].tokens) - 6,
        6,
    )
    assert meta.token_ids == [*b"hello"]
    assert meta.ttft > 0


async def test_tokens_that_were_generated_are_sent_back_as_they_were(serve: Serve) -> None:
    """`<|im_end|>` written out is one token, and six bytes would be others."""
    live, runtime = await serve(FakeEngine(lambda request, index: [*b"a", 300 % 256, *b"b", IM_END]))
    state = await run(two_turns, backend=runtime)
    sent = list(live.engine.made[1].tokens)
    answered = state.get_meta_info("a").token_ids
    assert answered == [*b"a", 44, *b"b"]
    before = live.engine.made[0].num_prompt
    assert sent[before : before + 4] == [*answered, IM_END]


async def test_sampling_reaches_the_engine(serve: Serve) -> None:
    live, runtime = await serve(FakeEngine(babble))

    @function
    def one(s):
        s += "a" + gen(
            "x",
            max_tokens=3,
            min_tokens=2,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            seed=7,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            repetition_penalty=1.5,
            stop=["q1", "q2"],
            stop_token_ids=[3],
            ignore_eos=True,
            logprobs=2,
        )

    state = await run(one, backend=runtime)
    params = live.engine.made[0].params
    assert (params.max_tokens, params.min_tokens, params.top_k, params.top_p, params.min_p) == (
        3,
        2,
        5,
        0.5,
        0.1,
    )
    assert (params.seed, params.ignore_eos, params.stop, params.stop_token_ids) == (
        7,
        True,
        ["q1", "q2"],
        [3],
    )
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, 0.25, 1.5)
    meta = state.get_meta_info("x")
    assert meta.logprobs == [-0.25] * 3
    assert meta.finish_reason == "length"


async def test_the_begin_of_text_token_comes_once(serve: Serve) -> None:
    live, runtime = await serve(FakeEngine(say("ok"), add_bos=True))

    @function
    def plain(s):
        s += "a" + gen("x") + "b" + gen("y")

    await run(plain, backend=runtime)
    assert list(live.engine.made[1].tokens)[:5] == [256, *b"aokb"]


@pytest.mark.parametrize("cached", [True, False])
async def test_eight_branches_compute_their_prefix_once_with_the_cache_alone(
    serve: Serve, cached: bool
) -> None:
    engine = TieredEngine(pages=4000, seqs=8, budget=256, enabled=cached)
    engine.context_length = 4096
    live, runtime = await serve(engine)
    prefix = "word " * 300

    @function
    def tips(s):
        s += prefix
        branches = s.fork(8)
        branches += lambda n: f"tip {n}"
        branches += gen("tip", max_tokens=2, ignore_eos=True)
        branches.join()

    usage = (await run(tips, backend=runtime)).usage()
    assert usage.prompt_tokens == 8 * 1505
    # Each branch's second token has a step of its own.
    assert live.engine.stats.computed_tokens == usage.computed_tokens + 8
    if cached:
        assert usage.computed_tokens <= 1500 + 8 * (5 + 4)
    else:
        assert usage.computed_tokens == usage.prompt_tokens


async def test_choices_share_what_is_before_them(serve: Serve) -> None:
    live, runtime = await serve(TieredEngine(pages=2000, seqs=8, budget=64))
    text = "word " * 40

    @function
    def pick(s):
        s += text + select("c", [f"choice {n}" for n in range(8)])

    state = await run(pick, backend=runtime)
    meta = state.get_meta_info("c")
    assert len(meta.scores) == 8
    assert state["c"] == meta.best
    assert live.engine.stats.computed_tokens <= 200 + 8 * (8 + 4)


async def test_an_unknown_server_and_a_wrong_key(serve: Serve) -> None:
    live, runtime = await serve(FakeEngine(), key="right")
    await run(two_turns, backend=runtime)
    wrong = Runtime(live.url, "wrong")
    nowhere = Runtime("http://127.0.0.1:9")
    try:
        with pytest.raises(
            ProgramError, match=r"test_runtime.py:\d+: a system message cannot be written: .*key"
        ):
            await run(two_turns, backend=wrong)
        with pytest.raises(ProgramError, match=r"127.0.0.1:9 cannot be reached"):
            await run(two_turns, backend=nowhere)
    finally:
        await asyncio.to_thread(wrong.close)
        await asyncio.to_thread(nowhere.close)
    with pytest.raises(ValueError, match="a URL begins with http"):
        Runtime("localhost:30000")
    other = Runtime(live.url + "/dashboard", "right")
    with pytest.raises(ProgramError, match=r"/dashboard has no /tokenize: is it a tierax server\?"):
        await run(two_turns, backend=other)
    await asyncio.to_thread(other.close)


async def test_the_servers_reasons_are_told(serve: Serve) -> None:
    _, runtime = await serve(FakeEngine(template=False))
    with pytest.raises(ProgramError, match=r"message cannot be written: .*template"):
        await run(two_turns, backend=runtime)

    @function
    def hot(s):
        s += "a"
        s += gen("x", top_p=7)

    with pytest.raises(ProgramError, match=r"gen\('x'\): top_p must be"):
        await run(hot, backend=runtime)


async def test_a_fault_in_mid_answer(serve: Serve) -> None:
    live, runtime = await serve(FakeEngine(), step_seconds=0.01)

    @function
    def one(s):
        s += "a" + gen("x", max_tokens=500)

    waiting = asyncio.create_task(run(one, backend=runtime))
    await eventually(lambda: live.engine.stats.running > 0)
    live.thread.fault = "the device is gone"
    with pytest.raises(ProgramError, match=r"gen\('x'\): "):
        await waiting


async def test_a_silent_server_is_given_up(serve: Serve) -> None:
    live, runtime = await serve(FakeEngine(), timeout=0.2)
    live.thread.hold()

    @function
    def one(s):
        s += "a" + gen("x")

    with pytest.raises(ProgramError, match=r"has not answered within 0.2 s"):
        await run(one, backend=runtime)
    live.thread.resume()


async def test_a_full_server_is_asked_again(serve: Serve) -> None:
    live, runtime = await serve(
        FakeEngine(say("okay")), step_seconds=0.1, max_running=1, limits={"max_queued_requests": 0}
    )

    @function
    def one(s, n):
        s += str(n) + gen("x")

    states = await asyncio.to_thread(one.run_batch, [{"n": n} for n in range(2)], backend=runtime)
    assert [state.error for state in states] == [None] * 2
    assert len(live.engine.made) == 2
    refused = [value for name, value in (await live.metrics()).items() if 'status="503"' in name]
    assert sum(refused) >= 1


async def test_what_is_left_is_aborted_on_the_server(serve: Serve) -> None:
    live, runtime = await serve(FakeEngine(), step_seconds=0.005)

    @function
    def endless(s):
        s += "a" + gen("x", max_tokens=4000)

    state = endless.stream(backend=runtime)
    async for _ in state.text_async_iter("x"):
        break
    await asyncio.to_thread(state.close)
    await eventually(lambda: live.engine.stats.finished.get("abort", 0) == 1)


async def test_salts_go_along(serve: Serve) -> None:
    live, runtime = await serve(FakeEngine(say("ok")), cache_salt="mine")

    @function
    def both(s):
        s += "a" + gen("x") + select("y", ["p", "q"])

    await run(both, backend=runtime)
    assert len({request.namespace for request in live.engine.made}) == 1
    assert live.engine.made[0].namespace != b""


async def test_a_script_need_not_close_anything(serve: Serve) -> None:
    live, _ = await serve(FakeEngine(say("ok")))
    code = (
        "import sys; from tierax import *; backend = Runtime(sys.argv[1]);\n"
        "with assistant():\n    user('Hi')\n    gen(name='x')\n"
        "print(backend.run()['x'])"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", code, live.url),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, out.decode().strip(), err.decode()) == (0, "ok", "")
