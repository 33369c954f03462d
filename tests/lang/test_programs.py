"""Programs as functions: what the model reads, what is kept by name, and branches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

import pytest

from helpers.script_backend import ScriptBackend
from tierax import (
    ProgramError,
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    gen_int,
    gen_string,
    select,
    system,
    user,
    user_begin,
    user_end,
)

HERE = re.escape(__file__)


def prompts(backend: ScriptBackend) -> list[str]:
    return [prompt for prompt, _, _ in backend.calls]


# --- what the model reads


def test_text_goes_on_from_answers(backend: ScriptBackend) -> None:
    @function
    def story(s, hero):
        s += "Once " + gen("verb") + f" {hero}" + " and"
        s += gen("rest", max_tokens=1)

    state = story.run("a cat")
    assert prompts(backend) == ["\x01Once ", "\x01Once ok a cat and"]
    assert (state["verb"], state["rest"]) == ("ok", "o")
    assert state.text() == "Once ok a cat ando"
    assert state.token_ids() == [1, *b"Once ok a cat ando"]
    assert state.get_meta_info("rest").finish_reason == "length"


def test_messages_are_what_the_template_makes_of_them(backend: ScriptBackend) -> None:
    @function
    def chat(s):
        s += system("Brief.") + user("Hi") + assistant(gen("a"))
        s += user("So?")
        s += assistant("I say " + gen("b") + "!")

    state = chat.run()
    first = "<system>Brief.</system>\n<user>Hi</user>\n<assistant>"
    second = first + "ok</assistant>\n<user>So?</user>\n<assistant>I say "
    assert prompts(backend) == [first, second]
    assert state.text() == second + "ok!"
    assert state.messages() == [
        {"role": "system", "content": "Brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "I say ok!"},
    ]
    renders = backend.renders
    chat.run()
    assert backend.renders == renders, "what stands around messages is asked for once"


def test_an_assistants_message_begins_as_the_model_begins_its_own() -> None:
    class Thinks(ScriptBackend):
        async def render(self, messages: Sequence[Mapping[str, str]], *, answer: bool) -> str:
            return await super().render(messages, answer=answer) + "(thinks) " * answer

    @function
    def chat(s):
        s += user("Hi") + assistant("I say " + gen("a")) + user("So?")

    with Thinks() as thinks:
        text = chat.run(backend=thinks).text()
    assert text == "<user>Hi</user>\n<assistant>(thinks) I say ok</assistant>\n<user>So?"


def test_all_ways_to_write_a_message_are_the_same(backend: ScriptBackend) -> None:
    @function
    def by_calls(s):
        s += user("Hi") + assistant("A " + gen("a"))

    @function
    def by_marks(s):
        s += user_begin() + "Hi" + user_end()
        s += assistant_begin() + "A "
        s += gen("a") + assistant_end()

    @function
    def by_blocks(s):
        with s.user():
            s += "Hi"
        with s.assistant():
            s += "A "
            s += gen("a")

    @function
    def by_methods(s):
        s.user("Hi")
        s.assistant("A " + gen("a"))

    texts = {program.run().text() for program in (by_calls, by_marks, by_blocks, by_methods)}
    assert texts == {"<user>Hi</user>\n<assistant>A ok"}
    assert len(set(prompts(backend))) == 1


def test_text_beyond_a_stop_string_is_no_part_of_the_program(backend: ScriptBackend) -> None:
    backend.script = lambda text: "one\ntwo"

    @function
    def lines(s):
        s += "List:" + gen("first", stop="\n") + ";" + gen("second", stop=["\n", "!"])

    state = lines.run()
    assert (state["first"], state["second"]) == ("one", "one")
    assert prompts(backend)[1] == "\x01List:one;"
    assert state.text() == "List:one;one"


def test_a_program_may_be_part_of_another(backend: ScriptBackend) -> None:
    @function
    def ask(s, what, name):
        s += user(what) + assistant(gen(name))
        return name.upper()

    @function
    def both(s):
        return ask(s, "A?", "a") + ask(s, what="B?", name="b")

    state = both.run()
    assert state.ret_value == "AB"
    assert prompts(backend)[1] == "<user>A?</user>\n<assistant>ok</assistant>\n<user>B?</user>\n<assistant>"


# --- names


def test_python_may_read_an_answer_and_go_on(backend: ScriptBackend) -> None:
    answers = iter(["tool", "42"])
    backend.script = lambda text: next(answers)

    @function
    def agent(s):
        s += "Use:" + gen("choice")
        if s["choice"] == "tool":
            s += gen("result")
        assert "result" in s
        assert "other" not in s

    assert agent.run()["result"] == "42"


def test_a_name_that_is_used_again_keeps_all(backend: ScriptBackend) -> None:
    answers = iter("abc")
    backend.script = lambda text: next(answers)

    @function
    def thrice(s):
        for _ in range(3):
            s += "." + gen("x")

    state = thrice.run()
    assert state["x"] == "c"
    assert state.get_all("x") == ["a", "b", "c"]
    with pytest.raises(ProgramError, match=r"no 'y' in the program; names so far: x"):
        state["y"]


# --- sampling and shapes


def test_the_nearest_word_on_sampling_counts(backend: ScriptBackend) -> None:
    @function
    def two(s, temperature_of_text="mild"):
        s += temperature_of_text + gen("a", temperature=0.5, stop="z") + gen("b")

    two.run(temperature=0, max_new_tokens=7, top_k=3)
    (_, first, _), (_, second, _) = backend.calls
    assert (first.temperature, first.max_tokens, first.top_k, first.stop) == (0.5, 7, 3, ("z",))
    assert (second.temperature, second.max_tokens, second.top_k, second.stop) == (0, 7, 3, ())


@pytest.mark.parametrize(
    ("part", "kind", "fits", "fails"),
    [
        (lambda: gen(regex="a+"), "regex", ["aa"], ["b"]),
        (lambda: gen_int(), "regex", ["0", "-17"], ["007", "1.5", ""]),
        (lambda: gen(dtype=float), "regex", ["1.5", "-0.25"], ["1", ".5"]),
        (lambda: gen(dtype=bool), "regex", ["True", "False"], ["true"]),
        (lambda: gen_string(), "regex", ['"a b"', '"\\n"', '""'], ['"a"b"', "a", '"\n"']),
    ],
)
def test_shapes(backend: ScriptBackend, part, kind: str, fits: list[str], fails: list[str]) -> None:
    @function
    def one(s):
        s += "=" + part()

    one.run()
    shape = backend.calls[0][2]
    assert shape is not None
    assert shape.kind == kind
    assert all(re.fullmatch(shape.value, text) for text in fits)
    assert not any(re.fullmatch(shape.value, text) for text in fails)


def test_schemas_are_json_text(backend: ScriptBackend) -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, object]:
            return {"type": "object"}

    @function
    def three(s):
        s += "=" + gen(json_schema={"type": "object"}) + gen(json_schema=Model) + gen(grammar="start: /a/")

    three.run()
    shapes = [shape for _, _, shape in backend.calls if shape is not None]
    assert [(shape.kind, shape.value) for shape in shapes] == [
        ("json_schema", '{"type": "object"}'),
        ("json_schema", '{"type": "object"}'),
        ("grammar", "start: /a/"),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gen("x", regex="a", dtype=int), "takes one of"),
        (lambda: gen("x", dtype=list), "dtype must be int, float, bool or str"),
        (lambda: gen("x", max_tokens=0), "max_tokens must be a whole number of at least 1, not 0"),
        (lambda: gen("x", json_schema=int), "a pydantic model"),
        (lambda: gen(5), "a name is a text, not int"),  # pyright: ignore[reportArgumentType]
        (lambda: select("x", []), "a list of texts"),
        (lambda: select("x", "yes"), "a list of texts"),
        (lambda: select("x", ["a", "a"]), "differ"),
        (lambda: "a" + gen("x") + 5, r"not int; numbers .* use str"),  # pyright: ignore
        (lambda: function(lambda: None), "state as the first parameter"),
        (lambda: function(asyncio.sleep), "without async"),
        (lambda: function(max_total_tokens=0), "max_total_tokens must be"),
    ],
)
def test_mistakes_are_told_where_they_are_made(make, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# --- choices


def test_the_likeliest_choice_per_token_is_taken(backend: ScriptBackend) -> None:
    backend.likely = ["a long answer"]

    @function
    def pick(s):
        s += user("Which?") + assistant("It is " + select("which", ["yes", "no", "a long answer"]) + ".")
        s += user("Sure?") + assistant(gen("sure", choices=["aye", "nay"]))

    state = pick.run()
    assert state["which"] == "a long answer"
    assert state.get_meta_info("which").scores == {"yes": -2.0, "no": -2.0, "a long answer": -0.5}
    head = "<user>Which?</user>\n<assistant>It is "
    assert backend.scored[0] == ([head + c for c in ("yes", "no", "a long answer")], len(head))
    assert state["sure"] == "aye", "of equals the first"
    assert backend.calls == [], "nothing is sampled"
    assert state.messages()[1]["content"] == "It is a long answer."


def test_a_choice_is_tokenized_with_the_text_before_it(backend: ScriptBackend) -> None:
    class Pairs(ScriptBackend):
        async def encode(self, text: str, *, begins: bool) -> list[int]:
            # "ab" is one token.
            return [*text.replace("ab", "\x02").encode()]

    with Pairs() as pairs:

        @function
        def pick(s):
            s += "xa" + select("c", ["b", "c"])

        pick.run(backend=pairs)
        assert pairs.scored == [(["x\x02", "xac"], 1)]


def test_a_tokenizers_own_space_does_not_stand_between_parts(backend: ScriptBackend) -> None:
    class Spaced(ScriptBackend):
        async def encode(self, text: str, *, begins: bool) -> list[int]:
            return [*("_" + text).encode()]

    with Spaced() as spaced:

        @function
        def three(s):
            s += "a" + gen("x") + " b" + gen("y") + select("z", ["!", "?"])

        three.run(backend=spaced)
        assert prompts(spaced) == ["_a", "_aok b"]
        assert spaced.scored == [(["_aok bok!", "_aok bok?"], 8)]


def test_a_choice_needs_a_text_before_it(backend: ScriptBackend) -> None:
    @function
    def pick(s):
        s += select("c", ["b", "c"])

    with pytest.raises(ProgramError, match=f"^{HERE}:.*must be a text before"):
        pick.run()


# --- branches


def test_branches_go_on_by_themselves_and_at_the_same_time(backend: ScriptBackend) -> None:
    backend.script = lambda text: text[-1] * 2
    backend.together = lambda prompt: 4 if " tip " in prompt else 1

    @function
    def tips(s):
        s += "Base" + gen("base")
        branches = s.fork(4)
        branches += lambda n: f" tip {n}"
        branches += gen("tip")
        for n, branch in enumerate(branches):
            assert branch["tip"] == str(n) * 2
        branches[0] += "!"
        assert branches[0].text() == "Baseee tip 000!"
        assert len(branches) == 4
        assert branches["tip"] == ["00", "11", "22", "33"]
        branches.join()
        s += " " + ",".join(s["tip"]) + gen("end")

    state = tips.run()
    assert state.text() == "Baseee 00,11,22,3333"
    assert state["tip"] == ["00", "11", "22", "33"]
    assert backend.most_running == 4
    assert sorted(prompts(backend)[1:5]) == [f"\x01Baseee tip {n}" for n in range(4)]
    assert state.usage().completion_tokens == 2 * 6


def test_a_copy_is_one_branch(backend: ScriptBackend) -> None:
    @function
    def side(s):
        s += "a"
        other = s.copy()
        other += "b" + gen("x")
        s += "c" + gen("y")
        assert other.text() == "abok"

    assert side.run().text() == "acok"
    with pytest.raises(ProgramError, match=f"^{HERE}:.*at least 1, not 0"):
        function(lambda s: s.fork(0)).run()


def test_a_branch_that_fails_fails_the_program_where_it_is_looked_at(backend: ScriptBackend) -> None:
    seen = []

    @function
    def mixed(s):
        s += user("q")
        good, bad = s.fork(2)
        good += assistant(gen("x"))
        bad += user("again") + user_end()
        bad += gen("y")
        seen.append(good["x"])
        with pytest.raises(ProgramError, match="no user message is open"):
            bad["y"]
        seen.append("caught")

    with pytest.raises(ProgramError, match=f"^{HERE}:.*no user message is open"):
        mixed.run()
    assert seen == ["ok", "caught"]
