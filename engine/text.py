"""A request's tokens as text, piece by piece: whole characters only, and nothing of a stop string leaks out.

Tokens -> bytes (`Tokenizer.output_bytes`) -> characters (`TokenText`) -> final text (`StopMatcher`). Each stage keeps
only what it cannot decide yet, so a token costs the same at the start and at the end of a long answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .request import SamplingParams
from .tokenizer import Tokenizer


class TokenText:
    """Ids to characters. The pieces join to `tokenizer.decode(ids)`: the bytes of an unfinished character wait."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        continues: bool = False,
    ) -> None:
        """`shown`: special tokens that are not skipped. `continues`: the text goes on after other text, so the space
        of a first SentencePiece word stays."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._shown = shown
        self._drop_space = tokenizer.strips_leading_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> str:
        """The characters that the token completes."""
        skip = self._skip_special and token_id not in self._shown
        data = self._tokenizer.output_bytes(token_id, skip)
        if data and self._drop_space:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for the character that will not be finished; empty otherwise."""
        return self._decoder.decode(b"", True)


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, and holds back what could become one.

    The first match is the one that *ends* first, so it does not depend on where the pieces are cut; of several that
    end together it is the longest.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the text ends after the stop string instead of before it. Empty strings are ignored."""
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""

    def append(self, text: str, *, check: bool = True) -> tuple[str, bool]:
        """Returns the text that is now final and whether a stop string matched.

        With `check` off a stop string that ends in this piece is passed over, for good.
        """
        if not self._stops or not text:
            return text, False
        text, old = self._held + text, len(self._held)
        match = self._first_match(text, old) if check else None
        if match is not None:
            self._held = ""
            start, end = match
            return text[: end if self._include else start], True
        final = len(text) - self._undecided(text)
        self._held = text[final:]
        return text[:final], False

    def flush(self) -> str:
        """What was held back, now that no stop string can follow."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old: int) -> tuple[int, int] | None:
        """(start, end) of the match that ends first after the first `old` characters."""
        matches: list[tuple[int, int]] = []
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                matches.append((start, start + len(stop)))
        return min(matches, key=lambda match: (match[1], match[0]), default=None)

    def _undecided(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string without completing it."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if start >= 0:
                longest = max(longest, len(text) - start)
        return longest


class IncrementalText:
    """The `OutputText` of a request.

    The loop decides about end tokens: it does not append the one that ended the request, so that its text stays out,
    and calls `flush` once after the last token. After a match the rest of the text is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        continues: bool = False,
    ) -> None:
        """A stop string counts if the token that completes it is at least the `min_tokens`-th (from 1).

        `shown`, `continues`: see `TokenText`.
        """
        self._characters = TokenText(
            tokenizer, skip_special_tokens=skip_special_tokens, shown=shown, continues=continues
        )
        self._stops = StopMatcher(stop, include=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._count = 0
        self._stopped = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams, *, continues: bool = False) -> IncrementalText:
        """The text of a request with these parameters."""
        return cls(
            tokenizer,
            stop=params.stop,
            min_tokens=params.min_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown=params.shown_special_ids,
            continues=continues,
        )

    def append(self, token_id: int) -> tuple[str, bool]:
        """Adds a token; returns the text that is now final and whether a stop string matched."""
        if self._stopped:
            return "", True
        self._count += 1
        characters = self._characters.append(token_id)
        final, self._stopped = self._stops.append(characters, check=self._count >= self._min_tokens)
        return final, self._stopped

    def flush(self) -> str:
        """The held-back rest, once no more tokens come; empty after a match. Calling it again gives nothing."""
        if self._stopped:
            return ""
        self._stopped = True
        return self._stops.flush() + self._characters.flush()
