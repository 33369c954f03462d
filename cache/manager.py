"""The cache as the scheduler sees it: leases on device pages, holds on host pages, one owner of hit, insert and evict.

Every device page is in one of four states, and only the methods below move it:

    free --grow--> private (of a lease) --commit--> shared, locked --release--> shared, unlocked (evictable)
      ^                     |                            ^                               |      |
      |                     |                            '----------- open, extend ------'      |
      '---- release, or a duplicate at commit ----------------------------- evict, clear -------'

A lease's page table is an interval: `pages[:num_shared]` belongs to the tree, `pages[num_shared:]` to the lease.
A host row goes the same way: free, in hand (`take_rows`: something is being read into it), then placed under a hold,
which locks it, until `drop`. Saving a page takes it from the device to the host without a stay in hand.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping

from .leases import CacheStats, Hold, Lease, Match
from .page_keys import PageKey, chain, namespace_digest
from .policies.lru import LRU
from .policies.registry import EvictionPolicy
from .radix_tree import DEVICE, HOST, TIERS, Node
from .tier import Tier
from .tiered_tree import TieredTree

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
SELECTIVE_USES = 2
"""Requests that must have used a prefix before `write_through_selective` saves it."""


class CacheManager:
    """Device pages `0 … num_pages - 1` of `page_size` tokens, and as many host rows, shared by prefix in a namespace.

    Tokens are `array('i')`. `identity` names all that a KV value depends on besides tokens and namespace, for the keys
    of pages. With `enabled=False` nothing is ever shared. Misuse raises ValueError. Nothing here reads a clock but the
    one given, which orders nothing.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        policy: EvictionPolicy | None = None,
        *,
        enabled: bool = True,
        host_pages: int = 0,
        host_policy: EvictionPolicy | None = None,
        write_policy: str = "write_through",
        identity: Mapping[str, str | int | float | bytes | None] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"a page holds at least one token, got page_size {page_size}")
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        if write_policy not in WRITE_POLICIES:
            raise ValueError(
                f"unknown write policy {write_policy!r}: choose one of {', '.join(WRITE_POLICIES)}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.enabled = enabled
        self.write_policy = write_policy
        self.stats = CacheStats()
        self._identity = identity or {}
        self._policy = policy or LRU()
        self._leases: set[Lease] = set()
        self._holds: set[Hold] = set()
        self._rows_in_hand: set[int] = set()
        self.tiers = TieredTree(
            page_size * array("i").itemsize,
            (num_pages, self._policy),
            (host_pages if enabled else 0, host_policy or LRU()),
            clock,
        )
        self.tiers.demotes = self._demotes

    @property
    def device(self) -> Tier:
        return self.tiers.device

    @property
    def host(self) -> Tier:
        return self.tiers.host

    @property
    def capacity_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def free(self) -> int:
        """Device pages that hold nothing."""
        return self.device.free

    @property
    def evictable(self) -> int:
        """Device pages that the tree holds and no lease locks."""
        return self.device.evictable

    @property
    def in_use(self) -> int:
        """Device pages that leases lock or own."""
        return self.device.in_use

    def available(self) -> int:
        """Device pages that `grow` could provide now."""
        return self.device.available

    def match(self, namespace: bytes, tokens: array[int], limit: int) -> Match:
        """What device and host hold of the first `limit` tokens; changes nothing."""
        root = self.tiers.tree.roots.get(namespace)
        if root is None or not self.enabled:
            return Match(0, 0)
        query = self._query(tokens, 0, limit)
        return Match(self.tiers.held(DEVICE, root, query), self.tiers.held(HOST, root, query))

    def match_length(self, namespace: bytes, tokens: array[int]) -> int:
        """How many leading tokens device or host hold (whole pages); changes nothing."""
        return self.match(namespace, tokens, len(tokens)).pages * self.page_size

    def open(self, namespace: bytes, tokens: array[int], limit: int) -> Lease:
        """A lease on the pages that the device holds for at most the first `limit` tokens."""
        root = self.root(namespace)
        self.device.lock([root])
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
        if missing > self.device.available:
            return False
        if missing > 0:
            lease.pages += self.tiers.take(DEVICE, missing)
            self.stats.evicted_pages = self.device.evicted_pages
        return True

    def commit(self, lease: Lease, tokens: array[int], num_tokens: int) -> None:
        """Shares the pages that lie within `tokens[:num_tokens]`, whose KV has been computed or is being so.

        Where the device holds a page for the same tokens already, the lease is pointed at that one:

            pages   [ shared before | held by the tree: remapped, own copy freed | new: given to the tree | private ]
        """
        node = self._held(lease)
        start, end = lease.num_shared, num_tokens // self.page_size
        if end <= start or not self.enabled:
            return
        if num_tokens > len(tokens) or end > len(lease.pages):
            raise ValueError(
                f"commit of {num_tokens} tokens, but {len(tokens)} are known and {len(lease.pages)} pages held"
            )
        pages = lease.pages[start:end]
        lease.node, duplicates = self.tiers.give(DEVICE, node, self._query(tokens, start, num_tokens), pages)
        lease.pages[start:end] = pages
        lease.num_shared = end
        self.stats.duplicate_pages += duplicates
        self.stats.inserted_pages += len(pages) - duplicates
        if self.write_policy == "write_through" and self.host.num_pages and duplicates < len(pages):
            self.tiers.unsaved[lease.node] = None

    def release(self, lease: Lease) -> None:
        """Ends the lease: its shared pages become evictable unless others hold them, its own become free.

        This is the one moment at which the policies of device and host hear of a use, once per lease. What goes down to the
        host before, chunk by chunk, and comes up from the disk, is no use of its own.
        """
        node = self._held(lease)
        self.device.pool.give_back(lease.pages[lease.num_shared :])
        self._leases.remove(lease)
        self._void(lease)
        path, use = node.path(), self.tiers.use()
        for step in path:
            step.uses += 1
        self.device.touch(path, use)
        self.host.touch(path, use)
        self.device.unlock(path)
        if node.parent is not None:
            if self.write_policy == "write_through_selective" and self._demotes(node) and self.host.num_pages:
                self.tiers.unsaved[node] = None
            if self.tiers.unwritten is not None:
                self.tiers.unwritten[node] = True
        self.tiers.tree.prune(path[0])

    # Host pages.

    def hold(self, namespace: bytes, tokens: array[int], limit: int, *, save: bool = False) -> Hold:
        """Locks what the host has of at most the first `limit` tokens; `save`: and first what only the device has."""
        root = self.root(namespace)
        self.host.lock([root])
        hold = Hold(namespace, root)
        self._holds.add(hold)
        if self.enabled:
            if save:
                path, _ = self.tiers.tree.find(root, self._query(tokens, 0, limit))
                on_device = [node for node in path if node.runs[DEVICE].pages]
                if on_device:
                    self.tiers.save(on_device[-1])
            self.extend_hold(hold, tokens, limit)
        return hold

    def hold_down_to(self, node: Node) -> Hold:
        """Locks what the host has of the path down to a node."""
        path = node.path()
        held = [step for step in path if step.runs[HOST].pages]
        if held and len(held[-1].runs[HOST].pages) < held[-1].size:
            held[-1] = self.tiers.split(held[-1], len(held[-1].runs[HOST].pages))
        self.host.lock([path[0], *held])
        hold = Hold(bytes(path[0].key), held[-1] if held else path[0])
        self._holds.add(hold)
        return hold

    def extend_hold(self, hold: Hold, tokens: array[int], limit: int) -> None:
        """Locks what others have brought to the host since, of the first `limit` tokens."""
        node = self._end_of(hold)
        claimed = self.tiers.claim(HOST, node, self._query(tokens, node.end, limit))
        hold.node = claimed[-1] if claimed else node

    def take_rows(self, count: int) -> list[int]:
        """Up to `count` host rows to read something into, evicting the deficit; they are in hand until given."""
        rows = self.tiers.take(HOST, min(count, self.host.available))
        self._rows_in_hand.update(rows)
        return rows

    def give_rows(self, rows: Iterable[int]) -> None:
        """Rows in hand that hold nothing of worth become free."""
        rows = list(rows)
        self._rows_in_hand.difference_update(rows)
        self.host.pool.give_back(rows)

    def place(self, hold: Hold, tokens: array[int], rows: list[int]) -> None:
        """The rows in hand hold the pages that follow the held ones: they enter the tree, under the hold."""
        node = self._end_of(hold)
        first = node.end
        self._rows_in_hand.difference_update(rows)
        query = self._query(tokens, first, (first + len(rows)) * self.page_size)
        hold.node, _ = self.tiers.give(HOST, node, query, list(rows))

    def drop(self, hold: Hold, *, leased: bool = False) -> None:
        """Ends the hold. `leased`: it was for somebody with a lease; the host's policy hears of a use when that is released.
        Otherwise nobody will tell it of what is new there, and it hears of that now."""
        path = self._end_of(hold).path()
        self._holds.remove(hold)
        hold.node = None
        if not leased:
            self.host.touch_new(path, self.tiers.use())
        self.host.unlock(path)
        self.tiers.tree.prune(path[0])

    def rows(self, hold: Hold, first: int, last: int) -> list[int]:
        """The host rows of pages `[first, last)` of what is held."""
        found: list[int] = []
        for node in self._end_of(hold).path():
            at = slice(max(first - node.start, 0), max(last - node.start, 0))
            found += node.runs[HOST].pages[at]
        return found

    @property
    def rows_in_hand(self) -> set[int]:
        """Host rows that were taken, and neither given back nor placed."""
        return self._rows_in_hand

    def page_names(self, namespace: bytes, tokens: array[int], count: int) -> list[PageKey]:
        """What the disk calls the first `count` pages of `tokens`."""
        digest = namespace_digest(self._identity, namespace)
        raw, step = self._query(tokens, 0, count * self.page_size), self.tiers.tree.page_bytes
        keys = chain(digest, (raw[at : at + step] for at in range(0, len(raw), step)))
        return [
            PageKey(digest, key, parent, i)
            for i, (key, parent) in enumerate(zip(keys, [digest, *keys], strict=False))
        ]

    def take_saves(self) -> tuple[list[int], list[int]]:
        """The copies to the host that are owed since the last call: device pages and the host rows to copy them to.

        The rows count as filled from now on. One that has changed hands meanwhile is given its last contents only.
        """
        if not self.tiers.saves:
            return [], []
        saves, self.tiers.saves = self.tiers.saves, []
        page_of = {row: page for save in saves for page, row in zip(save.pages, save.rows, strict=True)}
        return list(page_of.values()), list(page_of)

    # All of it.

    def clear(self, level: int | None = None, namespace: bytes | None = None) -> None:
        """Drops every page that nobody holds, from one tier (DEVICE or HOST) or from both, of one namespace or of all."""
        for tier in TIERS:
            if level not in (None, tier):
                continue
            if namespace is None:
                self.tiers.evict(tier, self.tiers.tiers[tier].evictable, demote=False)
            elif (root := self.tiers.tree.roots.get(namespace)) is not None:
                self.tiers.drop_below(tier, root)

    def reset(self, unfilled_rows: set[int] | None = None) -> None:
        """Forgets what the device held, for when it has lost its pages: every lease and hold is void at once.

        The host keeps its pages, but for `unfilled_rows`, which a save did not reach, and what lies behind them.
        """
        for lease in self._leases:
            self._void(lease)
        self._leases.clear()
        for hold in list(self._holds):
            self.drop(hold)
        evicted, expired = self.device.evicted_pages, self.device.expired_pages
        self.tiers.lose(unfilled_rows or set(), Tier(DEVICE, self.num_pages, self._policy))
        self.device.evicted_pages, self.device.expired_pages = evicted, expired
        # No lease will tell of what was in the course of a use.
        self.host.touch_new(self.tiers.tree.nodes(), self.tiers.use())

    def root(self, namespace: bytes) -> Node:
        """The root of a namespace; its page keys start from the digest of all that a KV value depends on."""
        root = self.tiers.tree.roots.get(namespace)
        return root or self.tiers.tree.root(namespace, namespace_digest(self._identity, namespace))

    def check(self, leases: Iterable[Lease] = ()) -> None:
        """Asserts all invariants, given the leases that should exist: none, for an idle engine."""
        given = set(leases)
        assert given == self._leases, f"{len(self._leases)} leases are open, {len(given)} are accounted for"
        tree = self.tiers.tree
        tree.check()
        nodes = list(tree.nodes())
        locks = {node: [0, 0] for node in (*tree.roots.values(), *nodes)}
        private: list[int] = []
        for lease in given:
            node = self._held(lease)
            private += lease.pages[lease.num_shared :]
            assert node.end == lease.num_shared <= len(lease.pages), "the shared pages do not end at the node"
            path = node.path()
            assert tree.roots[lease.namespace] is path[0], "a lease outside its namespace"
            shared = [page for step in path for page in step.runs[DEVICE].pages]
            assert shared == lease.pages[: lease.num_shared], "page table and tree differ"
            for step in path:
                locks[step][DEVICE] += 1
        for hold in self._holds:
            path = self._end_of(hold).path()
            assert tree.roots[hold.namespace] is path[0], "a hold outside its namespace"
            for step in path:
                locks[step][HOST] += 1
        for node, counts in locks.items():
            assert [run.lock for run in node.runs] == counts, "locks differ from what leases and holds lock"
        self.device.check(nodes, private)
        self.host.check(nodes, self._rows_in_hand)

    def _demotes(self, node: Node) -> bool:
        """Whether the host should have what the device evicts."""
        if not self.host.num_pages or len(node.runs[HOST].pages) >= len(node.runs[DEVICE].pages):
            return False
        return self.write_policy != "write_through_selective" or node.uses >= SELECTIVE_USES

    def _query(self, tokens: array[int], first_page: int, limit: int) -> bytes:
        """The bytes of the whole pages from `first_page` on within the first `limit` tokens."""
        assert tokens.typecode == "i", f"tokens are array('i'), got array({tokens.typecode!r})"
        end = max(min(limit, len(tokens)), 0) // self.page_size * self.page_size
        return tokens[first_page * self.page_size : end].tobytes()

    def _held(self, lease: Lease) -> Node:
        if lease.node is None:
            raise ValueError("the lease is void: it was released, or the cache was reset")
        return lease.node

    def _end_of(self, hold: Hold) -> Node:
        if hold.node is None:
            raise ValueError("the hold is void: it was dropped, or the cache was reset")
        return hold.node

    def _void(self, lease: Lease) -> None:
        lease.pages, lease.num_shared, lease.node = [], 0, None

    def _adopt(self, lease: Lease, node: Node, query: bytes) -> None:
        """Lets the lease share what the device holds for `query` below `node`."""
        for step in self.tiers.claim(DEVICE, node, query):
            pages = step.runs[DEVICE].pages
            place = slice(lease.num_shared, lease.num_shared + len(pages))
            # The page table changes before the old pages are free, so that it never names a free page.
            replaced, lease.pages[place] = lease.pages[place], pages
            self.device.pool.give_back(replaced)
            lease.num_shared += len(pages)
            lease.node = step
