"""Log-probs in the two schemas of OpenAI: per position for chat, parallel lists for completions."""

from __future__ import annotations

from typing import Any

from ...engine.request import TokenLogprob
from ...engine.text import TokenText
from ...engine.tokenizer import Tokenizer

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON has not."""


def chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob], top: int) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}, …]}`, one entry per token, `top` likeliest in each."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    content = [
        entry(position.token_id, position.logprob)
        | {"top_logprobs": [entry(*candidate) for candidate in position.top[:top]]}
        for position in logprobs
    ]
    return {"content": content, "refusal": None}


def prompt_entries(
    tokenizer: Tokenizer, logprobs: list[TokenLogprob], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's form of a prompt's log-probs: None for the first token, then `{id: {logprob, rank, decoded_token}}` of the
    token itself and of the `top` likeliest."""

    def told(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}

    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for position in logprobs:
        likeliest = enumerate(position.top[:top], 1)
        entry = {str(token_id): told(token_id, value, rank) for rank, (token_id, value) in likeliest}
        chosen = told(position.token_id, position.logprob, position.rank)
        entries.append(entry | {str(position.token_id): chosen})
    return entries


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; a part of a character is told byte by byte, so that two parts never look alike."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """Builds the completions schema for one choice piece by piece; offsets count characters of the choice's text."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._text = TokenText(tokenizer, skip_special_tokens=skip_special_tokens)

    def add_echo(self, prompt: list[int], logprobs: list[TokenLogprob], text: str) -> dict[str, Any]:
        """The block of a prompt that is repeated as `text`; its first token has no log-prob."""
        tokenizer = self._tokenizer
        skips = tokenizer.decode(prompt) == text
        offsets = CompletionLogprobs(tokenizer, self._top, skip_special_tokens=skips)
        first = offsets.add([TokenLogprob(prompt[0], 0.0, ())])
        if not skips and prompt[0] == tokenizer.bos_id and not text.startswith(first["tokens"][0]):
            # The tokenizer has put it before the text.
            offsets._offset = 0
        block = first | {"token_logprobs": [None], "top_logprobs": [None]}
        for name, rest in offsets.add(logprobs).items():
            block[name] += rest
        self._offset = len(text)
        return block

    def add(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """`{tokens, token_logprobs, top_logprobs, text_offset}` of the next tokens."""
        block: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for position in logprobs:
            chosen = token_text(self._tokenizer, position.token_id)
            likeliest = {
                token_text(self._tokenizer, token_id): finite(value)
                for token_id, value in position.top[: self._top]
            }
            block["tokens"].append(chosen)
            block["token_logprobs"].append(finite(position.logprob))
            block["top_logprobs"].append(likeliest | {chosen: finite(position.logprob)})
            block["text_offset"].append(self._offset)
            self._offset += len(self._text.append(position.token_id))
        return block


def finite(logprob: float) -> float:
    """A log-prob that JSON can hold."""
    return logprob if logprob > _FLOOR else _FLOOR
