"""The rig of fake_rig with three tiers beneath the loop: the real tree, prefetcher, writer and disk index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.probe import Prober
from tierax.cache.disk.shared_index import SharedIndex
from tierax.cache.disk.store import Stored
from tierax.cache.moves import Outcome
from tierax.cache.page_keys import PageKey
from tierax.cache.writer import Writer
from tierax.engine.plan import Transfers
from tierax.engine.prefetch import Prefetcher
from tierax.engine.prefetch_policy import PrefetchPolicy
from tierax.engine.tier_transfers import TierTransfers

from .fake_executor import ManualClock
from .fake_mover import FakeMover, FakeStore
from .fake_rig import Rig

PAGE_BYTES = 1000


class QuestionedStore:
    """Answers whether a page is there: at once, or from `answer` while it is `held`."""

    def __init__(self, store: FakeStore) -> None:
        self.asked: list[PageKey] = []
        self.held = False
        self.fault: Outcome | None = None
        self._store = store
        self._open: list[Callable[[], None]] = []

    def probe(self, key: PageKey, done: Callable[[Outcome], None]) -> None:
        self.asked.append(key)

        def answer() -> None:
            done(self.fault or (Outcome.OK if key in self._store.pages else Outcome.MISSING))

        if self.held:
            self._open.append(answer)
        else:
            answer()

    def answer(self) -> None:
        """Gives all answers, and those to the questions that follow."""
        self.held = False
        while self._open:
            self._open.pop(0)()


class TieredRig(Rig):
    """Of several `shared` rigs on one store each writes, and none knows of what the others write. `store` outlives the rig: a second one on the same store is a restart."""

    def __init__(
        self,
        *,
        host_pages: int = 32,
        store: FakeStore | None = None,
        disk_pages: int | None = None,
        prefetch: str = "wait_complete",
        max_wait: float = 10.0,
        clock: ManualClock | None = None,
        disk: bool = True,
        shared: bool = False,
        **options: Any,
    ) -> None:
        self.store = store or FakeStore()
        self._disk = disk
        self._shared = shared
        self.questions = QuestionedStore(self.store)
        """With `shared`: what is asked about pages that the index does not know."""
        self._disk_pages = disk_pages
        self._prefetch = prefetch
        self._max_wait = max_wait
        super().__init__(host_pages=host_pages, clock=clock, identity={"model": "fake"}, **options)

    def transfers(self, given: Transfers | None) -> Transfers:
        self.mover = FakeMover(self.device, self.store, self.clock, page_bytes=PAGE_BYTES)
        self.index = None
        if self._disk:
            capacity = None if self._disk_pages is None else self._disk_pages * PAGE_BYTES
            self.index = SharedIndex(capacity) if self._shared else DiskIndex(capacity)
            listed = [Stored(key, PAGE_BYTES) for key in self.store.pages]
            self.mover.delete(self.index.add_listed(listed))
        prober = None
        if self._shared:
            prober = Prober(self.questions, record_bytes=PAGE_BYTES, clock=self.clock)
        self.prefetcher = Prefetcher(
            self.cache,
            self.mover,
            self.index,
            page_bytes=PAGE_BYTES,
            policy=PrefetchPolicy.parse(self._prefetch),
            max_wait=self._max_wait,
            prober=prober,
        )
        self.writer = Writer(self.cache, self.mover, self.index, record_bytes=PAGE_BYTES)
        return TierTransfers(self.mover, self.prefetcher, self.writer, clock=self.clock)

    def step(self) -> bool:
        busy = super().step()
        self.check_disk()
        return busy

    def check_disk(self) -> None:
        """The store holds what the index says, no more than its capacity, heads before tails."""
        if self.index is None:
            return
        self.index.check()
        if self._shared:
            return
        stored = {key for key in self.store.pages if self.index.is_stored(key)}
        assert len(stored) == sum(self.index.is_stored(key) for key in self.store.pages)
        if self._disk_pages is not None:
            assert len(self.store.pages) <= self._disk_pages
