"""A tokenizer as llguidance wants to see it."""

from __future__ import annotations

from functools import cached_property

from .tokenizer import Tokenizer


class Vocabulary:
    """The bytes of every id, and a way to encode.

    The end token that llguidance sees is one that no model has: which ids end an answer is a matter of the request.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)] + [b"<end of answer>"]
        self.eos_token_id = vocab_size
        special = {token for token in range(vocab_size) if tokenizer.is_special(token)}
        self._special = frozenset({*special, *end_ids, vocab_size})
        self.special_token_ids = sorted(self._special)

    def __call__(self, text: str | bytes) -> list[int]:
        """The usual tokens of a text *within* another one: of just these bytes, and no special ones, whatever it looks like."""
        data = text.encode() if isinstance(text, str) else text
        # SentencePiece puts a space before a text, hence something else that is taken away again.
        return self._encode(b"", data) or self._encode(b"\n", data) or self._longest(data)

    def _encode(self, before: bytes, data: bytes) -> list[int] | None:
        try:
            text = (before + data).decode()
        except UnicodeDecodeError:
            return None
        skip = self._tokenizer.encode(before.decode(), add_bos=False)
        ids = self._tokenizer.encode(text, add_bos=False)
        rest = ids[len(skip) :]
        sound = b"".join(self.tokens[token] for token in rest) == data and self._special.isdisjoint(rest)
        return rest if sound and ids[: len(skip)] == skip else None

    def _longest(self, data: bytes) -> list[int]:
        """The longest token first, and so on; bytes that have no token are left out."""
        ids: list[int] = []
        while data:
            for end in range(min(len(data), self._most), 0, -1):
                token = self._by_bytes.get(data[:end])
                if token is not None:
                    ids.append(token)
                    break
            else:
                end = 1
            data = data[end:]
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        # Of several tokens for the same bytes the first.
        ids = [token for token in reversed(range(len(self.tokens))) if token not in self._special]
        return {self.tokens[token]: token for token in ids}

    @cached_property
    def _most(self) -> int:
        return max(map(len, self._by_bytes), default=0)
