"""A radix tree over token sequences in steps of whole pages; it says which tier holds the KV of which prefix.

The tree is structure only: what enters and leaves a tier, locks and ranks are the business of `tier` and `manager`.

Tokens are compared as bytes (four per token), so a run of pages is compared by one `memcmp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .page_keys import PageKey, chain

DEVICE, HOST = 0, 1
"""The tiers that the tree knows. (The disk has an index of its own, by key: others may write to it too.)"""
TIERS = (DEVICE, HOST)


class Run:
    """What one tier holds of a node: its leading pages. An `Evictable` of that tier."""

    __slots__ = ("below", "lock", "node", "pages", "rank")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.clear()

    def clear(self) -> None:
        self.pages: list[int] = []
        """Page numbers of the tier, for the first `len(pages)` pages of the node."""
        self.lock = 0
        """Users at or below this node; what is locked is whole, and is not evicted."""
        self.rank: Any = None
        """What the eviction policy remembers, an immutable value; None until the first use."""
        self.below = 0
        """Children of which this tier holds anything."""

    @property
    def size(self) -> int:
        return len(self.pages)

    @property
    def end(self) -> int:
        """Pages from the root to the end of what is held here."""
        return self.node.end - self.node.size + len(self.pages)

    @property
    def identity(self) -> bytes:
        """The key of the first page: the same when the same tokens come back."""
        return self.node.page_keys()[0]

    @property
    def identities(self) -> list[bytes]:
        """The keys of the pages held here."""
        return self.node.page_keys()[: len(self.pages)]

    @property
    def head(self) -> Run | None:
        """The run before this one in the same tier."""
        above = self.node.parent
        if above is None or above.parent is None:
            return None
        return above.runs[DEVICE if self.node.runs[DEVICE] is self else HOST]


class Node:
    """A run of one or more whole pages with one common history.

    Every tier holds a leading part of it, and one of them all of it. A root stands for a namespace: it has no pages,
    and its key is the namespace.
    """

    __slots__ = ("_keys", "children", "end", "key", "page_bytes", "parent", "runs", "uses")

    def __init__(self, parent: Node | None, key: bytes | bytearray, page_bytes: int) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        """By the bytes of the child's first page."""
        self.key = bytearray(key)
        """Token ids of the run; grows and shrinks in place."""
        self.page_bytes = page_bytes
        self.end: int = 0 if parent is None else parent.end + self.size
        """Pages from the root to the end of this run."""
        self.runs = (Run(self), Run(self))
        """By tier."""
        self.uses = 0
        """Requests that used all of it and have ended."""
        self._keys: list[bytes] = []

    @property
    def size(self) -> int:
        """Pages of the run."""
        return 0 if self.parent is None else len(self.key) // self.page_bytes

    @property
    def start(self) -> int:
        """Pages before this run."""
        return self.end - self.size

    def page_keys(self) -> list[bytes]:
        """The keys of the run's pages, computed once each; a root's list holds the digest of its namespace."""
        if self.parent is not None and len(self._keys) < self.size:
            step = self.page_bytes
            parent = self._keys[-1] if self._keys else self.parent.page_keys()[-1]
            known = range(len(self._keys) * step, len(self.key), step)
            self._keys += chain(parent, (self.key[at : at + step] for at in known))
        return self._keys

    def names(self, first: int, last: int) -> list[PageKey]:
        """What the disk store calls pages `[first, last)` of this run."""
        assert self.parent is not None
        keys, start = self.page_keys(), self.start
        parents = [self.parent.page_keys()[-1], *keys]
        namespace = self.path()[0].page_keys()[0]
        return [PageKey(namespace, keys[i], parents[i], start + i) for i in range(first, last)]

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class RadixTree:
    """One tree per namespace; `page_bytes` is the length of one page's token ids in bytes."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.roots: dict[bytes, Node] = {}

    def root(self, namespace: bytes, digest: bytes = b"") -> Node:
        """The namespace's root, made on first use; `prune` it once it is unlocked. `digest` seeds the page keys."""
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(None, namespace, self.page_bytes)
            node._keys.append(digest)
        return node

    def find(self, node: Node, query: bytes) -> tuple[list[Node], int]:
        """The nodes below `node` that `query` (whole pages) runs through, and how many pages of the last it shares."""
        path: list[Node] = []
        shared, position, step = 0, 0, self.page_bytes
        while position < len(query):
            child = node.children.get(query[position : position + step])
            if child is None:
                break
            path.append(child)
            if not query.startswith(child.key, position):
                shared = self._shared_pages(child.key, query, position)
                break
            shared = child.size
            position += len(child.key)
            node = child
        return path, shared

    def _shared_pages(self, key: bytearray, query: bytes, position: int) -> int:
        """How many leading pages of `key` stand in `query` at `position`, given that the first one does."""
        step = self.page_bytes
        low, high = 1, min(len(key), len(query) - position) // step
        while low < high:
            middle = (low + high + 1) // 2
            known, probe = low * step, middle * step
            if key[known:probe] == query[position + known : position + probe]:
                low = middle
            else:
                high = middle - 1
        return low

    def split(self, node: Node, count: int) -> Node:
        """Cuts a run after `count` pages and returns the new upper half; `node` stays the lower one.

        Whoever holds `node` holds its end, so holders need no notice: both halves have their locks.
        """
        assert node.parent is not None
        assert 0 < count < node.size
        cut = count * self.page_bytes
        upper = Node(node.parent, node.key[:cut], self.page_bytes)
        upper.uses = node.uses
        upper._keys, node._keys = node._keys[:count], node._keys[count:]
        for above, run in zip(upper.runs, node.runs, strict=True):
            above.pages, run.pages = run.pages[:count], run.pages[count:]
            above.lock, above.rank = run.lock, run.rank
            above.below = 1 if run.pages else 0
            if not run.pages:
                run.rank = None
        node.parent.children[self._first(upper)] = upper
        del node.key[:cut]
        node.parent = upper
        upper.children[self._first(node)] = node
        return upper

    def add(self, parent: Node, key: bytes) -> Node:
        """Hangs a new run below `parent`, which has no child beginning with the same page; no tier holds it yet."""
        node = Node(parent, key, self.page_bytes)
        first = self._first(node)
        assert first not in parent.children
        parent.children[first] = node
        return node

    def append(self, leaf: Node, key: bytes) -> None:
        """Lengthens a leaf's run."""
        assert leaf.parent is not None, "a root has no run"
        assert not leaf.children
        leaf.key += key
        leaf.end += len(key) // self.page_bytes

    def shrink(self, node: Node) -> bool:
        """Forgets what no tier holds of a node; True when that is all of it, and the node has left the tree."""
        parent = node.parent
        assert parent is not None, "a root has no run"
        keep = max(len(run.pages) for run in node.runs)
        if keep == node.size:
            return False
        assert not node.children, "children below what no tier holds"
        if keep == 0:
            del parent.children[self._first(node)]
            return True
        node.end -= node.size - keep
        del node.key[keep * self.page_bytes :], node._keys[keep:]
        return False

    def prune(self, root: Node) -> None:
        """Forgets a namespace that has neither pages nor users."""
        if not root.children and not any(run.lock for run in root.runs):
            self.roots.pop(bytes(root.key), None)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def check(self) -> None:
        """Asserts that the tree is well formed, and every tier closed under prefix."""
        for namespace, root in self.roots.items():
            assert root.key == namespace, "a root under another name"
            assert (root.parent, root.end) == (None, 0)
            assert not any(run.pages for run in root.runs), "a root has no pages"
            assert root.children or any(run.lock for run in root.runs), f"{namespace!r} is empty and unused"
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert parent.children.get(self._first(node)) is node, "bad link to a child"
            assert node.size > 0, "a node without pages"
            assert len(node.key) == node.size * self.page_bytes, "a key of broken pages"
            assert node.end == parent.end + node.size, "wrong depth"
            assert len(node._keys) <= node.size, "more keys than pages"
            assert max(len(run.pages) for run in node.runs) == node.size, "pages that no tier holds"
            for run, above in zip(node.runs, parent.runs, strict=True):
                assert run.node is node
                whole = len(above.pages) == parent.size
                assert not run.pages or whole, "a tier holds pages, but not those before them"
                assert not run.lock or len(run.pages) == node.size, "locked, but not whole"
        for node in (*self.roots.values(), *self.nodes()):
            for tier in TIERS:
                runs = [child.runs[tier] for child in node.children.values()]
                assert node.runs[tier].below == sum(bool(run.pages) for run in runs), "children miscounted"
                assert node.runs[tier].lock >= sum(run.lock for run in runs), "locked less than what is below"

    def _first(self, node: Node) -> bytes:
        return bytes(node.key[: self.page_bytes])
