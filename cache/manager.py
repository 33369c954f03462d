"""The cache as the scheduler sees it: leases on pages, one tree over them, one owner of hit, insert and evict.

Every page is in one of four states, and only the methods below move it:

    free --grow--> private (of a lease) --commit--> shared, locked --release--> shared, unlocked (evictable)
      ^                     |                            ^                               |      |
      |                     |                            '----------- open, extend ------'      |
      '---- release, or a duplicate at commit ----------------------------- evict, clear -------'

A lease's page table is an interval: `pages[:num_shared]` belongs to the tree, `pages[num_shared:]` to the lease.
Logical ticks order the uses; nothing here reads a clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from .eviction_queue import EvictionQueue
from .page_pool import PagePool
from .policies.lru import LRU
from .policies.registry import EvictionPolicy
from .radix_tree import Node, RadixTree


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on pages, made by `CacheManager.open` and void after `release` or `reset`."""

    namespace: bytes
    pages: list[int]
    """The page table: page i holds tokens `[i * page_size, (i + 1) * page_size)`."""
    num_shared: int
    """Leading pages that belong to the tree, locked through `node`; the lease owns the others."""
    node: Node | None
    """The deepest locked node, where the shared pages end; None once the lease is void."""


@dataclass(slots=True)
class CacheStats:
    """Counters since the start; they only grow."""

    inserted_pages: int = 0
    """Pages that entered the tree."""
    duplicate_pages: int = 0
    """Pages computed although the tree held the same by the time of their commit."""
    evicted_pages: int = 0
    """Pages dropped to make room."""


class CacheManager:
    """Pages `0 … num_pages - 1` of `page_size` tokens, shared by prefix within a namespace.

    Tokens are `array('i')`. With `enabled=False` nothing is ever shared. Misuse raises ValueError.
    """

    def __init__(
        self, num_pages: int, page_size: int, policy: EvictionPolicy | None = None, *, enabled: bool = True
    ) -> None:
        if page_size < 1:
            raise ValueError(f"a page holds at least one token, got page_size {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enabled = enabled
        self.stats = CacheStats()
        self._policy = policy or LRU()
        self._tick = 0
        self._leases: set[Lease] = set()
        self._start_empty()

    def _start_empty(self) -> None:
        self.tree = RadixTree(self.page_size * array("i").itemsize)
        self._pool = PagePool(self.num_pages)
        self._queue = EvictionQueue(self._policy)
        self._evictable = 0

    @property
    def capacity_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return self._pool.num_free

    @property
    def evictable(self) -> int:
        """Pages that the tree holds and no lease locks."""
        return self._evictable

    @property
    def in_use(self) -> int:
        """Pages that leases lock or own."""
        return self.num_pages - self.free - self._evictable

    def available(self) -> int:
        """Pages that `grow` could provide now."""
        return self._pool.num_free + self._evictable

    def match_length(self, namespace: bytes, tokens: array[int]) -> int:
        """How many leading tokens the tree holds (whole pages); changes nothing."""
        root = self.tree.roots.get(namespace)
        if root is None:
            return 0
        path, shared = self.tree.find(root, self._query(tokens, 0, len(tokens)))
        return (path[-1].end - len(path[-1].pages) + shared) * self.page_size if path else 0

    def open(self, namespace: bytes, tokens: array[int], limit: int) -> Lease:
        """A lease on the pages that the tree holds for at most the first `limit` tokens."""
        root = self.tree.root(namespace)
        root.lock += 1
        lease = Lease(namespace, [], 0, root)
        self._leases.add(lease)
        if self.enabled:
            self._adopt(lease, root, self._query(tokens, 0, limit))
        return lease

    def extend(self, lease: Lease, tokens: array[int], limit: int) -> int:
        """Takes over what others have committed since for the first `limit` tokens; returns the tokens now shared.

        Private pages in those places are given back: their contents must be needless. A dictionary look-up when
        there is nothing new.
        """
        node = self._held(lease)
        next_end = (lease.num_shared + 1) * self.page_size
        if self._query(tokens, lease.num_shared, min(limit, next_end)) in node.children:
            self._adopt(lease, node, self._query(tokens, lease.num_shared, limit))
        return lease.num_shared * self.page_size

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Gives the lease pages for `num_tokens` tokens, evicting as few as that takes; False changes nothing."""
        self._held(lease)
        missing = -(-num_tokens // self.page_size) - len(lease.pages)
        if missing <= 0:
            return True
        deficit = missing - self._pool.num_free
        if deficit > self._evictable:
            return False
        if deficit > 0:
            self._evict(deficit)
            self.stats.evicted_pages += deficit
        lease.pages += self._pool.take(missing)
        return True

    def commit(self, lease: Lease, tokens: array[int], num_tokens: int) -> None:
        """Shares the pages that lie within `tokens[:num_tokens]`, whose KV has been computed or is being so.

        Where the tree has a page for the same tokens already, the lease is pointed at that one:

            pages   [ shared before | now in the tree: remapped, own copy freed | new: given to the tree | private ]
        """
        node = self._held(lease)
        end = num_tokens // self.page_size
        if end <= lease.num_shared or not self.enabled:
            return
        if num_tokens > len(tokens) or end > len(lease.pages):
            raise ValueError(
                f"commit of {num_tokens} tokens, but {len(tokens)} are known and {len(lease.pages)} pages held"
            )
        query = self._query(tokens, lease.num_shared, num_tokens)
        before = lease.num_shared
        node = self._adopt(lease, node, query)
        adopted = lease.num_shared - before
        self.stats.duplicate_pages += adopted
        if lease.num_shared < end:
            self._insert(lease, node, query[adopted * self.tree.page_bytes :], end)

    def release(self, lease: Lease) -> None:
        """Ends the lease: its shared pages become evictable unless others hold them, its own become free.

        This is the one moment at which the policy hears of a use, once per lease: until then the path is locked.
        """
        node = self._held(lease)
        self._pool.give_back(lease.pages[lease.num_shared :])
        self._leases.remove(lease)
        self._void(lease)
        self._tick += 1
        while node.parent is not None:
            self._policy.touch(node, self._tick)
            node.lock -= 1
            if node.lock == 0:
                self._evictable += len(node.pages)
                if not node.children:
                    self._queue.add(node)
            node = node.parent
        node.lock -= 1
        self.tree.prune(node)

    def clear(self) -> None:
        """Drops every page that no lease holds."""
        self._evict(self._evictable)

    def reset(self) -> None:
        """Forgets everything, for when the device has lost its pages: every lease is void at once."""
        for lease in self._leases:
            self._void(lease)
        self._leases.clear()
        self._start_empty()

    def check(self, leases: Iterable[Lease] = ()) -> None:
        """Asserts all invariants, given the leases that should exist: none, for an idle engine."""
        given = set(leases)
        assert given == self._leases, f"{len(self._leases)} leases are open, {len(given)} are accounted for"
        self.tree.check()

        nodes = list(self.tree.nodes())
        locks = dict.fromkeys((*self.tree.roots.values(), *nodes), 0)
        private: list[int] = []
        for lease in given:
            node = self._held(lease)
            private += lease.pages[lease.num_shared :]
            assert node.end == lease.num_shared <= len(lease.pages), "the shared pages do not end at the node"
            while node.parent is not None:
                assert lease.pages[node.end - len(node.pages) : node.end] == node.pages, (
                    "page table and tree differ"
                )
                locks[node] += 1
                node = node.parent
            assert self.tree.roots[lease.namespace] is node, "a lease outside its namespace"
            locks[node] += 1
        assert all(node.lock == count for node, count in locks.items()), "locks differ from the leases' paths"

        unlocked = sum(len(node.pages) for node in nodes if node.lock == 0)
        locked = sum(len(node.pages) for node in nodes if node.lock)
        assert unlocked == self._evictable, f"{unlocked} pages are evictable, {self._evictable} are counted"
        assert self.free + unlocked + locked + len(private) == self.num_pages, "the pages do not add up"
        self._pool.check([*private, *(page for node in nodes for page in node.pages)])
        self._queue.check(node for node in nodes if node.lock == 0 and not node.children)

    def _query(self, tokens: array[int], first_page: int, limit: int) -> bytes:
        """The bytes of the whole pages from `first_page` on within the first `limit` tokens."""
        assert tokens.typecode == "i", f"tokens are array('i'), got array({tokens.typecode!r})"
        end = max(min(limit, len(tokens)), 0) // self.page_size * self.page_size
        return tokens[first_page * self.page_size : end].tobytes()

    def _held(self, lease: Lease) -> Node:
        if lease.node is None:
            raise ValueError("the lease is void: it was released, or the cache was reset")
        return lease.node

    def _void(self, lease: Lease) -> None:
        lease.pages, lease.num_shared, lease.node = [], 0, None

    def _adopt(self, lease: Lease, node: Node, query: bytes) -> Node:
        """Lets the lease share what the tree holds for `query` below `node`; returns the deepest node then."""
        path, shared = self.tree.find(node, query)
        if not path:
            return node
        if shared < len(path[-1].pages):
            path[-1] = self.tree.split(path[-1], shared)
        pages: list[int] = []
        for step in path:
            pages += step.pages
        place = slice(lease.num_shared, lease.num_shared + len(pages))
        replaced = lease.pages[place]
        # The page table changes before the old pages are free, so that it never names a free page.
        lease.pages[place] = pages
        self._pool.give_back(replaced)
        for step in path:
            if step.lock == 0:
                self._evictable -= len(step.pages)
                self._queue.discard(step)
            step.lock += 1
        lease.num_shared += len(pages)
        lease.node = path[-1]
        return path[-1]

    def _insert(self, lease: Lease, node: Node, key: bytes, end: int) -> None:
        """Gives the lease's own pages up to `end` to the tree, below its deepest node."""
        pages = lease.pages[lease.num_shared : end]
        # A run that this lease began, and nobody else has used, grows: a long answer stays one node.
        if node.parent is not None and node.lock == 1 and node.rank is None and not node.children:
            self.tree.append(node, key, pages)
        else:
            node = self.tree.add(node, key, pages)
            node.lock = 1
        lease.num_shared, lease.node = end, node
        self.stats.inserted_pages += len(pages)

    def _evict(self, count: int) -> None:
        """Frees exactly `count` of the evictable pages: leaves in the policy's order, each from its tail."""
        self._evictable -= count
        while count:
            leaf = self._queue.pop()
            parent = leaf.parent
            assert parent is not None
            freed = self.tree.trim(leaf, count)
            self._pool.give_back(freed)
            count -= len(freed)
            if leaf.pages:
                self._queue.add(leaf)
            elif parent.parent is None:
                self.tree.prune(parent)
            elif not parent.children and parent.lock == 0:
                self._queue.add(parent)
