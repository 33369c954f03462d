"""Prompts, their right answers, and runs over a disk that has some of them: the stage for tests of faults."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.faulty_run import FaultyRun
from helpers.tiny_engine import TinyDevice, output
from tierax.engine.request import Request, SamplingParams

PAGE = 4
LENGTH = 40
WHOLE = LENGTH - PAGE
"""Tokens of a prompt that can be hits: one must be computed, and only whole pages are kept."""
KEPT = 11
"""Pages of a prompt and its answer: the KV of the last token is never computed."""
OPTIONS = SamplingParams(max_tokens=6, temperature=0.0)
STEP = 0.0101
"""Seconds that a step takes here, and a bit."""
COPY = 0.4
"""Seconds that a copy may seem to take where the clock runs 20 times too fast: to wait is all that these tests do."""


def prompt(name: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(256) for _ in range(length)]


Start = Callable[..., FaultyRun]


class Stage:
    """A device, a directory in which the prompts 0 to 3 are stored, and what is right to say."""

    def __init__(self, device: TinyDevice, stored: Path) -> None:
        self.device = device
        self._stored = stored
        self._right: dict[int, list[int]] = {}
        for name in range(10):
            self.right(name)
        run = FaultyRun(device, stored)
        for name in range(4):
            assert self.ask(run, name).cached_tokens == 0
        run.finish()
        assert run.tiers.writer.stats.written_pages == 4 * KEPT
        run.close()

    def right(self, name: int) -> list[int]:
        """The answer without any cache. Not to be asked for while steps are in flight."""
        if name not in self._right:
            cold = self.device.run(enabled=False)
            request = cold.add(prompt(name), OPTIONS)
            cold.finish()
            self._right[name] = output(request)
        return self._right[name]

    def ask(self, run: FaultyRun, name: int, **options: Any) -> Request:
        """Answers a prompt, rightly."""
        request = run.answer(prompt(name), OPTIONS, **options)
        assert output(request) == self.right(name)
        return request

    def expect_recovery(self, run: FaultyRun, name: int) -> None:
        """The fault is gone: all by itself the disk takes the prompt and has it, whole."""
        run.store.heal()
        run.idle_tick = 0.0
        run.forget()
        self.ask(run, name)
        run.forget()
        assert run.store.calls["write"] >= run.tiers.writer.stats.written_pages
        assert run.on_disk() >= set(run.keys(prompt(name)))
        reads = run.tiers.mover.stats.read
        pages, failures = reads.pages, sum(reads.failures.values())
        self.ask(run, name)
        run.finish()
        assert (reads.pages - pages, sum(reads.failures.values()) - failures) == (WHOLE // PAGE, 0)

    @contextmanager
    def runs(self, path: Path) -> Iterator[Start]:
        """`start(stored=…, …)` begins a run on the one directory below `path`; all runs are closed at the end."""
        started: list[FaultyRun] = []

        def start(*, stored: bool = False, **options: Any) -> FaultyRun:
            if stored:
                shutil.copytree(self._stored, path / "disk")
            started.append(FaultyRun(self.device, path / "disk", **options))
            return started[-1]

        try:
            yield start
        finally:
            for run in started:
                run.store.heal()
                run.close()
