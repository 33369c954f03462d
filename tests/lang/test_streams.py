"""Programs that are watched while they run: pieces in order, by name, in threads and event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from helpers.script_backend import ScriptBackend
from tierax import ProgramError, function, gen, select


@pytest.fixture
def backend() -> Iterator[ScriptBackend]:
    with ScriptBackend(lambda text: "abc" if text.endswith("1") else "xyz") as made:
        yield made


@function
def two(s):
    s += "1" + gen("first")
    s += "2" + gen("second") + select("third", ["p", "q"])


def test_pieces_come_in_order_and_by_name(backend: ScriptBackend) -> None:
    state = two.stream(backend=backend)
    assert list(state.text_iter()) == ["1", "a", "b", "c", "2", "x", "y", "z", "p"]
    assert list(state.text_iter()) == ["1", "a", "b", "c", "2", "x", "y", "z", "p"], "as often as one likes"
    assert list(state.text_iter("second")) == ["x", "y", "z"]
    assert list(state.text_iter("third")) == ["p"]
    assert state["second"] == "xyz"
    with pytest.raises(ProgramError, match="no 'fourth' in the program"):
        list(state.text_iter("fourth"))
    assert not [thread for thread in threading.enumerate() if thread.name == "program"]


@pytest.mark.asyncio
async def test_pieces_in_an_event_loop(backend: ScriptBackend) -> None:
    async def read(name: str | None) -> str:
        return "".join([piece async for piece in state.text_async_iter(name)])

    state = two.stream(backend=backend)
    assert await asyncio.gather(read(None), read("first"), read("third")) == ["1abc2xyzp", "abc", "p"]


def test_a_name_ends_before_the_program_does(backend: ScriptBackend) -> None:
    go_on = threading.Event()

    @function
    def waits(s):
        s += "1" + gen("first")
        go_on.wait()
        s += "2" + gen("second")

    with waits.stream(backend=backend) as state:
        assert state["first"] == "abc", "also before the program has come to it"
        assert "".join(state.text_iter("first")) == "abc"
        go_on.set()
        assert "".join(state.text_iter("second")) == "xyz"


def test_errors_come_out_at_the_end(backend: ScriptBackend) -> None:
    @function
    def fails(s):
        s += "1" + gen("first")
        s.sync()
        raise KeyError("mine")

    state = fails.stream(backend=backend)
    pieces = []
    with pytest.raises(ProgramError, match="KeyError: 'mine'"):
        pieces.extend(state.text_iter())
    assert state.error is not None


@pytest.mark.asyncio
async def test_errors_come_out_of_an_event_loops_stream(backend: ScriptBackend) -> None:
    @function
    def fails(s):
        s += gen("first")

    with pytest.raises(ProgramError, match="no text yet"):
        _ = [piece async for piece in fails.stream(backend=backend).text_async_iter()]


def test_leaving_a_stream_ends_the_program(backend: ScriptBackend) -> None:
    backend.gate = asyncio.Event()
    with two.stream(backend=backend) as state:
        assert next(state.text_iter()) == "1"
        while not backend.running:
            time.sleep(0.001)
    assert state.error is not None
    for _ in range(200):
        if backend.cancelled:
            break
        time.sleep(0.005)
    assert backend.cancelled == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "program"]
