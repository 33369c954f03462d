"""One tier of pages beneath the tree: which are free, which are locked, and which go first."""

from __future__ import annotations

from collections.abc import Iterable

from .eviction_queue import EvictionQueue
from .page_events import PageListener
from .page_pool import PagePool
from .policies.registry import EvictionPolicy, Use
from .radix_tree import Node, Run


class Tier:
    """Keeps pool, locks and eviction order of tier `level` in step with the runs of the tree's nodes.

    A run may be evicted when it holds pages, nobody locks it, and no child has any in this tier: so a tier stays
    closed under prefix.
    """

    def __init__(self, level: int, num_pages: int, policy: EvictionPolicy) -> None:
        self.level = level
        self.num_pages = num_pages
        self.pool = PagePool(num_pages)
        self.policy = policy
        policy.capacity = num_pages
        self.queue = EvictionQueue(policy)
        self._untouched: dict[Run, None] = {}
        """What may be evicted, too, but has been put in for a use that has not ended: it goes last."""
        self.evictable = 0
        """Pages that no lock protects."""
        self.evicted_pages = 0
        self.expired_pages = 0
        self.listener: PageListener | None = None
        """Who hears of every page that comes and goes."""

    @property
    def free(self) -> int:
        return self.pool.num_free

    @property
    def available(self) -> int:
        """Pages that could be had now."""
        return self.pool.num_free + self.evictable

    @property
    def in_use(self) -> int:
        """Pages that are locked or in somebody's hands."""
        return self.num_pages - self.available

    def run(self, node: Node) -> Run:
        return node.runs[self.level]

    def lock(self, path: Iterable[Node]) -> None:
        """One more user of every node of a path."""
        for node in path:
            run = self.run(node)
            if run.lock == 0:
                self.evictable -= len(run.pages)
                self.discard(run)
            run.lock += 1

    def unlock(self, path: Iterable[Node]) -> None:
        """The end of a `lock`: on the nodes that the path has become since."""
        for node in path:
            run = self.run(node)
            assert run.lock > 0, "unlocked, but not locked"
            run.lock -= 1
            if run.lock == 0:
                self.evictable += len(run.pages)
                self.requeue(node)

    def touch(self, path: Iterable[Node], use: Use) -> None:
        """Tells the policy of a use of what this tier holds along a path, heads first."""
        for node in path:
            run = self.run(node)
            if run.pages:
                self.discard(run)
                self.policy.touch(run, use)
                self.requeue(node)

    def touch_new(self, path: Iterable[Node], use: Use) -> None:
        """The same for what no use has touched, since none will."""
        self.touch([node for node in path if self.run(node).rank is None], use)

    def put(self, node: Node, pages: list[int]) -> None:
        """The run holds `pages` too, behind those that it has. The policy hears of it with the use that they are for."""
        run, parent = self.run(node), node.parent
        assert parent is not None
        if not run.pages:
            self.discard(self.run(parent))
            self.run(parent).below += 1
        self.discard(run)
        run.pages += pages
        if self.listener is not None and pages:
            self.listener.entered(self.level, node, len(run.pages) - len(pages), len(run.pages))
        if run.lock == 0:
            self.evictable += len(pages)
        self.requeue(node)

    def cut(self, node: Node, keep: int) -> list[int]:
        """Takes what the run holds beyond its first `keep` pages out of the tree; the caller frees or reuses it."""
        run, parent = self.run(node), node.parent
        assert parent is not None
        assert run.lock == 0, "a locked run is not cut"
        pages = run.pages[keep:]
        self.discard(run)
        if self.listener is not None and pages:
            self.listener.leaves(self.level, node, keep, keep + len(pages))
        if keep == 0 and pages and run.rank is not None:
            self.policy.evicted(run)
            run.rank = None
        del run.pages[keep:]
        self.evictable -= len(pages)
        if pages and not run.pages:
            self.run(parent).below -= 1
            self.requeue(parent)
        self.requeue(node)
        return pages

    def requeue(self, node: Node) -> None:
        """Sees to it that the run waits for eviction if, and only if, it may be evicted."""
        run = self.run(node)
        self.discard(run)
        if run.pages and not run.lock and not run.below:
            if run.rank is None:
                self._untouched[run] = None
            else:
                self.queue.add(run)

    def discard(self, run: Run) -> None:
        """The run does not wait for eviction any more, if it did."""
        if run.rank is None:
            self._untouched.pop(run, None)
        else:
            self.queue.discard(run)

    def next(self, use: Use) -> tuple[Node, int]:
        """The node to evict from, which waits no longer, and how many of its pages may go before the next is asked for."""
        if not len(self.queue):
            run = next(iter(self._untouched))
            del self._untouched[run]
            return run.node, run.size
        run = self.queue.pop(use)
        most = self.policy.at_a_time(run)
        return run.node, run.size if most is None else most

    def check(self, nodes: Iterable[Node], in_hand: Iterable[int]) -> None:
        """Asserts that the counters, the queue and the pool agree with the tree and with the pages `in_hand`."""
        runs = [self.run(node) for node in nodes]
        unlocked = sum(len(run.pages) for run in runs if run.lock == 0)
        locked = sum(len(run.pages) for run in runs if run.lock)
        hands = list(in_hand)
        assert unlocked == self.evictable, f"{unlocked} pages are evictable, {self.evictable} are counted"
        assert self.free + unlocked + locked + len(hands) == self.num_pages, "the pages do not add up"
        self.pool.check([*hands, *(page for run in runs for page in run.pages)])
        waiting = [run for run in runs if run.pages and not run.lock and not run.below]
        self.queue.check(run for run in waiting if run.rank is not None)
        assert self._untouched.keys() == {run for run in waiting if run.rank is None}, "untouched runs"
