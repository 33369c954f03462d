"""Enforces constraints with llguidance: compiles them for a vocabulary, and follows answers token by token."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .constraint import Constraint, ConstraintError
from .grammar_vocabulary import Vocabulary
from .lark import ascii_digits, json_options, lark_json, lark_regex, lark_text
from .lazy_regex import split_lazy
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    Start = Callable[[str], LLMatcher]

WORDS = "[a-zA-Z ]{1,15}"
"""Tokens of this kind, most of many vocabularies, are allowed or not as one wherever that can be told: a mask of a pattern
like `[a-zA-Z ,.]{80}` takes 30 us instead of 700."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Bounds of compiling and following, counted in work instead of seconds: the outcome is the same on every machine.

    With these a constraint compiles within about a second and a mask takes a few tens of milliseconds at worst; usual ones
    take 1 to 5 ms and 50 us.
    """

    cached: int = 256
    """Compiled constraints that are kept."""
    cached_chars: int = 1 << 23
    """Texts of those, together."""
    lexer_fuel: int = 1_000_000
    step_fuel: int = 200_000
    step_items: int = 50_000
    lexer_states: int = 50_000
    """1 to 2 KB of memory each."""
    grammar_size: int = 500_000

    def for_parser(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(
            initial_lexer_fuel=self.lexer_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.lexer_states,
            max_grammar_size=self.grammar_size,
            verbose_errors=False,
        )


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Safe to share between threads, so that no loop has to wait for it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_ids: frozenset[int],
        limits: CompileLimits | None = None,
    ) -> None:
        """`vocab_size` is the width of the model's logits; `end_ids` never stand for text. Reads the vocabulary at the first
        compilation only."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._limits = limits or CompileLimits()
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._cache: OrderedDict[Constraint, Compiled | ConstraintError] = OrderedDict()

    def compile(self, constraint: Constraint) -> Compiled:
        """Raises `ConstraintError` for what cannot be enforced; the same constraint costs nothing later."""
        with self._lock:
            known = self._cache.get(constraint)
            if known is not None:
                self._cache.move_to_end(constraint)
        if known is None:
            known = self._compiled(constraint)
            self._keep(constraint, known)
        if isinstance(known, ConstraintError):
            # A new one each time, since raising changes it.
            raise ConstraintError(known.keyword, str(known))
        return known

    def _compiled(self, constraint: Constraint) -> Compiled | ConstraintError:
        try:
            return self._compile(constraint)
        except ConstraintError as error:
            return error

    def _compile(self, constraint: Constraint) -> Compiled:
        from llguidance import LLMatcher

        vocabulary = self._read_vocabulary()
        limits = self._limits.for_parser()

        def start(grammar: str) -> LLMatcher:
            matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise _refusal(constraint, matcher.get_error())
            return matcher

        try:
            matcher = start(_grammar(constraint, start))
        except ConstraintError:
            raise
        except Exception as error:  # whatever a library says of odd text is a refusal
            raise _refusal(constraint, str(error)) from None
        compiled = Compiled(constraint, matcher, self._vocab_size)
        # Finds out what may come first, so that all that is unsound shows now.
        if compiled.matcher(frozenset()).ended:
            raise ConstraintError(constraint.kind, f"{constraint.kind} allows nothing but the empty text")
        return compiled

    def _keep(self, constraint: Constraint, known: Compiled | ConstraintError) -> None:
        with self._lock:
            self._cache[constraint] = known
            while len(self._cache) > self._limits.cached or (
                len(self._cache) > 1 and sum(map(_chars, self._cache)) > self._limits.cached_chars
            ):
                self._cache.popitem(last=False)

    def _read_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                from llguidance import LLTokenizer

                wrapped: Any = Vocabulary(self._tokenizer, self._vocab_size, self._end_ids)
                slices = [*LLTokenizer.general_slices(), WORDS]
                self._vocabulary = LLTokenizer(wrapped, n_vocab=len(wrapped.tokens), slices=slices)
            return self._vocabulary


class Compiled:
    """A constraint for one vocabulary, from which an answer's matcher starts."""

    def __init__(self, constraint: Constraint, start: LLMatcher, vocab_size: int) -> None:
        self.constraint = constraint
        self._start = start
        self._vocabulary = _bits(range(vocab_size), -(-vocab_size // 32))
        # llguidance's own end token lies behind the vocabulary, perhaps in a word of its own.
        self._words = vocab_size // 32 + 1

    def matcher(self, stop_ids: frozenset[int]) -> GrammarMatcher:
        """For one answer, which any of `stop_ids` ends. Raises `ConstraintError` if no token can come first."""
        return GrammarMatcher(
            self.constraint.kind, self._start.deep_copy(), self._vocabulary, self._words, stop_ids
        )


class GrammarMatcher:
    """Implements `constraint.Matcher`.

    Where the grammar leaves one text only, its usual tokens are forced, so that an answer's tokens do not depend on
    whether they are taken one by one or together.
    """

    def __init__(
        self,
        kind: str,
        matcher: LLMatcher,
        vocabulary: NDArray[np.int32],
        words: int,
        stop_ids: frozenset[int],
    ) -> None:
        """`vocabulary`: the mask that allows all of it; `words`: the width of llguidance's masks."""
        self._kind = kind
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._words, self._width = words, len(vocabulary)
        self._stops = _bits(stop_ids, self._width)
        self._no_stops = ~self._stops & vocabulary
        self._forced: list[int] = []
        self._mask = self._stops
        self._ended = False
        self._look()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def forced(self) -> Sequence[int]:
        return self._forced

    @property
    def mask(self) -> NDArray[np.int32]:
        return _bits(self._forced[:1], self._width) if self._forced else self._mask

    def advance(self, token_id: int) -> None:
        try:
            self._advance(token_id)
        except ConstraintError:
            raise
        except Exception as error:  # one answer's trouble, whatever it is
            raise ConstraintError(self._kind, f"{self._kind} cannot be followed: {error}") from error

    def _advance(self, token_id: int) -> None:
        expected = self._forced.pop(0) if self._forced else token_id
        if token_id != expected or not self._matcher.consume_token(token_id):
            raise ConstraintError(
                self._kind, f"token {token_id} does not go on as {self._kind} asks: {self._why()}"
            )
        if not self._forced:
            self._look()

    def _look(self) -> None:
        """Finds out what may come next."""
        forced = self._matcher.compute_ff_tokens()
        if forced and self._stop_ids.isdisjoint(forced):
            self._forced = forced[: self._matcher.validate_tokens(forced)]
            if self._forced:
                return
        row = np.zeros(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(self._kind, f"{self._kind} cannot be followed: {self._why()}")
        row = row[: self._width] & self._no_stops
        complete = self._matcher.is_accepting()
        self._ended = complete and not row.any()
        if not complete and not row.any():
            raise ConstraintError(
                self._kind, f"{self._kind} cannot go on: no token but an end token would fit"
            )
        self._mask = row | self._stops if complete else row

    def _why(self) -> str:
        return self._matcher.get_error().split("\n")[0] or "it is complete"


def _bits(ids: Iterable[int], width: int) -> NDArray[np.int32]:
    bits = np.zeros(32 * width, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


# --- grammars in llguidance's terms


def _grammar(constraint: Constraint, start: Start) -> str:
    value = constraint.value
    if isinstance(value, tuple):
        return _lark("start: " + " | ".join(map(lark_text, value)))
    match constraint.kind:
        case "regex":
            return _regex(value, start)
        case "json_schema":
            return _json_schema(json.loads(value))
        case "json_object":
            return _json_schema({"type": "object"})
        case "grammar":
            return _lark(_as_lark(value))
        case kind:
            assert kind == "structural_tag"
            return _tagged(json.loads(value))


def _lark(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def _json_schema(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    options: Any = json_options(schema)
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _regex(pattern: str, start: Start) -> str:
    from llguidance import LLMatcher

    pattern = ascii_digits(pattern)
    whole = LLMatcher.grammar_from_regex(pattern)
    parts = split_lazy(pattern)
    if parts is None:
        return whole
    # What is wrong with the pattern is said of it as it was given.
    start(whole)
    head, tail = parts
    if start(LLMatcher.grammar_from_regex(head)).is_accepting():
        return LLMatcher.grammar_from_regex(tail)
    rules = f"start: head\nhead[lazy]: {lark_regex(head)}"
    if tail:
        rules = f"start: head tail\nhead[lazy]: {lark_regex(head)}\ntail: {lark_regex(tail)}"
    return _lark(rules)


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # its own class, and others where the text is odd
        raise ConstraintError("grammar", f"grammar is not valid GBNF: {error}") from None


def _tagged(value: dict[str, Any]) -> str:
    """Free text in which a trigger must become one of its tags. The trigger is the shortest that the tag begins with."""
    rules = ["TEXT: /(.|\\n)*/"]
    tags = []
    for number, trigger in enumerate(value["triggers"]):
        rules.append(f"trigger_{number}[lazy]: TEXT {lark_text(trigger)}")
    for number, tag in enumerate(value["tags"]):
        begin = tag["begin"]
        trigger = min((t for t in value["triggers"] if begin.startswith(t)), key=len)
        parts = [f"trigger_{value['triggers'].index(trigger)}"]
        parts += [lark_text(begin[len(trigger) :])] if len(begin) > len(trigger) else []
        parts.append(lark_json(tag["schema"]))
        parts += [lark_text(tag["end"])] if tag["end"] else []
        rules.append(f"tag_{number}: {' '.join(parts)}")
        tags.append(f"tag_{number}")
    any_tag = f"({' | '.join(tags)})"
    if value["stop_after_first"]:
        start = any_tag if value["at_least_one"] else f"{any_tag} | TEXT"
    else:
        start = f"{any_tag}+" if value["at_least_one"] else f"{any_tag}* TEXT"
    return _lark("\n".join([f"start: {start}", *rules]))


def _chars(constraint: Constraint) -> int:
    value = constraint.value
    return len(value) if isinstance(value, str) else sum(map(len, value))


# --- refusals

_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]*)"')
_SIGNS = (
    ("oneOf constraints", "oneOf"),
    ("Invalid type", "type"),
    ("Unknown format", "format"),
    ("present in a registry", "$ref"),
    ("Pointer ", "$ref"),
    ("regex parse error", "pattern"),
    ("lookarounds", "pattern"),
    ("min/maxProperties", "minProperties"),
    ("anyOf is empty", "enum"),
    ("required property", "required"),
)


def _refusal(constraint: Constraint, message: str) -> ConstraintError:
    """Names what is at fault in llguidance's words."""
    kind = keyword = constraint.kind
    said = re.search(r"error: ([^\n]*)", message)
    reason = said.group(1) if said else " ".join(message.split())[:300]
    if kind in ("json_schema", "structural_tag"):
        found = _UNIMPLEMENTED.search(message)
        keyword = found.group(1) if found else next((word for sign, word in _SIGNS if sign in message), kind)
    about = kind if keyword == kind else f"{kind}: {keyword}"
    return ConstraintError(keyword, f"{about} cannot be enforced: {reason}")
