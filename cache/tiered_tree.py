"""The radix tree with its two tiers of pages: claiming, filling, saving to the host, and evicting, in one place.

Every tier is closed under prefix. A node lives as long as one tier holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .page_events import PageListener, listeners
from .policies.registry import EvictionPolicy, Use
from .radix_tree import DEVICE, HOST, Node, RadixTree
from .tier import Tier


@dataclass(slots=True)
class Save:
    """Pages to copy from the device to host rows. The rows count as filled; the copy must be ordered in time."""

    pages: list[int]
    rows: list[int]


class TieredTree:
    """What device and host hold of every prefix."""

    def __init__(
        self,
        page_bytes: int,
        device: tuple[int, EvictionPolicy],
        host: tuple[int, EvictionPolicy],
        clock: Callable[[], float],
    ) -> None:
        self.tree = RadixTree(page_bytes)
        self.tiers = (Tier(DEVICE, *device), Tier(HOST, *host))
        self._listeners: tuple[PageListener, ...] = ()
        self.saves: list[Save] = []
        """Copies that are owed, in order."""
        self.unsaved: dict[Node, None] = {}
        """Nodes that the write policy wants on the host, oldest first."""
        self.unwritten: dict[Node, bool] | None = None
        """Nodes that the disk should have, oldest first, and whether it is to hear of a use; None when there is no disk."""
        self.demotes: Callable[[Node], bool] = lambda _: False
        """Whether the host is to take over a node that the device evicts."""
        self._clock = clock
        self._tick = 0

    @property
    def device(self) -> Tier:
        return self.tiers[DEVICE]

    @property
    def host(self) -> Tier:
        return self.tiers[HOST]

    def listen(self, listener: PageListener | None) -> None:
        """From now on `listener`, too, hears of every page that enters or leaves device and host; None: nobody does."""
        heard = () if listener is None else dict.fromkeys((*self._listeners, listener))
        self._listeners = tuple(heard)
        for tier in self.tiers:
            tier.listener = listeners(self._listeners)

    def use(self) -> Use:
        """The next moment."""
        self._tick += 1
        return Use(self._tick, self._clock())

    def held(self, level: int, node: Node, query: bytes) -> int:
        """How many leading pages of `query` below `node` a tier holds; changes nothing."""
        count = 0
        path, shared = self.tree.find(node, query)
        for step in path:
            most = shared if step is path[-1] else step.size
            have = min(most, len(step.runs[level].pages))
            count += have
            if have < most:
                break
        return count

    def claim(self, level: int, node: Node, query: bytes) -> list[Node]:
        """The nodes below `node` whose pages are the leading ones of `query` that a tier holds: split to fit, and locked."""
        path, shared = self.tree.find(node, query)
        claimed: list[Node] = []
        for step in path:
            most = shared if step is path[-1] else step.size
            have = min(most, len(step.runs[level].pages))
            if have == 0:
                break
            claimed.append(step if have == step.size else self.split(step, have))
            if have < most:
                break
        self.tiers[level].lock(claimed)
        return claimed

    def give(self, level: int, node: Node, key: bytes, pages: list[int]) -> tuple[Node, int]:
        """Gives a tier `pages` for the tokens `key` below `node`, which is locked (or a root), and locks them.

        Where the tier holds the same tokens already, its own page takes the place in `pages`, and the duplicate is
        freed. Returns the deepest node then, and how many of the pages were duplicates.
        """
        tier, step = self.tiers[level], self.tree.page_bytes
        at, duplicates, base = 0, 0, node.end
        while at < len(pages):
            for claimed in self.claim(level, node, key[at * step :]):
                node, own = claimed, claimed.runs[level].pages
                replaced, pages[at : at + len(own)] = pages[at : at + len(own)], own
                tier.pool.give_back(replaced)
                duplicates += len(own)
                at += len(own)
            if at < len(pages):
                node = self._fill(level, node, key[at * step :], pages[at:])
                at = node.end - base
        return node, duplicates

    def _fill(self, level: int, node: Node, key: bytes, pages: list[int]) -> Node:
        """Gives a tier `pages` in the one node that continues `node` with tokens of `key`, as far as that reaches."""
        tier = self.tiers[level]
        path, shared = self.tree.find(node, key)
        if path:
            child = path[0]
            count = shared if len(path) == 1 else child.size
            if count < child.size:
                child = self.split(child, count)
        elif self._may_grow(level, node):
            self.tree.append(node, key)
            tier.put(node, pages)
            return node
        else:
            child, count = self.tree.add(node, key), len(pages)
        tier.lock([child])
        tier.put(child, pages[:count])
        return child

    def _may_grow(self, level: int, node: Node) -> bool:
        """A run that its only user began, and nobody else has seen, grows: a long answer stays one node."""
        run, other = node.runs[level], node.runs[HOST if level == DEVICE else DEVICE]
        return (
            node.parent is not None
            and run.lock == 1
            and run.rank is None
            and not (node.children or other.lock)
        )

    def split(self, node: Node, count: int) -> Node:
        """`RadixTree.split`, and the eviction orders follow."""
        for tier in self.tiers:
            tier.discard(node.runs[tier.level])
        upper = self.tree.split(node, count)
        for tier in self.tiers:
            tier.requeue(upper)
            tier.requeue(node)
        return upper

    def take(self, level: int, count: int) -> list[int]:
        """`count` free pages of a tier, evicting the deficit; the caller has made sure that there are as many."""
        tier = self.tiers[level]
        deficit = count - tier.free
        if deficit > 0:
            tier.evicted_pages += deficit
            self.evict(level, deficit)
        return tier.pool.take(count)

    def save(self, node: Node) -> bool:
        """Gives host rows to what the device holds down to `node` and the host does not, as far as there are rows.

        Heads first, so that the host stays closed. False if some are left.
        """
        path = node.path()
        missing = sum(max(len(step.runs[DEVICE].pages) - len(step.runs[HOST].pages), 0) for step in path)
        self.host.lock(path)
        rows = self.take(HOST, min(missing, self.host.available))
        for step in path:
            have = len(step.runs[HOST].pages)
            pages = step.runs[DEVICE].pages[have : have + len(rows)]
            if pages and rows:
                self.saves.append(Save(pages, rows[: len(pages)]))
                self.host.put(step, rows[: len(pages)])
                del rows[: len(pages)]
                if self.unwritten is not None:
                    self.unwritten.setdefault(step, False)
        self.host.unlock(path)
        return len(path) == 1 or len(node.runs[HOST].pages) >= len(node.runs[DEVICE].pages)

    def evict(self, level: int, count: int, *, demote: bool = True) -> None:
        """Frees exactly `count` of a tier's evictable pages: leaves in the policy's order, each from its tail."""
        tier = self.tiers[level]
        while count:
            node, most = tier.next(self.use())
            if demote and level == DEVICE and self.demotes(node):
                self.save(node)
                self.host.touch_new(node.path(), self.use())
            pages = tier.cut(node, max(tier.run(node).size - min(count, most), 0))
            tier.pool.give_back(pages)
            count -= len(pages)
            self._forget(node)

    def expire(self, now: float) -> None:
        """Drops what its policy wants gone by now, whether or not there is room."""
        for tier in self.tiers:
            while (run := tier.queue.expired(now)) is not None:
                pages = tier.cut(run.node, 0)
                tier.pool.give_back(pages)
                tier.expired_pages += len(pages)
                self._forget(run.node)

    def drop_below(self, level: int, root: Node) -> None:
        """Drops what nobody holds of a namespace from one tier."""
        tier, nodes = self.tiers[level], [*root.children.values()]
        for node in nodes:
            nodes.extend(node.children.values())
        for node in reversed(nodes):
            run = tier.run(node)
            if run.pages and not run.lock and not run.below:
                tier.pool.give_back(tier.cut(node, 0))
                self._forget(node)

    def lose(self, rows: set[int], device: Tier) -> None:
        """After the device has lost its pages: a new, empty tier for it, and without the host `rows` that were not filled.

        Nobody holds anything any more.
        """
        self.saves.clear()
        self.unsaved.clear()
        if self.unwritten is not None:
            self.unwritten.clear()
        listener = device.listener = self.device.listener
        for node in (*self.tree.roots.values(), *self.tree.nodes()):
            if listener is not None and node.runs[DEVICE].pages:
                listener.leaves(DEVICE, node, 0, len(node.runs[DEVICE].pages))
            node.runs[DEVICE].clear()
        self.tiers = (device, self.host)
        for node in reversed(list(self.tree.nodes())):
            if not node.runs[HOST].pages or len(node.runs[HOST].pages) < node.size:
                self._forget(node)
        self.drop_rows(set(rows))
        for root in list(self.tree.roots.values()):
            self.tree.prune(root)

    def drop_rows(self, rows: set[int]) -> None:
        """Takes host rows that were not filled out of the tree, and what lies behind them; locked ones stay for now."""
        nodes = list(self.tree.nodes()) if rows else []
        bad: dict[Node, int] = {}
        for node in nodes:
            held = node.runs[HOST].pages
            at = next((i for i, row in enumerate(held) if row in rows), len(held))
            if at < len(held) or node.parent in bad:
                bad[node] = 0 if node.parent in bad else at
        for node in reversed(list(bad)):
            run = node.runs[HOST]
            if run.pages and not run.lock and not run.below:
                rows.difference_update(run.pages[bad[node] :])
                self.host.pool.give_back(self.host.cut(node, bad[node]))
                self._forget(node)

    def _forget(self, node: Node) -> None:
        if self.tree.shrink(node):
            self.unsaved.pop(node, None)
            if self.unwritten is not None:
                self.unwritten.pop(node, None)
            root = node.parent
            if root is not None and root.parent is None:
                self.tree.prune(root)
