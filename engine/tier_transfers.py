"""The movements between three tiers, as the loop drives them: `Prefetcher` upwards, `Writer` downwards, one mover."""

from __future__ import annotations

from collections.abc import Callable

from ..cache.moves import Mover
from ..cache.writer import Writer
from .prefetch import Prefetcher
from .request import Request


class TierTransfers:
    """Implements `plan.Transfers`."""

    def __init__(
        self,
        mover: Mover,
        prefetcher: Prefetcher,
        writer: Writer,
        look_around: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float],
    ) -> None:
        """`look_around` is called every turn: it takes in what others have written to the disk. `clock` says when a
        pause is over even while there are no turns."""
        self.mover = mover
        self._look_around = look_around
        self.prefetcher = prefetcher
        self.writer = writer
        self._clock = clock
        prefetcher.on_bad_pages = writer.delete
        prefetcher.order_saves = writer.save_evicted

    @property
    def busy(self) -> bool:
        return self.prefetcher.busy or self.writer.busy(self._clock())

    def start(self, request: Request, now: float, running: int) -> None:
        self.prefetcher.start(request, now, running)

    def poll(self, now: float) -> None:
        for move in self.mover.poll(now):
            if move.kind == "read":
                self.prefetcher.observe_read(move, now)
            elif move.kind == "write":
                self.writer.observe_write(move, now)
            elif move.kind == "save":
                self.writer.observe_save(move)
        self._look_around()
        self.prefetcher.poll()

    def ready(self, request: Request, now: float) -> bool:
        return self.prefetcher.ready(request, now)

    def loadable(self, request: Request) -> bool:
        return self.prefetcher.loads.loadable(request)

    def load(self, request: Request) -> bool:
        return self.prefetcher.loads.load(request)

    def loaded(self, request: Request, now: float) -> bool:
        return self.prefetcher.loads.loaded(request, now)

    def unload(self, request: Request) -> None:
        self.prefetcher.loads.unload(request)

    def end(self, request: Request) -> None:
        self.prefetcher.end(request)

    def before_step(self) -> None:
        self.writer.save_evicted()

    def after_step(self, now: float) -> None:
        self.writer.push(now)

    def prefilled(self, tokens: int, seconds: float, now: float) -> None:
        self.prefetcher.choice.prefill.measure(tokens, seconds, now)

    def reset(self) -> set[int]:
        self.prefetcher.reset()
        self.writer.reset()
        return self.mover.reset()

    def check(self) -> None:
        self.prefetcher.check()
