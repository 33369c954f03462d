"""Streams of tokens as text: whole characters, stop strings, and the sum of the pieces (DEFECTS d1, d2)."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from helpers.byte_tokenizer import EOS, IM_START, byte_tokenizer
from tierax.engine.request import SamplingParams
from tierax.engine.text import IncrementalText
from tierax.engine.tokenizer import Tokenizer
from tierax.engine.tokenizer_gguf import BYTE_OF_CHAR

CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
BYTES = byte_tokenizer()
SPACE = "\u2581"


def byte_level(pieces: list[bytes]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """A tokenizer whose vocabulary is these pieces (repeats share an id), and the package's own under it."""
    vocab: dict[str, int] = {}
    for piece in pieces:
        vocab.setdefault("".join(CHAR_OF_BYTE[b] for b in piece), len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend), backend


def ids_of(backend: tokenizers.Tokenizer, pieces: list[bytes]) -> list[int]:
    ids = [backend.token_to_id("".join(CHAR_OF_BYTE[b] for b in piece)) for piece in pieces]
    return [i for i in ids if i is not None]


def sentencepiece(tokens: list[str]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend), backend


def stream(text: IncrementalText, ids: list[int]) -> tuple[list[str], bool]:
    """The deltas up to the stop (the last one is what `flush` gives), and whether a stop string matched."""
    deltas: list[str] = []
    for token_id in ids:
        delta, stopped = text.append(token_id)
        deltas.append(delta)
        if stopped:
            return [*deltas, text.flush()], True
    return [*deltas, text.flush()], False


def run_pieces(pieces: list[str], stop: list[str], **options: bool | int) -> tuple[str, bool]:
    encoded = [piece.encode() for piece in pieces]
    tokenizer, backend = byte_level(encoded)
    text = IncrementalText(tokenizer, stop=stop, **options)  # type: ignore[arg-type]
    deltas, stopped = stream(text, ids_of(backend, encoded))
    return "".join(deltas), stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped"),
    [
        (["ab", "cd", "ef"], ["bcde"], "a", True),
        (["ab", "cd", "xx"], ["bcde"], "abcdxx", False),
        (["ab", "cd"], ["bcde"], "abcd", False),
        (["abcdef"], ["de", "b"], "a", True),
        (["abcdef"], ["bcde", "cd"], "ab", True),
        (["ab", "cdef"], ["cd", "abcd"], "", True),
        (["aa", "ab"], ["aab"], "a", True),
        (["a\n", "\n", "b"], ["\n\n"], "a", True),
        (["stop"], ["stop"], "", True),
        (["x", "é", "y"], ["é"], "x", True),
    ],
)
def test_stop_strings_match_across_token_edges(
    pieces: list[str], stop: list[str], text: str, stopped: bool
) -> None:
    assert run_pieces(pieces, stop) == (text, stopped)


def test_a_possible_stop_string_is_held_back_and_released() -> None:
    pieces = [b"ab", b"cd", b"xx"]
    tokenizer, backend = byte_level(pieces)
    text = IncrementalText(tokenizer, stop=["bcde"])
    assert [text.append(i) for i in ids_of(backend, pieces)] == [("a", False), ("", False), ("bcdxx", False)]
    assert text.flush() == ""


def test_the_stop_string_is_included_on_request() -> None:
    assert run_pieces(["ab", "cd", "ef"], ["bcde"], include_stop_str_in_output=True) == ("abcde", True)


def test_after_a_stop_nothing_more_comes() -> None:
    text = IncrementalText(BYTES, stop=["b"])
    assert [text.append(i) for i in b"abc"] == [("a", False), ("", True), ("", True)]
    assert text.flush() == ""


def test_stop_strings_wait_for_min_tokens() -> None:
    assert run_pieces(["a", "b", "c", "b", "d"], ["b"], min_tokens=3) == ("abc", True)
    assert run_pieces(["a", "b"], ["b"], min_tokens=2) == ("a", True)
    # Begins before min_tokens, ends after it.
    assert run_pieces(["a", "b", "c"], ["bc"], min_tokens=3) == ("a", True)
    # Ended before min_tokens: passed over for good, also where another stop string still holds it back.
    assert run_pieces(["x", "b", "c", "d"], ["b", "bcz"], min_tokens=3) == ("xbcd", False)


def test_split_characters_are_never_shown_broken() -> None:
    text = IncrementalText(BYTES)
    deltas, _ = stream(text, BYTES.encode("잘🙂é", add_bos=False))
    assert deltas == ["", "", "잘", "", "", "", "🙂", "", "é", ""]


def test_a_character_cut_off_by_the_end_is_one_replacement_in_both_modes() -> None:
    ids = BYTES.encode("ok🙂", add_bos=False)[:-1]
    deltas, _ = stream(IncrementalText(BYTES, stop=["never"]), ids)
    assert deltas[-1] == "\ufffd"
    assert "".join(deltas) == "ok\ufffd" == BYTES.decode(ids)


def test_truly_broken_bytes_do_not_block_what_follows() -> None:
    text = IncrementalText(BYTES)
    assert [text.append(i)[0] for i in (0xF0, 0x9F, ord("a"))] == ["", "", "\ufffda"]
    assert text.append(0xFF)[0] == "\ufffd"


def test_chosen_special_tokens_are_shown_though_others_are_skipped() -> None:
    ids = [EOS, IM_START, *b"hi", EOS]
    shown = BYTES.special_ids(["<|im_start|>", "hi", "<|none|>", "a"])
    assert shown == {IM_START}
    text = IncrementalText.of(BYTES, SamplingParams(shown_special_ids=shown))
    assert [text.append(i)[0] for i in ids] == ["", "<|im_start|>", "h", "i", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [IM_START, *b"hi", EOS]
    assert "".join(stream(IncrementalText(BYTES), ids)[0]) == "hi"
    shown = IncrementalText(BYTES, stop=["<|eos|>"], skip_special_tokens=False)
    deltas, stopped = stream(shown, ids)
    assert ("".join(deltas), stopped) == ("<|im_start|>hi", True)


def test_the_text_of_a_request_follows_its_parameters() -> None:
    params = SamplingParams(
        stop=["b"], min_tokens=3, include_stop_str_in_output=True, skip_special_tokens=False
    )
    deltas, stopped = stream(IncrementalText.of(BYTES, params), [IM_START, *b"bab"])
    assert ("".join(deltas), stopped) == ("<|im_start|>bab", True)


def test_sentencepiece_drops_only_the_first_space() -> None:
    tokens = [f"{SPACE}Hello", f"{SPACE}world", f"{SPACE}", "<0xC3>", "<0xA9>"]
    tokenizer, backend = sentencepiece(tokens)
    for ids in ([0, 1], [2, 0, 2, 1], [2, 2, 0], [3, 4, 0], [0, 3, 4, 1]):
        deltas, _ = stream(IncrementalText(tokenizer), ids)
        assert "".join(deltas) == tokenizer.decode(ids) == backend.decode(ids)
    deltas, _ = stream(IncrementalText(tokenizer, continues=True), [0, 1])
    assert deltas == [" Hello", " world", ""]


TEXTS = st.text(
    st.sampled_from("ab\n \u00e9\u4e16\U0001f642\u200d\ufffd") | st.characters(codec="utf-8"), max_size=24
)


@st.composite
def splits(draw: st.DrawFn) -> tuple[str, list[bytes], list[str]]:
    """A text, its bytes cut anywhere, and stop strings that often occur in it."""
    text = draw(TEXTS)
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=len(data))))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if data[a:b]]
    stops: list[str] = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        part = text[start : start + draw(st.integers(1, 4))] + draw(st.sampled_from(["", "", "a", "\n"]))
        stops += [part] if part else []
    return text, pieces, stops


def first_match(text: str, stops: list[str], ends: range) -> tuple[int, int] | None:
    """(start, end) by trying every end, then the longest stop string."""
    for end in ends:
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts), end
    return None


@settings(max_examples=400, deadline=None)
@given(splits(), st.booleans())
def test_deltas_join_to_the_text_before_the_first_stop(
    case: tuple[str, list[bytes], list[str]], include: bool
) -> None:
    text, pieces, stops = case
    tokenizer, backend = byte_level(pieces)
    ids = ids_of(backend, pieces)
    assert tokenizer.decode(ids) == backend.decode(ids) == text
    match = first_match(text, stops, range(1, len(text) + 1))
    expected = text if match is None else text[: match[1] if include else match[0]]
    deltas, stopped = stream(IncrementalText(tokenizer, stop=stops, include_stop_str_in_output=include), ids)
    assert ("".join(deltas), stopped) == (expected, match is not None)
    # Every delta was right when it was sent: nothing of a stop string, no half character.
    for k in range(len(deltas)):
        assert expected.startswith("".join(deltas[:k]))


@settings(max_examples=300, deadline=None)
@given(splits(), st.integers(0, 6))
def test_min_tokens_agrees_with_brute_force(
    case: tuple[str, list[bytes], list[str]], min_tokens: int
) -> None:
    text, pieces, stops = case
    tokenizer, backend = byte_level(pieces)
    # Characters known after each token; matches must end in those of the min_tokens-th token or later.
    known = [len(b"".join(pieces[:k]).decode("utf-8", "ignore")) for k in range(len(pieces) + 1)]
    first = min(max(min_tokens, 1), len(pieces) + 1)
    match = first_match(text, stops, range(known[first - 1] + 1, len(text) + 1))
    deltas, stopped = stream(
        IncrementalText(tokenizer, stop=stops, min_tokens=min_tokens), ids_of(backend, pieces)
    )
    assert ("".join(deltas), stopped) == (text if match is None else text[: match[0]], match is not None)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.binary(min_size=1, max_size=3) | st.sampled_from([b"\xf0\x9f", b"\x99", b"\xe4", b"a"]),
        max_size=12,
    )
)
def test_any_bytes_stream_as_the_package_decodes_them(pieces: list[bytes]) -> None:
    tokenizer, backend = byte_level(pieces)
    ids = ids_of(backend, pieces)
    deltas, _ = stream(IncrementalText(tokenizer, stop=["zzz"]), ids)
    assert "".join(deltas) == tokenizer.decode(ids) == backend.decode(ids)


def test_a_token_costs_the_same_late_in_a_long_answer() -> None:
    text = IncrementalText(BYTES, stop=["never to be found", "\n\n\n"])

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for i in range(count):
            text.append(97 + i % 26)
        return time.perf_counter() - start

    early = min(seconds(2_000) for _ in range(5))
    seconds(50_000)
    late = min(seconds(2_000) for _ in range(5))
    assert late < 5 * early
