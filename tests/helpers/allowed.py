"""What a constraint lets through, byte by byte, with the byte tokenizer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from helpers.byte_tokenizer import EOS, IM_END, VOCAB_SIZE, byte_tokenizer
from tierax.engine.constraint import Constraint, ConstraintError, Matcher
from tierax.engine.grammar import GrammarCompiler

STOPS = frozenset({EOS, IM_END})


def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, STOPS)


def ids_of(matcher: Matcher) -> set[int]:
    """The tokens that may come next."""
    return set(np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist())


def follow(grammars: GrammarCompiler, constraint: Constraint, text: str | bytes) -> Matcher | None:
    """The matcher after a text; None where the text is not a beginning of anything allowed.

    Every byte must be allowed by the mask exactly if it can be followed.
    """
    matcher: Matcher = grammars.compile(constraint).matcher(STOPS)
    for byte in text.encode() if isinstance(text, str) else text:
        may = not matcher.ended and byte in ids_of(matcher)
        try:
            matcher.advance(byte)
        except ConstraintError:
            assert not may, "the mask allows what cannot be followed"
            return None
        assert may, "the mask forbids what can be followed"
    return matcher


def accepts(grammars: GrammarCompiler, constraint: Constraint, text: str | bytes) -> bool:
    """Whether an answer may be just this text."""
    matcher = follow(grammars, constraint, text)
    return matcher is not None and (matcher.ended or ids_of(matcher) >= STOPS)


def begins(grammars: GrammarCompiler, constraint: Constraint, text: str | bytes) -> bool:
    """Whether an answer may begin with this text."""
    return follow(grammars, constraint, text) is not None


def refused(grammars: GrammarCompiler, make: Callable[[], Constraint]) -> ConstraintError:
    """The refusal of a constraint, wherever it comes: when it is made or compiled. Others compile before and after."""
    assert accepts(grammars, Constraint.regex("a+"), "aa")
    with pytest.raises(ConstraintError) as caught:
        grammars.compile(make())
    assert accepts(grammars, Constraint.regex("b+"), "bb")
    return caught.value
