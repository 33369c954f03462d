"""How programs come to an end: budgets, mistakes, what fails beneath them, and backends that close."""

from __future__ import annotations

import asyncio
import re
import threading
import time

import pytest

from helpers.script_backend import ScriptBackend
from tierax import (
    BudgetError,
    Function,
    ProgramError,
    ProgramState,
    assistant,
    assistant_end,
    function,
    gen,
    system,
    user,
)

HERE = re.escape(__file__)


def test_a_budget_bounds_texts_and_answers(backend: ScriptBackend) -> None:
    backend.script = lambda text: "x" * 10

    @function(max_total_tokens=40)
    def loop(s):
        s += "0123456789"
        while True:
            s += gen("x", max_tokens=12)
            s.sync()

    with pytest.raises(BudgetError, match=rf"^{HERE}:\d+: the program has used its max_total_tokens of 40$"):
        loop.run()
    # 11 with the first; then 21 and 31, where 9 are left of the 12 that it wants: 9 letters, which is not the whole.
    assert [sampling.max_tokens for _, sampling, _ in backend.calls] == [12, 12, 9]
    with pytest.raises(BudgetError, match=rf"^{HERE}:\d+: 11 more tokens do not fit: 0 of .* 5 are used"):
        loop.run(max_total_tokens=5)


def test_branches_wait_for_each_others_reserves(backend: ScriptBackend) -> None:
    """Each wants 100 and needs 2: with room for one at a time they come one by one, and none is cut short."""

    @function
    def wide(s):
        s += "1234"
        branches = s.fork(8)
        branches += gen("x", max_tokens=100)
        branches.join()

    # The text once, and 16 tokens of answers, of which the last must still find 100.
    state = wide.run(max_total_tokens=5 + 14 + 100)
    assert state["x"] == ["ok"] * 8
    assert all(sampling.max_tokens == 100 for _, sampling, _ in backend.calls)
    assert backend.most_running == 1


def test_no_backend() -> None:
    @function
    def any_program(s):
        s += "a"

    with pytest.raises(ProgramError, match=f"^{HERE}:.*set_default_backend"):
        any_program.run()


def test_a_closed_backend() -> None:
    backend = ScriptBackend()
    backend.close()
    backend.close()
    with pytest.raises(ProgramError, match="the backend is closed"):
        function(lambda s: None).run(backend=backend)


def misplaced_text(s: ProgramState) -> None:
    s += user("q")
    s += "loose"


def misplaced_gen(s: ProgramState) -> None:
    s += user("q")
    s += gen("x")


def nested(s: ProgramState) -> None:
    s += user("a" + assistant("b"))


def no_text(s: ProgramState) -> None:
    s += gen("x")


def second_system(s: ProgramState) -> None:
    s += user("a") + system("b")


def not_open(s: ProgramState) -> None:
    s += assistant_end()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (misplaced_text, "a text stands behind the user message and in none"),
        (misplaced_gen, r"gen\('x'\) stands behind the user message"),
        (nested, "messages do not nest"),
        (no_text, "no text yet"),
        (second_system, "a system message cannot be written: a system message must come first"),
        (not_open, "no assistant message is open"),
    ],
)
def test_errors_carry_the_programs_line(backend: ScriptBackend, body, message: str) -> None:
    line = body.__code__.co_firstlineno + (2 if body.__name__.startswith("misplaced") else 1)
    with pytest.raises(ProgramError, match=f"^{HERE}:{line}: .*{message}"):
        Function(body, None, {}).run()


def test_what_a_program_raises_comes_out_of_run(backend: ScriptBackend) -> None:
    @function
    def wrong(s):
        s += "a" + gen("x")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        wrong.run()


def test_a_backend_that_breaks_is_told_with_the_line(backend: ScriptBackend) -> None:
    def script(text: str) -> str:
        raise ZeroDivisionError("oops")

    backend.script = script

    @function
    def broken(s):
        s += "a"
        s += gen("x")
        s += gen("y")
        s["y"]

    with pytest.raises(ProgramError, match=rf"^{HERE}:\d+: ZeroDivisionError: oops"):
        broken.run()
    assert len(backend.calls) == 1


def test_nothing_is_added_to_a_program_that_has_ended(backend: ScriptBackend) -> None:
    state = function(lambda s: None).run()
    with pytest.raises(ProgramError, match=f"^{HERE}:.*has ended"):
        state += "a"


def test_closing_the_backend_ends_what_waits(backend: ScriptBackend) -> None:
    backend.gate = asyncio.Event()

    @function
    def stuck(s):
        s += "a" + gen("x")

    state = stuck.stream()
    while not backend.running:
        time.sleep(0.001)
    backend.close()
    with pytest.raises(ProgramError, match="cancelled"):
        list(state.text_iter())
    assert backend.cancelled == 1


def test_what_is_added_after_the_backend_was_closed_fails(backend: ScriptBackend) -> None:
    closed = threading.Event()

    @function
    def late(s):
        closed.wait()
        s += "a" + gen("x")
        s["x"]

    state = late.stream()
    backend.close()
    closed.set()
    with pytest.raises(ProgramError, match="cancelled"):
        list(state.text_iter())
