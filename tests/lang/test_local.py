"""Programs on a real (tiny) model in this process: what is computed, what is shared, exact scores, clean ends."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_text_model import write_tiny_text_model
from tierax import Engine, ProgramError, assistant, function, gen, gen_int, select, user

PREFIX = "The tenant pays on the third day. " * 45
"""Over 1,500 bytes, each of which is a token here."""
OPTIONS: dict[str, Any] = {
    "skip_warmup": True,
    "host_cache_size": 0,
    "device_cache_size": "64MiB",
    # Few shapes, since each is compiled when it is first met.
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_text_model(directory)
    return directory


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, **OPTIONS) as made:
        yield made
    assert "engine" not in {thread.name for thread in threading.enumerate()}


@function
def eight(s, prefix):
    s += prefix
    branches = s.fork(8)
    branches += lambda n: f" Tip {n}:"
    branches += gen("tip", max_tokens=2, temperature=0, ignore_eos=True)
    branches.join()


def test_eight_branches_prefill_their_prefix_once(engine: Engine) -> None:
    assert len(PREFIX) > 1500
    usage = eight.run(PREFIX, backend=engine).usage()
    assert usage.prompt_tokens == 8 * (len(PREFIX) + 7)
    # The prefix once, and of each branch what is behind the last whole page of 16 that all have.
    assert usage.computed_tokens <= len(PREFIX) + 8 * (7 + 16)


@pytest.mark.slow
def test_without_the_cache_they_prefill_it_eight_times_and_say_the_same(engine: Engine, model: Path) -> None:
    with Engine(model, disable_radix_cache=True, **OPTIONS) as uncached:
        alone = eight.run(PREFIX, backend=uncached)
    assert alone.usage().computed_tokens == alone.usage().prompt_tokens
    assert alone["tip"] == eight.run(PREFIX, backend=engine)["tip"]


def test_a_conversation_computes_each_turn_once(engine: Engine) -> None:
    @function
    def chat(s):
        for n in range(4):
            s += user(f"Question {n}, " + "word " * 20) + assistant(
                gen("a", max_tokens=20, temperature=0, ignore_eos=True)
            )

    state = chat.run(backend=engine)
    assert len(state.get_all("a")) == 4
    text_tokens = len(state.token_ids())
    assert state.usage().computed_tokens <= text_tokens + 4 * 16
    metas = state.metas
    # All but the last of what was there before, up to a whole page.
    for before, after in pairwise(metas):
        assert after.cached_tokens >= (before.prompt_tokens + 20 - 1) // 16 * 16


def test_scores_are_the_models_own(engine: Engine) -> None:
    choices = ["yes", "not at all", "no"]

    @function
    def pick(s):
        s += PREFIX[:200] + "So: " + select("answer", choices)

    state = pick.run(backend=engine)
    meta = state.get_meta_info("answer")
    prompts = [[*(PREFIX[:200] + "So: " + choice).encode()] for choice in choices]
    # From the first token on, so that nothing comes out of the cache.
    whole = engine.loop.submit(engine.score(prompts, 1)).result()
    assert whole.cached_tokens == 0
    for choice, logprobs in zip(choices, whole.logprobs, strict=True):
        tail = logprobs[-len(choice) :]
        assert meta.scores[choice] == pytest.approx(sum(tail) / len(tail), abs=1e-4)
    assert state["answer"] == max(meta.scores, key=lambda text: meta.scores[text])
    # 203 of 204 positions before the first scored token's may be shared: 192 are whole pages.
    again = pick.run(backend=engine)
    assert again.usage().cached_tokens == 3 * (203 // 16 * 16)


def test_seeds_stops_and_logprobs(engine: Engine) -> None:
    @function
    def three(s):
        s += "Go: " + gen("a", max_tokens=12, seed=3, logprobs=0)
        s += " / " + gen("b", max_tokens=40, temperature=0, stop=s["a"][-2:] or "x")

    first, second = three.run(backend=engine), three.run(backend=engine)
    assert first["a"] == second["a"]
    meta = first.get_meta_info("a")
    assert meta.logprobs is not None
    assert len(meta.logprobs) == len(meta.token_ids)
    assert all(value <= 0 and not math.isnan(value) for value in meta.logprobs)
    assert meta.ttft is not None
    assert first.text() == "Go: " + first["a"] + " / " + first["b"]


def test_answers_are_held_to_their_shape(engine: Engine) -> None:
    @function
    def shaped(s):
        s += "n = " + gen_int("n", temperature=3.0, seed=1) + ", flag = " + gen("flag", dtype=bool)
        s += " say " + gen("word", regex="(ja|nein)!", max_tokens=9)
        s += gen("object", json_schema={"enum": [{"a": 1}]}, temperature=0)
        s += gen("cut", regex="a{20}", max_tokens=5)

    state = shaped.run(backend=engine)
    assert re.fullmatch(r"-?(0|[1-9]\d*)", state["n"])
    assert state["flag"] in ("True", "False")
    assert state["word"] in ("ja!", "nein!")
    assert json.loads(state["object"]) == {"a": 1}
    assert (state["cut"], state.get_meta_info("cut").finish_reason) == ("aaaaa", "length")
    assert state.text().endswith("aaaaa")

    @function
    def bad(s):
        s += "a" + gen("x", regex="(")

    with pytest.raises(ProgramError, match=r"test_local.py:\d+: gen\('x'\): "):
        bad.run(backend=engine)


def test_refusals_carry_the_line(engine: Engine) -> None:
    @function
    def hot(s):
        s += "a" + gen("x", temperature=1000)

    with pytest.raises(ProgramError, match=r"test_local.py:\d+: gen\('x'\): temperature must be .* 100"):
        hot.run(backend=engine)

    @function
    def long(s):
        s += "a" * 20_000 + gen("x")

    with pytest.raises(
        ProgramError, match=r"gen\('x'\): prompt has 20001 tokens|gen\('x'\): prompt has 20000"
    ):
        long.run(backend=engine)


def test_streams(engine: Engine) -> None:
    @function
    def one(s):
        s += "a" + gen("x", max_tokens=10, temperature=0, ignore_eos=True)

    with one.stream(backend=engine) as state:
        pieces = list(state.text_iter("x"))
    assert "".join(pieces) == state["x"]
    assert len(pieces) > 1


@pytest.mark.slow
def test_a_program_need_not_close_anything(model: Path) -> None:
    """At the end of the process too, threads are joined and nothing is said."""
    code = (
        "import sys; from tierax import *; backend = Engine(sys.argv[1], skip_warmup=True, device_cache_size='16MiB', max_num_seqs=1, max_num_batched_tokens=16);"
        "f = function(lambda s: s.__iadd__('a' + gen('x', max_tokens=2)));"
        "print(len(f.run(backend=backend).token_ids()) > 1)"
    )
    source = str(Path(__file__).parents[2] / "src")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(model)],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "True"), ended.stderr
    assert "Error" not in ended.stderr
    assert "Unclosed" not in ended.stderr
