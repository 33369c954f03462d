"""A program run many times over: order, errors, the common prefix, and how many run at once."""

from __future__ import annotations

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.script_backend import ScriptBackend
from tierax import (
    function,
    gen,
)

HERE = re.escape(__file__)


def test_a_batch_keeps_its_order_and_its_errors(backend: ScriptBackend) -> None:
    backend.script = lambda text: "boo" if "bad" in text else text[-3:-1]

    @function
    def ask(s, what, end="?"):
        s += what + end + gen("a")
        if s["a"] == "boo":
            raise ValueError("as asked")

    states = ask.run_batch([{"what": f"q{n}"} for n in range(5)] + [{"what": "bad"}, ("q9", "!")])
    assert [state["a"] for state in states[:5]] == [f"q{n}" for n in range(5)]
    assert states[6]["a"] == "q9"
    assert [state.error is None for state in states] == [True] * 5 + [False, True]
    assert re.match(rf"{HERE}:\d+: ValueError: as asked", str(states[5].error))
    assert ask.run_batch([]) == []
    with pytest.raises(TypeError, match="a list of keyword arguments"):
        ask.run_batch({"what": "q"})  # pyright: ignore[reportArgumentType]


def test_the_first_of_a_batch_computes_the_common_prefix(backend: ScriptBackend) -> None:
    @function
    def ask(s, n):
        s += "A long common prefix. " + str(n) + gen("a")

    backend.gate = asyncio.Event()
    backend.together = lambda prompt: 1 if prompt.endswith("1") else 2
    with ThreadPoolExecutor() as pool:
        batch = pool.submit(ask.run_batch, [{"n": n} for n in range(1, 6)])
        while not backend.running:
            time.sleep(0.001)
        time.sleep(0.05)
        assert len(backend.calls) == 1, "the others wait for its first token"
        backend.loop.call(backend.gate.set)
        states = batch.result()
    cached = [state.get_meta_info("a").cached_tokens for state in states]
    assert cached[0] == 0
    assert all(tokens >= 23 for tokens in cached[1:])
    assert backend.most_running > 1, "the others run at the same time"


def test_threads_bound_what_runs(backend: ScriptBackend) -> None:
    @function
    def ask(s, n):
        s += str(n) + gen("a")
        s["a"]

    ask.run_batch([{"n": n} for n in range(10)], num_threads=2)
    assert backend.most_running <= 2


def test_bind_gives_arguments(backend: ScriptBackend) -> None:
    @function
    def ask(s, what, end):
        s += what + end + gen("a")

    bound = ask.bind(end="!")
    assert bound.run("a").text() == "a!ok"
    assert bound.run_batch([{"what": "b"}])[0].text() == "b!ok"
    with pytest.raises(TypeError, match="ask has no parameter 'wha'"):
        ask.bind(wha="x")
    with pytest.raises(TypeError, match="unknown sampling parameter 'wha'"):
        bound.run(wha="x")
