"""Programs that calls write down: what belongs to what, and whose they are."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest

from helpers.script_backend import ScriptBackend
from tierax import ProgramError, assistant, function, gen, select, set_default_backend, system, user

HERE = re.escape(__file__)


@pytest.fixture
def backend() -> Iterator[ScriptBackend]:
    answers = iter("abcdefgh")
    with ScriptBackend(lambda text: next(answers)) as made:
        yield made


def prompts(backend: ScriptBackend) -> list[str]:
    return [prompt for prompt, _, _ in backend.calls]


def test_a_dialogue_within_one_block(backend: ScriptBackend) -> None:
    with assistant():
        for question in ("one?", "two?"):
            user(question)
            gen(name="answer", max_tokens=5)
        user("three?")
        gen(name="response", regex="c+", max_tokens=6)
    result = backend.run()
    assert dict(result) == {"answer": "b", "response": "c"}
    assert result.all("answer") == ["a", "b"]
    assert len(result) == 2
    assert (
        prompts(backend)[1] == "<user>one?</user>\n<assistant>a</assistant>\n<user>two?</user>\n<assistant>"
    )
    assert [message["role"] for message in result.messages] == ["user", "assistant"] * 3
    assert result.text.endswith("<user>three?</user>\n<assistant>c")
    (_, _, none), _, (_, sampling, shape) = backend.calls
    assert none is None
    assert shape is not None
    assert (sampling.max_tokens, shape.value) == (6, "c+")
    assert result.usage.completion_tokens == 3
    assert [meta.prompt_tokens for meta in result.metas] == [len(p) for p in prompts(backend)]
    assert repr(result) == "Result({'answer': 'b', 'response': 'c'})"


def test_what_is_part_of_something_else_is_recorded_once(backend: ScriptBackend) -> None:
    with user():
        both = "x " + gen("a") + " y"
        assert both is not None
        assistant("I " + gen("b") + select("c", ["p", "q"]))
        gen("d") + gen("e")
    result = backend.run(temperature=0)
    assert list(result) == ["a", "b", "c", "d", "e"]
    assert result.messages == [
        {"role": "user", "content": "x a y"},
        {"role": "assistant", "content": "I bp"},
        {"role": "user", "content": "cd"},
    ]
    assert all(sampling.temperature == 0 for _, sampling, _ in backend.calls)


def test_several_blocks_are_one_program(backend: ScriptBackend) -> None:
    with system():
        system("Brief.")
    with user():
        user("Hi")
    with assistant():
        gen("a")
        gen("b")
    assert backend.run().messages == [
        {"role": "system", "content": "Brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "ab"},
    ]


def test_a_run_takes_what_came_since_the_last_one(backend: ScriptBackend) -> None:
    for expected in ("a", "b"):
        with assistant():
            user("q")
            gen("x")
        assert dict(backend.run()) == {"x": expected}
    with pytest.raises(ProgramError, match=rf"^{HERE}:\d+: there is nothing to run.*`with assistant\(\):`"):
        backend.run()


def test_outside_a_block_nothing_is_recorded(backend: ScriptBackend) -> None:
    user("q")
    assistant(gen("x"))
    with pytest.raises(ProgramError, match="nothing to run"):
        backend.run()


def test_threads_record_for_themselves(backend: ScriptBackend) -> None:
    found = {}

    def work(name: str) -> None:
        with assistant():
            user(name)
            barrier.wait()
            gen(name)
        found[name] = backend.run()

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: list(result) for name, result in found.items()} == {name: [name] for name in "xyz"}


def test_a_program_is_the_default_backends(backend: ScriptBackend) -> None:
    with ScriptBackend() as other:
        set_default_backend(backend)
        try:
            with assistant():
                user("q")
                gen("x")
            with pytest.raises(ProgramError, match=f"^{HERE}:.*not the default one"):
                other.run()
            assert backend.run()["x"] == "a", "and it is still there"
        finally:
            set_default_backend(None)
    with pytest.raises(TypeError, match=r"a backend is a Runtime\(url\) or an Engine\(model\), not str"):
        set_default_backend("http://localhost")  # pyright: ignore[reportArgumentType]


def test_half_a_block_is_forgotten(backend: ScriptBackend) -> None:
    with pytest.raises(ZeroDivisionError), assistant():
        gen(str(user("q")) + str(1 // 0))
    with pytest.raises(ProgramError, match="nothing to run"):
        backend.run()


def test_a_failed_run_leaves_nothing_behind(backend: ScriptBackend) -> None:
    with assistant():
        gen("x")
    with pytest.raises(ProgramError, match=f"^{HERE}:.*tokens do not fit"):
        backend.run(max_total_tokens=1)
    with pytest.raises(ProgramError, match="nothing to run"):
        backend.run()


def test_blocks_do_not_nest_and_run_comes_after_them(backend: ScriptBackend) -> None:
    with assistant():
        with pytest.raises(ProgramError, match=f"^{HERE}:.*stands inside `with assistant"), user():
            pass
        user("q")
        with pytest.raises(ProgramError, match=f"^{HERE}:.*run it after the block"):
            backend.run()
        gen("x")
    assert backend.run()["x"] == "a"


def test_functions_do_not_record(backend: ScriptBackend) -> None:
    @function
    def inner(s):
        s += user("in") + assistant(gen("in"))

    @function
    def confused(s):
        with assistant():
            gen("x")

    with assistant():
        user("out")
        inner.run(backend=backend)
        gen("out")
    assert list(backend.run()) == ["out"]
    with pytest.raises(ProgramError, match=rf"^{HERE}:.*`with s.assistant\(\):`"):
        confused.run(backend=backend)
