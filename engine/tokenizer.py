"""Text to token ids and back, from a Hugging Face directory or GGUF metadata, over the `tokenizers` package.

Encoding is the package's. Decoding is our own and works on bytes: every id stands for a fixed run of bytes, a text is
the UTF-8 reading of their concatenation, so a stream and a whole text cannot disagree (see `engine.text`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers

from .tokenizer_gguf import BYTE_OF_CHAR, TokenizerError, backend_from_gguf, ids_from_gguf

__all__ = ["Tokenizer", "TokenizerError"]

SPACE = "\u2581"
"""How SentencePiece vocabularies write a space."""


class Tokenizer:
    """A vocabulary with its special tokens and chat templates. Immutable; safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`eos_ids` join `eos_id`; `add_bos` without a `bos_id` is dropped.

        Raises `TokenizerError` if the vocabulary's way of decoding is not a known one.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._byte_level, self.strips_leading_space = _decoding(backend)
        self._special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the largest id; a model's logits may be wider."""
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = frozenset(eos_ids) | (frozenset() if eos_id is None else {eos_id})
        """Every id that ends an answer, from all sources."""
        self.add_bos = add_bos and bos_id is not None
        """Whether a raw completion's prompt gets a BOS; a templated prompt never does."""
        self.chat_templates = dict(chat_templates or {})
        """Jinja sources by name; the usual one is `default`."""

    @classmethod
    def from_hf_dir(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json and the files around it (tokenizer_config, special_tokens_map, config, …).

        End tokens are the union of the tokenizer's, config.json's and generation_config.json's.
        Raises `TokenizerError` naming the file at fault.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{path} has no tokenizer.json (a slow tokenizer must be converted first)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the package raises bare Exception
            raise TokenizerError(f"{file} cannot be read: {e}") from e
        config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
        _add_missing_tokens(backend, config)

        def named(key: str) -> int | None:
            text = _token_text(config.get(key))
            token = None if text is None else backend.token_to_id(text)
            if text is not None and token is None:
                raise TokenizerError(f"{path}: {key} {text!r} is not in the vocabulary")
            return token

        bos_id = named("bos_token")
        add_bos = config.get("add_bos_token")
        if add_bos is None:
            add_bos = bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
        return cls(
            backend,
            bos_id=bos_id,
            eos_id=named("eos_token"),
            eos_ids=[
                token
                for name in ("config.json", "generation_config.json")
                for token in _as_ids(_read_json(path / name).get("eos_token_id"), path / name)
            ],
            add_bos=bool(add_bos),
            chat_templates=_hf_templates(path, config.get("chat_template")),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Builds the tokenizer that a GGUF file's `tokenizer.*` metadata describes.

        Raises `TokenizerError` naming the model or `pre` type that is not known.
        """
        ids = ids_from_gguf(metadata)
        prefix = "tokenizer.chat_template"
        templates = {
            key.removeprefix(prefix).lstrip(".") or "default": value
            for key, value in metadata.items()
            if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
        }
        return cls(
            backend_from_gguf(metadata),
            bos_id=ids.bos,
            eos_id=ids.eos,
            eos_ids=ids.ends,
            add_bos=ids.add_bos,
            chat_templates=templates,
        )

    def save(self, path: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the end tokens in generation_config.json,
        so that `from_hf_dir(path)` gives this tokenizer again. Other keys of an existing generation_config stay."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        templates: object = self.chat_template
        if set(self.chat_templates) - {"default"}:
            templates = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            "chat_template": templates,
        }
        generation = _read_json(path / "generation_config.json") | {"eos_token_id": sorted(self.eos_ids)}
        self._backend.save(str(path / "tokenizer.json"))
        for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
            kept = {key: v for key, v in value.items() if v is not None}
            (path / name).write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    @property
    def chat_template(self) -> str | None:
        """Source of the usual chat template."""
        return self.chat_templates.get("default")

    @property
    def bos_token(self) -> str | None:
        """The BOS token as it is written in templates."""
        return None if self.bos_id is None else self._backend.id_to_token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        """The main end token as it is written in templates."""
        return None if self.eos_id is None else self._backend.id_to_token(self.eos_id)

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Ids of a text; special tokens written in it are recognised.

        Pass `add_bos=tokenizer.add_bos` for raw text and `add_bos=False` for a rendered template.
        A text that starts with the BOS token does not get a second one.
        Raises `ValueError` for lone surrogates, which no UTF-8 text can hold.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            bad = ord(text[e.start])
            raise ValueError(
                f"text is not valid Unicode: lone surrogate U+{bad:04X} at character {e.start}"
            ) from e
        # The batch call lets go of the interpreter while it works, so that a long prompt blocks nobody.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of some ids; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        SentencePiece vocabularies write a space before the first word: it is dropped.
        """
        data = b"".join(self.output_bytes(i, skip_special_tokens) for i in ids)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def output_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What a token adds to a text: its bytes, or nothing for a special token that is to be skipped."""
        return b"" if skip_special_tokens and token_id in self._special else self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; may be a part of a character. Empty outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            data = b"" if token is None else self._piece_bytes(token_id, token)
            if token is not None:
                self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """A token on its own as text; U+FFFD where its bytes are no whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` drops the token from texts."""
        return token_id in self._special

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those texts that are special tokens."""
        ids = {self._backend.token_to_id(text) for text in texts}
        return self._special & ids

    def _piece_bytes(self, token_id: int, token: str) -> bytes:
        if token_id in self._special:
            return token.encode()
        if self._byte_level:
            if any(char not in BYTE_OF_CHAR for char in token):
                return token.encode()  # an added token, written as it is
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(SPACE, " ").encode()


def _decoding(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte-level characters instead of SentencePiece pieces, a leading space is dropped)."""
    decoder: dict[str, Any] = {"type": None}
    if backend.decoder is not None:
        decoder = json.loads(cast(Any, backend.decoder).__getstate__())
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, any(part.get("prepend_scheme") in ("always", "first") for part in parts)
    if {"Replace", "Fuse"} <= kinds:
        return False, "Strip" in kinds
    raise TokenizerError(
        f"the tokenizer's decoder {sorted(map(str, kinds))} is not supported: byte-level and SentencePiece are"
    )


def _read_json(file: Path) -> dict[str, Any]:
    """The file's object; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise TokenizerError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds no JSON object")
    return value


def _token_text(value: object) -> str | None:
    """A special token, written as text or as the object of an added token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_ids(value: object, file: Path) -> list[int]:
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids = [i for i in given if type(i) is int]
    if ids != given:
        raise TokenizerError(f"{file}: eos_token_id {value!r} is neither an id nor a list of ids")
    return ids


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json lists; each must land on its id."""
    listed = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
    for token_id in sorted(i for i in listed if backend.id_to_token(i) is None):
        token = listed[token_id]
        flags = {
            k: token[k] for k in ("special", "lstrip", "rstrip", "single_word", "normalized") if k in token
        }
        backend.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
        got = backend.token_to_id(token["content"])
        if got != token_id:
            raise TokenizerError(f"added token {token['content']!r} should have id {token_id} but gets {got}")


def _hf_templates(path: Path, value: object) -> dict[str, str]:
    """Templates by name: tokenizer_config's text or list, overridden by files of their own."""
    if isinstance(value, str):
        templates = {"default": value}
    elif isinstance(value, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in value}
    else:
        templates = {}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    main = path / "chat_template.jinja"
    if main.is_file():
        templates["default"] = main.read_text(encoding="utf-8")
    return templates
