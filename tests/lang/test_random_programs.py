"""Programs put together at random say what a simple reading of them says, with all that runs beside them."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import pytest

from helpers.script_backend import ScriptBackend
from tierax import ProgramState, assistant, function, gen, select, system, user


def answer(text: str) -> str:
    """What the script says to a text; follows from all of it."""
    return f"<{sum(text.encode()) % 97}>"


@dataclass
class Expected:
    """What a program's state must have come to."""

    text: str = "\x01"
    names: dict[str, list[str]] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)

    def copy(self) -> Expected:
        return Expected(self.text, {}, list(self.roles))

    def begin(self, role: str) -> None:
        if self.roles:
            self.text += f"</{self.roles[-1]}>\n"
        self.roles.append(role)
        self.text += f"<{role}>"

    def fill(self, name: str, text: str) -> None:
        self.names.setdefault(name, []).append(text)
        self.text += text


class Walk:
    """Makes a program up while it runs, and the expectation with it."""

    def __init__(self, rng: random.Random, likely: str) -> None:
        self.rng = rng
        self.likely = likely
        self.places = 0
        self.pairs: list[tuple[ProgramState, Expected]] = []

    def go(self, s: ProgramState, expected: Expected, depth: int) -> None:
        self.pairs.append((s, expected))
        for _ in range(self.rng.randint(1, 6)):
            if depth < 2 and self.rng.random() < 0.15:
                branches = s.fork(self.rng.randint(1, 3))
                for branch in branches:
                    self.go(branch, expected.copy(), depth + 1)
            elif expected.roles or (expected.text == "\x01" and self.rng.random() < 0.5):
                self.message(s, expected)
            else:
                s += self.content(expected)
            if expected.names and self.rng.random() < 0.2:
                name = self.rng.choice(list(expected.names))
                assert s.get_all(name) == expected.names[name]

    def message(self, s: ProgramState, expected: Expected) -> None:
        role = self.rng.choice(["user", "assistant"] if expected.roles else ["system", "user"])
        expected.text = expected.text.removeprefix("\x01")
        expected.begin(role)
        s += {"system": system, "user": user, "assistant": assistant}[role](self.content(expected))

    def content(self, expected: Expected):
        parts = "t" + str(self.rng.randrange(10))
        expected.text += parts
        for _ in range(self.rng.randint(0, 2)):
            self.places += 1
            name = f"v{self.rng.randrange(4)}"
            if self.rng.random() < 0.3:
                parts = parts + select(name, [self.likely, "never"])
                expected.fill(name, self.likely)
            else:
                parts = parts + gen(name)
                expected.fill(name, answer(expected.text))
            parts = parts + "."
            expected.text += "."
        return parts


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs(first: int) -> None:
    places = branches = 0
    with ScriptBackend(answer, likely=["yes"]) as backend:
        for seed in range(first, first + 20):
            walk = Walk(random.Random(seed), "yes")
            function(lambda s, walk=walk: walk.go(s, Expected(), 0)).run(backend=backend, max_tokens=99)
            for state, expected in walk.pairs:
                assert "\x01" * (expected.text[0] == "\x01") + state.text() == expected.text
                assert [m["role"] for m in state.messages()] == expected.roles
                assert {name: state.get_all(name) for name in state.names()} == expected.names
            places, branches = places + walk.places, branches + len(walk.pairs) - 1
    assert places > 50
    assert branches > 5
    assert not [thread for thread in threading.enumerate() if thread.name == "lang"]
