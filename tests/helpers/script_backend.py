"""A backend for programs that says what a script tells it: a byte is a token, and messages look like `<user>…</user>`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tierax.lang.backend import Backend, Completion, Scores
from tierax.lang.errors import BackendError
from tierax.lang.expr import Sampling, Shape

Script = Callable[[str], str]
"""The text so far -> the answer, which must not be empty."""


class ScriptBackend(Backend):
    """`calls` are the prompts, in the order in which they came, with their sampling and shape.

    Prompts count as cached as far as they begin like one that was answered before. `gate`, if set, is waited for before
    each answer, and so is, for ten seconds at most, that as many run at once as `together` says of its prompt; `likely`
    are the texts that `score` likes.
    """

    def __init__(self, script: Script = lambda text: "ok", *, likely: Sequence[str] = ()) -> None:
        super().__init__()
        self.script = script
        self.likely = likely
        self.calls: list[tuple[str, Sampling, Shape | None]] = []
        self.scored: list[tuple[list[str], int]] = []
        self.gate: asyncio.Event | None = None
        self.together: Callable[[str], int] = lambda prompt: 1
        self.running = self.most_running = self.cancelled = 0
        self.renders = 0
        self._seen: list[list[int]] = []

    async def encode(self, text: str, *, begins: bool) -> list[int]:
        return [*([1] if begins else []), *text.encode()]

    async def render(self, messages: Sequence[Mapping[str, str]], *, answer: bool) -> str:
        self.renders += 1
        if any(message["role"] == "system" for message in messages[1:]):
            raise BackendError("a system message must come first")
        text = "".join(f"<{m['role']}>{m['content']}</{m['role']}>\n" for m in messages)
        return text + ("<assistant>" if answer else "")

    async def complete(
        self, ids: list[int], sampling: Sampling, shape: Shape | None, on_text: Callable[[str], None]
    ) -> Completion:
        prompt = bytes(ids).decode()
        self.calls.append((prompt, sampling, shape))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.001)
            if self.gate is not None:
                await self.gate.wait()
            async with asyncio.timeout(10):
                while self.most_running < self.together(prompt):
                    await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        text = self.script(prompt)
        cut = text[: sampling.max_tokens]
        stop = next((s for s in sampling.stop if s in cut), None)
        shown = cut if stop is None else cut[: cut.index(stop)]
        for letter in shown:
            on_text(letter)
        cached = max((_same(ids, seen) for seen in self._seen), default=0)
        self._seen.append([*ids, *cut.encode()])
        return Completion(
            shown,
            [*cut.encode()],
            "length" if cut != text and stop is None else "stop",
            len(ids),
            len(cut),
            cached,
            ttft=0.0,
            cut_by_stop=stop is not None,
        )

    async def score(self, prompts: list[list[int]], start: int) -> Scores:
        texts = [bytes(ids).decode() for ids in prompts]
        self.scored.append((texts, start))
        liked = [text.endswith(tuple(self.likely)) for text in texts]
        logprobs = [
            [-0.5 if like else -2.0] * (len(ids) - start) for ids, like in zip(prompts, liked, strict=True)
        ]
        return Scores(logprobs, sum(map(len, prompts)), start * len(prompts))


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
