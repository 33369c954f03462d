"""The compiler of constraints: what it keeps, how much work it may be, and several threads."""

from __future__ import annotations

import threading

import pytest

from helpers.allowed import STOPS, accepts, compiler
from helpers.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tierax.engine.constraint import Constraint, ConstraintError
from tierax.engine.grammar import CompileLimits, GrammarCompiler

GRAMMARS = compiler()


def test_compiled_constraints_are_kept_up_to_a_limit() -> None:
    grammars = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, STOPS, CompileLimits(cached=2))
    a, b, c = (Constraint.regex(text) for text in "abc")
    first = grammars.compile(a)
    assert grammars.compile(a) is first
    grammars.compile(b)
    grammars.compile(a)
    grammars.compile(c)
    assert grammars.compile(a) is first, "b was the one used longest ago"
    second = grammars.compile(b)
    assert grammars.compile(b) is second


def test_large_texts_do_not_pile_up() -> None:
    grammars = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, STOPS, CompileLimits(cached_chars=100))
    long = Constraint.regex("a" * 90)
    first = grammars.compile(long)
    grammars.compile(Constraint.regex("b" * 90))
    assert grammars.compile(long) is not first


@pytest.mark.parametrize(
    ("limits", "constraint"),
    [
        (CompileLimits(lexer_fuel=300), Constraint.regex("(abc|[d-z]{3}){1,400}" * 40)),
        (CompileLimits(grammar_size=50), Constraint.choice([f"v{n}" for n in range(300)])),
    ],
)
def test_the_work_of_compiling_is_bounded(limits: CompileLimits, constraint: Constraint) -> None:
    with pytest.raises(ConstraintError) as caught:
        GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, STOPS, limits).compile(constraint)
    assert caught.value.keyword == constraint.kind
    assert "too big" in str(caught.value)


@pytest.mark.parametrize("limits", [CompileLimits(step_fuel=100), CompileLimits(lexer_states=40)])
def test_the_work_of_following_is_bounded(limits: CompileLimits) -> None:
    matcher = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, STOPS, limits).compile(ROPE).matcher(STOPS)

    def follow_long() -> None:
        for byte in b"abacabadabacabaeabacabadabacaba" * 9:
            matcher.advance(byte)

    with pytest.raises(ConstraintError, match="cannot be followed"):
        follow_long()


ROPE = Constraint.regex("([a-e]*a[a-e]{9})+z")


def test_threads_may_compile_together() -> None:
    grammars = compiler()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                constraint = Constraint.regex(f"[ab]{{{1 + (number + turn) % 7}}}")
                assert accepts(grammars, constraint, "a" * (1 + (number + turn) % 7))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_matchers_of_one_constraint_do_not_meddle() -> None:
    compiled = GRAMMARS.compile(Constraint.regex("[ab]{3}"))
    first, second = compiled.matcher(STOPS), compiled.matcher(STOPS)
    mask = first.mask.copy()
    for _ in range(3):
        first.advance(97)
    assert first.ended
    assert not second.ended
    assert (second.mask == mask).all()
