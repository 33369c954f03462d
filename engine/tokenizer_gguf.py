"""The tokenizer that a GGUF file's metadata describes, built with the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

CONTROL, USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` of special tokens and of added ordinary ones."""

END_NAMES = frozenset(
    (
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|eot|>",
    )
)
"""Control tokens that end an answer whatever the metadata's ids say; most files name only one of theirs."""


class TokenizerError(ValueError):
    """A tokenizer's files or metadata are missing, broken or of an unknown kind."""


@dataclass(frozen=True, slots=True)
class SpecialIds:
    bos: int | None
    eos: int | None
    ends: frozenset[int]
    add_bos: bool


def _byte_alphabet() -> dict[str, int]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_OF_CHAR = _byte_alphabet()
"""Byte-level vocabularies write each byte as one printable character."""


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Words by a pattern, then bytes as characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _words(digits: str) -> str:
    """The Llama 3 family's word pattern; `digits` says how many digits make a word."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_words() -> str:
    """Tekken's pattern: a word also ends where capitals begin."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{upper}*{lower}+|{start}{upper}+{lower}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


@dataclass(frozen=True, slots=True)
class Pre:
    """How text is cut before merging, and what else goes with a `tokenizer.ggml.pre` name."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words_first: bool = False
    """A word that is a token is taken as it is, even where merges would not build it."""
    add_bos: bool = False
    """When the file does not say."""
    nfc: bool = False


_GPT2 = Pre(_gpt2)
_LLAMA3 = Pre(lambda: _split(_words(r"\p{N}{1,3}")), whole_words_first=True, add_bos=True)
_QWEN2 = Pre(lambda: _split(_words(r"\p{N}")), nfc=True)
PRE_TYPES: dict[str, Pre] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": Pre(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Pre(lambda: _split(_cased_words()), whole_words_first=True, add_bos=True),
}


def backend_from_gguf(metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Raises `TokenizerError` for a missing key or an unknown model or `pre` type."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = cast("list[str]", _array(metadata, "tokens"))
    if model == "gpt2":
        backend = _byte_level_bpe(metadata, tokens)
    elif model == "llama":
        backend = _sentencepiece_bpe(metadata, tokens)
    else:
        raise TokenizerError(f"tokenizer.ggml.model {model!r} is not supported: 'gpt2' and 'llama' are")
    types = [int(t) for t in _array(metadata, "token_type")] if _key("token_type") in metadata else []
    named = list(zip(tokens, types, strict=False))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, kind in named if kind == CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in named if kind == USER_DEFINED])
    ids = ids_from_gguf(metadata)
    if ids.add_bos and ids.bos is not None:
        backend.post_processor = with_bos(tokens[ids.bos], ids.bos)
    return backend


def ids_from_gguf(metadata: Mapping[str, object]) -> SpecialIds:
    """BOS, main EOS, all end tokens and whether raw prompts get a BOS.

    Raises `TokenizerError` if an id is not in the vocabulary.
    """
    tokens = _array(metadata, "tokens")

    def one(name: str) -> int | None:
        value = cast("int | None", metadata.get(_key(name)))
        if value is not None and not 0 <= value < len(tokens):
            raise TokenizerError(f"{_key(name)} {value} is not in the vocabulary of {len(tokens)}")
        return None if value is None else int(value)

    ends = {one(f"{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    types = _array(metadata, "token_type") if _key("token_type") in metadata else []
    ends |= {
        i
        for i, (t, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and t in END_NAMES
    }
    add_bos = metadata.get(_key("add_bos_token"))
    if add_bos is None:
        add_bos = metadata.get(_key("model")) == "llama" or _pre_type(metadata).add_bos
    return SpecialIds(
        one("bos_token_id"), one("eos_token_id"), frozenset(i for i in ends if i is not None), bool(add_bos)
    )


def with_bos(token: str, token_id: int) -> processors.PostProcessor:
    """Writes a BOS before each text that is encoded with special tokens."""
    return processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B:1"], special_tokens=[(token, token_id)]
    )


def _byte_level_bpe(metadata: Mapping[str, object], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    pre = _pre_type(metadata)
    merges = [_pair(str(merge)) for merge in _array(metadata, "merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=pre.whole_words_first)
    except Exception as e:  # the package raises bare Exception
        raise TokenizerError(f"{_key('merges')} do not fit the vocabulary: {e}") from e
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece_bpe(metadata: Mapping[str, object], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """SentencePiece merges the neighbours whose union has the best score: merges in order of the score."""
    scores = [float(s) for s in _array(metadata, "scores")]
    if len(scores) != len(tokens):
        raise TokenizerError(f"{_key('scores')} has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(vocab, key=lambda t: -scores[vocab[t]])
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = metadata.get(_key("unknown_token_id"))
    unk_token = tokens[int(cast(int, unknown))] if unknown is not None else None
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", "\u2581")
    parts: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_key("add_space_prefix"), True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(parts)
    return backend


def _pre_type(metadata: Mapping[str, object]) -> Pre:
    name = str(metadata.get(_key("pre"), "default"))
    if name not in PRE_TYPES:
        raise TokenizerError(
            f"{_key('pre')} {name!r} is not supported; known: {', '.join(sorted(PRE_TYPES))}"
        )
    return PRE_TYPES[name]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def _array(metadata: Mapping[str, object], name: str) -> Sequence[Any]:
    value = metadata.get(_key(name))
    if value is None or isinstance(value, str) or not hasattr(value, "__len__"):
        raise TokenizerError(f"the GGUF file has no {_key(name)} array")
    return cast("Sequence[Any]", value)
