"""What constraints allow: every kind but JSON, its refusals, and where texts may and must end."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from helpers.allowed import STOPS, accepts, begins, compiler, follow, ids_of, refused
from helpers.byte_tokenizer import EOS, IM_END, VOCAB_SIZE, byte_tokenizer
from tierax.engine.constraint import MAX_CHARS, MAX_CHOICES, Constraint, ConstraintError
from tierax.engine.grammar import GrammarCompiler
from tierax.engine.lazy_regex import split_lazy
from tierax.engine.tokenizer import Tokenizer

GRAMMARS = compiler()
ARTICLE = r'\{.*?"answer":\s*".*?",\s*"confidence":\s*\d+\}'


# --- constraints as values


def test_equal_contents_are_equal() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Constraint.json_schema(schema) == Constraint.json_schema(json.dumps(schema, indent=3))
    assert hash(Constraint.choice(["a", "b"])) == hash(Constraint.choice(("a", "b")))
    assert Constraint.regex("a") != Constraint.grammar("a")
    assert Constraint.json_schema(True) == Constraint.json_schema({})


def test_the_order_of_properties_stays() -> None:
    constraint = Constraint.json_schema(
        {
            "type": "object",
            "properties": {"b": {"const": 1}, "a": {"const": 2}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    )
    assert accepts(GRAMMARS, constraint, '{"b": 1, "a": 2}')
    assert not begins(GRAMMARS, constraint, '{"a"')


# --- regex


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("yes(no)?", ["yes", "yesno"], ["ye", "yesn", "no", ""]),
        ("^abc$", ["abc"], ["ab", "abcd"]),
        (r"\d{4}-\d\d", ["2026-11"], ["2026-1", "26-11"]),
        ("(?i)ab", ["aB", "AB"], ["a"]),
        ("é🙂+", ["é🙂", "é🙂🙂"], ["é", "e🙂"]),
        (r"a/b\n", ["a/b\n"], ["a/b"]),
        (".+", ["a b"], ["a\nb", ""]),
        (r"(?:x|yz)*", ["", "xyzx"], ["y"]),
    ],
)
def test_regex(pattern: str, good: list[str], bad: list[str]) -> None:
    constraint = Constraint.regex(pattern)
    assert [text for text in good if not accepts(GRAMMARS, constraint, text)] == []
    assert [text for text in bad if accepts(GRAMMARS, constraint, text)] == []


def test_digits_are_those_that_programs_read() -> None:
    assert accepts(GRAMMARS, Constraint.regex(r"[\d.]+\d"), "3.14")
    assert not begins(GRAMMARS, Constraint.regex(r"\d+"), "٣")
    assert accepts(GRAMMARS, Constraint.regex(r"\\d"), r"\d")


def test_a_regex_takes_whole_characters_only() -> None:
    constraint = Constraint.regex("[é-ü]+")
    assert begins(GRAMMARS, constraint, b"\xc3")
    assert not accepts(GRAMMARS, constraint, b"\xc3")
    assert not begins(GRAMMARS, constraint, b"\xff")


@pytest.mark.parametrize(
    ("pattern", "head", "tail"),
    [
        (ARTICLE, ARTICLE, ""),
        (r".*?: \d+", r".*?: \d{1}", r"\d{0,}"),
        (r".*?: \d+ *[a-z]?", r".*?: \d{1}", r"\d{0,} *[a-z]?"),
        ("a*?b*", "a*?", "b*"),
        ("(?i)x.*?[0-9a-f]{2,4}", "(?i)x.*?[0-9a-f]{2}", "(?i)[0-9a-f]{0,2}"),
        ("a.*?$", "a.*?", ""),
        ("(a.*?b)+c?", "(a.*?b)+", "c?"),
        ("(?:a+?)", "(?:a+?)", ""),
        ("a??b{3}", "a??b{3}", ""),
        ("a.*?b|c+", "a.*?b|c+", ""),
        (r"[]?+]*?\x41+", r"[]?+]*?\x41{1}", r"\x41{0,}"),
        (r"a.*?[[:alpha:]&&[^x]]+", r"a.*?[[:alpha:]&&[^x]]{1}", r"[[:alpha:]&&[^x]]{0,}"),
        (r"(?x) a .*? b+", r"(?x) a .*? b+", ""),
    ],
)
def test_a_lazy_pattern_is_cut_where_it_first_ends(pattern: str, head: str, tail: str) -> None:
    assert split_lazy(pattern) == (head, tail)


@pytest.mark.parametrize(
    "pattern",
    ["a.*b", r"a\*?", "[*?]?", r"(?:a|b)?", r"(?P<n>a)?", r"\?\??", "", "(?i)a", "a{2}", r"[a\]*?]"],
)
def test_a_pattern_without_a_lazy_quantifier_stays_whole(pattern: str) -> None:
    assert split_lazy(pattern) is None


def test_the_answers_of_the_article_end_at_the_first_possible_end() -> None:
    constraint = Constraint.regex(ARTICLE)
    text = '{ "say": "x", "answer": "It is "so", they say", "confidence": 98}'
    matcher = follow(GRAMMARS, constraint, text)
    assert matcher is not None
    assert matcher.ended
    assert re.fullmatch(ARTICLE, text)
    for cut in range(len(text) - 1):
        assert not accepts(GRAMMARS, constraint, text[:cut])


def test_what_follows_a_lazy_part_greedily_may_go_on() -> None:
    constraint = Constraint.regex(r".*?: \d+")
    assert not begins(GRAMMARS, constraint, "a: 1x")
    assert begins(GRAMMARS, constraint, "a: b: ")
    assert accepts(GRAMMARS, constraint, "a: b: 1")
    assert accepts(GRAMMARS, constraint, "a: 1234")


def test_random_lazy_patterns_yield_full_matches_only() -> None:
    rng = random.Random(5)
    pieces = ["a", "b", "[ab]", "(?:ab|b)", "a+", "b*", "[ab]?", "a{1,2}", ".*?", "a+?", "b??", "(a.*?b)"]
    walks = 0
    for _ in range(150):
        pattern = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 5)))
        try:
            matcher = GRAMMARS.compile(Constraint.regex(pattern)).matcher(STOPS)
        except ConstraintError:
            assert re.fullmatch(pattern, ""), pattern
            continue
        text = ""
        while not matcher.ended and len(text) < 12:
            allowed = ids_of(matcher)
            if allowed >= STOPS and rng.random() < 0.3:
                break
            letters = sorted(allowed & {97, 98})
            if not letters:
                break
            token = rng.choice(letters)
            matcher.advance(token)
            text += chr(token)
        if matcher.ended or ids_of(matcher) >= STOPS:
            assert re.fullmatch(pattern, text, re.DOTALL), (pattern, text)
            walks += 1
    assert walks > 80


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("[a-", "unclosed character class"),
        (r"^(a)\1$", "backreferences are not supported"),
        ("(?=a)b", "look-around"),
        (r".*?(?=a)b", "look-around"),
        ("(a", "unclosed group"),
        ("", "empty text"),
        (".*?", "empty text"),
        ("\ud800", "not valid Unicode"),
        ("a" * (MAX_CHARS + 1), "at most"),
    ],
)
def test_a_regex_that_cannot_be_enforced_is_refused(pattern: str, reason: str) -> None:
    error = refused(GRAMMARS, lambda: Constraint.regex(pattern))
    assert error.keyword == "regex"
    assert reason in str(error)


# --- choices, grammars, tags


def test_choices_with_all_kinds_of_characters() -> None:
    choices = ["a", "ab", 'say "x"\n', "\\", "/", "é🙂", "<|im_end|>", "\x00"]
    constraint = Constraint.choice(choices)
    assert [text for text in choices if not accepts(GRAMMARS, constraint, text)] == []
    assert not accepts(GRAMMARS, constraint, "say")
    assert not begins(GRAMMARS, constraint, "b")


def test_a_choice_ends_at_once_where_no_other_goes_on() -> None:
    constraint = Constraint.choice(["yes", "yesterday", "no"])
    for text, ended in (("no", True), ("yes", False), ("yesterday", True)):
        matcher = follow(GRAMMARS, constraint, text)
        assert matcher is not None
        assert matcher.ended == ended


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ([], "0 entries"),
        ([""], "empty text"),
        (["a"] * (MAX_CHOICES + 1), "entries"),
        ("abc", "list of texts"),
        ([1], "must hold texts"),
        (["x" * 70_000], "characters"),
    ],
)
def test_choices_that_make_no_sense_are_refused(choices: Any, reason: str) -> None:
    error = refused(GRAMMARS, lambda: Constraint.choice(choices))
    assert error.keyword == "choice"
    assert reason in str(error)


LARK = 'start: "(" inner ")"\ninner: /[a-z]+/ | start'
GBNF = 'root ::= "(" inner ")"\ninner ::= [a-z]+ | root\n'


@pytest.mark.parametrize("text", [LARK, GBNF])
def test_grammars_of_both_kinds(text: str) -> None:
    constraint = Constraint.grammar(text)
    for good in ("(ab)", "(((z)))"):
        assert accepts(GRAMMARS, constraint, good)
    for bad in ("(", "((a)", "()"):
        assert not accepts(GRAMMARS, constraint, bad)


@pytest.mark.parametrize(
    "text", ["start: zork", "root ::= zork", "%%%%", "", 'start: "a" (', "start: /(?=a)/"]
)
def test_a_grammar_that_cannot_be_enforced_is_refused(text: str) -> None:
    assert refused(GRAMMARS, lambda: Constraint.grammar(text)).keyword == "grammar"


INT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAGS = [
    {"begin": "<fn=add>", "schema": INT, "end": "</fn>"},
    {"begin": "<fn=now>", "schema": {"type": "object", "additionalProperties": False}, "end": "</fn>"},
]


def test_structural_tags_in_free_text() -> None:
    constraint = Constraint.structural_tag(TAGS, ["<fn="])
    for good in ("", "hi <fn", '<fn=add>{"a": 3}</fn>', 'Let me <fn=now>{}</fn> and <fn=add>{"a":1}</fn>.\n'):
        assert accepts(GRAMMARS, constraint, good)
    for bad in ("<fn=", "<fn=add>", '<fn=add>{"a": 3}'):
        assert not accepts(GRAMMARS, constraint, bad)
    for bad in ("<fn=sub", '<fn=add>{"b"', "<fn=add> "):
        assert not begins(GRAMMARS, constraint, bad)


def test_structural_tags_that_must_come() -> None:
    some = Constraint.structural_tag(TAGS, ["<fn="], at_least_one=True)
    one = Constraint.structural_tag(TAGS, ["<fn="], at_least_one=True, stop_after_first=True)
    for constraint in (some, one):
        assert not accepts(GRAMMARS, constraint, "hello")
        assert accepts(GRAMMARS, constraint, "hello <fn=now>{}</fn>")
    assert accepts(GRAMMARS, some, "<fn=now>{}</fn><fn=now>{}</fn>")
    matcher = follow(GRAMMARS, one, "hello <fn=now>{}</fn>")
    assert matcher is not None
    assert matcher.ended


@pytest.mark.parametrize(
    ("tags", "triggers", "keyword"),
    [
        ([], ["<"], "structural_tag"),
        ([{"begin": "<a>", "schema": {"not": {}}}], ["<a"], "not"),
        ([{"begin": "<a>"}], ["<b"], "triggers"),
        ([{"begin": "<a>"}], [""], "triggers"),
        ([{"schema": {}}], ["<"], "structural_tag"),
        (["<a>"], ["<"], "structural_tag"),
    ],
)
def test_tags_that_cannot_be_enforced_are_refused(tags: Any, triggers: list[str], keyword: str) -> None:
    assert refused(GRAMMARS, lambda: Constraint.structural_tag(tags, triggers)).keyword == keyword


# --- ends


def test_all_end_tokens_are_masked_inside_and_allowed_when_complete() -> None:
    compiled = GRAMMARS.compile(Constraint.regex('yes(no)?|"ab"'))
    matcher = compiled.matcher(frozenset({EOS, IM_END, 5}))
    for byte in b"yes":
        assert ids_of(matcher).isdisjoint({EOS, IM_END, 5})
        matcher.advance(byte)
    assert ids_of(matcher) == {ord("n"), EOS, IM_END, 5}
    assert not matcher.ended


def test_an_end_token_that_is_text_is_no_text_inside() -> None:
    matcher = GRAMMARS.compile(Constraint.regex("[a-c]{3}x?")).matcher(frozenset({ord("b")}))
    assert ids_of(matcher) == {ord("a"), ord("c")}
    for _ in range(3):
        matcher.advance(ord("a"))
    assert ids_of(matcher) == {ord("b"), ord("x")}


def test_a_text_that_needs_an_end_token_inside_fails_instead_of_ending() -> None:
    matcher = GRAMMARS.compile(Constraint.regex("[a-c]b[a-c]")).matcher(frozenset({ord("b")}))
    with pytest.raises(ConstraintError, match="no token but an end token"):
        matcher.advance(ord("a"))


def test_without_end_tokens_a_whole_text_just_goes_on_or_ends() -> None:
    matcher = GRAMMARS.compile(Constraint.regex("ab?")).matcher(frozenset())
    matcher.advance(ord("a"))
    assert ids_of(matcher) == {ord("b")}
    matcher.advance(ord("b"))
    assert matcher.ended


def test_special_tokens_are_no_text() -> None:
    matcher = GRAMMARS.compile(Constraint.regex("(.|\n)+")).matcher(frozenset())
    assert ids_of(matcher) <= set(range(256))
    assert not begins(GRAMMARS, Constraint.regex(".+"), b"\x80")


def test_ids_behind_the_vocabulary_are_never_allowed() -> None:
    padded = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE + 40, STOPS)
    matcher = padded.compile(Constraint.regex(".*")).matcher(STOPS)
    assert max(ids_of(matcher)) < VOCAB_SIZE
    assert len(matcher.mask) == -(-(VOCAB_SIZE + 40) // 32)


def test_forced_tokens_are_one_mask_at_a_time() -> None:
    matcher = GRAMMARS.compile(Constraint.regex("[ab]cde[fg]")).matcher(STOPS)
    assert list(matcher.forced) == []
    matcher.advance(ord("a"))
    assert list(matcher.forced) == list(b"cde")
    for byte in b"cde":
        assert ids_of(matcher) == {byte}
        matcher.advance(byte)
    assert ids_of(matcher) == set(b"fg")
    with pytest.raises(ConstraintError):
        matcher.advance(ord("x"))


def test_forced_tokens_of_a_vocabulary_that_puts_a_space_before_texts() -> None:
    space = "\u2581"
    pieces = [
        "</s>",
        f"{space}answer",
        "answer",
        f"{space}yes",
        "yes",
        space,
        *"aenrswy01,",
        f"{space}a",
        "ans",
    ]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.Unigram([(p, -0.1 * i) for i, p in enumerate(pieces)], 0, True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(backend, eos_id=0)
    assert [pieces[token] for token in tokenizer.encode("answer", add_bos=False)] == [f"{space}answer"]
    grammars = GrammarCompiler(tokenizer, len(pieces), tokenizer.eos_ids)
    for pattern, forced in (
        ("[01]answer[01]", ["answer"]),
        ("[01] answer, yes[01]", [f"{space}answer", ",", f"{space}yes"]),
        ("[01]</s>[01]", ["<0x3C>", "<0x2F>", "s", "<0x3E>"]),
    ):
        matcher = grammars.compile(Constraint.regex(pattern)).matcher(tokenizer.eos_ids)
        matcher.advance(pieces.index("0"))
        assert [pieces[token] for token in matcher.forced] == forced
        for token in list(matcher.forced):
            matcher.advance(token)
        assert {pieces[token] for token in ids_of(matcher)} >= {"0", "1"}
