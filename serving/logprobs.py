"""Log-probs in the two schemas of OpenAI: per position for chat, parallel lists for completions."""

from __future__ import annotations

from typing import Any

from ..engine.request import TokenLogprob
from ..engine.text import TokenText
from ..engine.tokenizer import Tokenizer

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON has not."""


def chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob], top: int) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}, …]}`, one entry per token, `top` likeliest in each."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        entry(position.token_id, position.logprob)
        | {"top_logprobs": [entry(*candidate) for candidate in position.top[:top]]}
        for position in logprobs
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds the completions schema for one choice piece by piece; offsets count characters of the choice's text."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._text = TokenText(tokenizer, skip_special_tokens=skip_special_tokens)

    def add(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """`{tokens, token_logprobs, top_logprobs, text_offset}` of the next tokens."""
        block: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for position in logprobs:
            chosen = self._token(position.token_id)
            likeliest = {
                self._token(token_id): _finite(value) for token_id, value in position.top[: self._top]
            }
            block["tokens"].append(chosen)
            block["token_logprobs"].append(_finite(position.logprob))
            block["top_logprobs"].append(likeliest | {chosen: _finite(position.logprob)})
            block["text_offset"].append(self._offset)
            self._offset += len(self._text.append(position.token_id))
        return block

    def _token(self, token_id: int) -> str:
        """A token's text; a part of a character is told byte by byte, so that two parts never look alike."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if logprob > _FLOOR else _FLOOR
