"""Carries out the parts of a program, one after the other, on a backend. Runs in the backend's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

from .backend import Backend, Completion
from .budget import Budget
from .errors import BackendError, ProgramError
from .expr import Begin, End, Expr, Gen, Message, Sampling, Select, Seq, Text
from .transcript import Transcript


class Slot(Protocol):
    """Where an answer goes."""

    def show(self, piece: str) -> None:
        """A piece of the text has come."""
        ...

    def fill(self, text: str, meta: Completion | Choice) -> None:
        """The text is whole."""
        ...


class Choice:
    """How a `select` came out."""

    def __init__(
        self, choices: tuple[str, ...], scores: list[float], prompt_tokens: int, cached: int
    ) -> None:
        self.scores = dict(zip(choices, scores, strict=True))
        """Mean log-prob per token of each choice."""
        self.prompt_tokens = prompt_tokens
        """Of all choices together."""
        self.cached_tokens = cached

    @property
    def best(self) -> str:
        """The likeliest; of equals the first."""
        return max(self.scores, key=lambda text: self.scores[text])


class Interpreter:
    """One state's: its transcript grows by what is executed."""

    def __init__(
        self,
        backend: Backend,
        budget: Budget,
        sampling: Sampling,
        transcript: Transcript,
        show: Callable[[str], None],
    ) -> None:
        """`show` gets the program's own texts as they are added; answers go to their slots."""
        self.transcript = transcript
        self.where: str | None = None
        """The line that added what is being executed."""
        self._backend = backend
        self._budget = budget
        self._sampling = sampling
        self._show = show

    async def execute(self, expr: Expr, slots: Iterator[Slot]) -> None:
        """Executes a part; `slots` has one for each of its places to fill in, in order. Raises `ProgramError`."""
        match expr:
            case Text():
                self._add(expr.text)
            case Message():
                await self._begin(expr.role, expr.where)
                await self.execute(expr.content, slots)
                self._end(expr.role, expr.where)
            case Begin():
                await self._begin(expr.role, expr.where)
            case End():
                self._end(expr.role, expr.where)
            case Seq():
                for part in expr.parts:
                    await self.execute(part, slots)
            case Gen():
                await self._generate(expr, next(slots))
            case Select():
                await self._select(expr, next(slots))

    async def branch(self, where: str) -> Transcript:
        """The transcript for a branch. The text that all branches have is counted here, once."""
        pending = self.transcript.pending
        if pending:
            try:
                ids = await self._backend.encode_behind(pending, begins=self._begins)
            except BackendError as error:
                raise ProgramError(str(error), where) from error
            self._pay(len(ids), where)
            self.transcript.paid = len(ids)
        return self.transcript.copy()

    def _pay(self, tokens: int, where: str) -> None:
        self._budget.spend(max(0, tokens - self.transcript.paid), where)

    def _add(self, text: str) -> None:
        if text:
            self._check_place("a text", self.where)
            self.transcript.add(text)
            self._show(text)

    async def _begin(self, role: str, where: str) -> None:
        transcript = self.transcript
        if transcript.open:
            raise ProgramError(
                f"a {role} message begins inside the {transcript.roles[-1]} message; messages do not nest",
                where,
            )
        try:
            frame = await self._backend.frame((*transcript.roles, role))
        except BackendError as error:
            raise ProgramError(f"a {role} message cannot be written: {error}", where) from error
        transcript.add_frame(frame)
        transcript.roles.append(role)
        transcript.contents.append("")
        transcript.open = True
        self._show(frame)

    def _end(self, role: str, where: str) -> None:
        transcript = self.transcript
        if not transcript.open or transcript.roles[-1] != role:
            raise ProgramError(f"no {role} message is open here", where)
        # What the template writes behind it comes with the next message: it may depend on that.
        transcript.open = False

    async def _generate(self, gen: Gen, slot: Slot) -> None:
        called = f"gen({gen.name!r})" if gen.name else "gen()"
        self._check_place(called, gen.where)
        sampling = replace(self._sampling, **gen.sampling)
        try:
            await self._know_pending(gen.where)
            async with self._budget.room(sampling.max_tokens, gen.where) as room:
                granted = replace(
                    sampling, max_tokens=room.granted, min_tokens=min(sampling.min_tokens, room.granted)
                )
                answer = await self._backend.complete(self.transcript.ids, granted, gen.shape, slot.show)
                room.used = answer.completion_tokens
        except BackendError as error:
            raise ProgramError(f"{called}: {error}", gen.where) from error
        if answer.finish_reason not in ("stop", "length"):
            raise ProgramError(f"{called}: the answer ended by {answer.finish_reason}", gen.where)
        if answer.finish_reason == "length" and granted.max_tokens < sampling.max_tokens:
            raise self._budget.exhausted(gen.where)
        if answer.cut_by_stop:
            # The tokens go beyond the text.
            self.transcript.add(answer.text)
        else:
            self.transcript.add_known(answer.token_ids, answer.text)
        slot.fill(answer.text, answer)

    async def _select(self, select: Select, slot: Slot) -> None:
        called = f"select({select.name!r})" if select.name else "select()"
        self._check_place(called, select.where)
        transcript = self.transcript
        try:
            prompts, start = await self._prompts(select)
            self._budget.spend(sum(len(ids) - start for ids in prompts), select.where)
            scores = await self._backend.score(prompts, start)
        except BackendError as error:
            raise ProgramError(f"{called}: {error}", select.where) from error
        means = [sum(row) / len(row) for row in scores.logprobs]
        choice = Choice(select.choices, means, scores.prompt_tokens, scores.cached_tokens)
        best = choice.best
        transcript.ids, transcript.pending = prompts[select.choices.index(best)], ""
        transcript.paid = 0
        transcript.note(best)
        slot.show(best)
        slot.fill(best, choice)

    async def _prompts(self, select: Select) -> tuple[list[list[int]], int]:
        """The tokens up to the end of each choice, and where they may differ for the first time.

        A choice is tokenized together with the text before it, as it would be in a prompt: where its first letters join
        the last token of that text, the joined token is a part of it.
        """
        transcript = self.transcript
        begins = self._begins
        encode = partial(self._backend.encode_behind, begins=begins)
        before = await encode(transcript.pending) if transcript.pending else []
        endings = await asyncio.gather(*(encode(transcript.pending + text) for text in select.choices))
        common = min(_same(before, ending) for ending in endings)
        common = min(common, *(len(ending) - 1 for ending in endings))
        start = len(transcript.ids) + common
        if start < 1:
            raise ProgramError("there must be a text before the choices", select.where)
        self._pay(common, select.where)
        return [transcript.ids + ending for ending in endings], start

    async def _know_pending(self, where: str) -> None:
        """Turns the text behind the ids into ids."""
        transcript = self.transcript
        if transcript.pending:
            more = await self._backend.encode_behind(transcript.pending, begins=self._begins)
            self._pay(len(more), where)
            transcript.ids += more
            transcript.pending, transcript.paid = "", 0
        if not transcript.ids:
            raise ProgramError("there is no text yet that the model could go on from", where)

    @property
    def _begins(self) -> bool:
        return not self.transcript.ids and not self.transcript.roles

    def _check_place(self, what: str, where: str | None) -> None:
        transcript = self.transcript
        if transcript.roles and not transcript.open:
            raise ProgramError(
                f"{what} stands behind the {transcript.roles[-1]} message and in none: put it into user(…) or"
                " assistant(…)",
                where,
            )


def _same(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
