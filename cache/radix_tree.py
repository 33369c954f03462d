"""A radix tree over token sequences in steps of whole pages; it says which page holds the KV of which prefix.

The tree is structure only. The cache manager decides what enters and leaves; locks and ranks are kept on
the nodes for it.

Tokens are compared as bytes (four per token), so a run of pages is compared by one `memcmp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Node:
    """A run of one or more whole pages with one common history: every user so far has used all of them.

    A root stands for a namespace: it has no pages, and its key is the namespace.
    """

    __slots__ = ("children", "end", "key", "lock", "pages", "parent", "rank")

    def __init__(self, parent: Node | None, key: bytes | bytearray, pages: list[int]) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        """By the bytes of the child's first page."""
        self.key = bytearray(key)
        """Token ids of the run; grows and shrinks in place."""
        self.pages = pages
        self.end: int = len(pages) if parent is None else parent.end + len(pages)
        """Pages from the root to the end of this run."""
        self.lock = 0
        """Users at or below this node; a locked node is not evicted."""
        self.rank: Any = None
        """What the eviction policy remembers, an immutable value; None until the first use has ended."""


class RadixTree:
    """One tree per namespace; `page_bytes` is the length of one page's token ids in bytes."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.roots: dict[bytes, Node] = {}

    def root(self, namespace: bytes) -> Node:
        """The namespace's root, made on first use; `prune` it once it is unlocked."""
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(None, namespace, [])
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
            shared = len(child.pages)
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
        assert 0 < count < len(node.pages)
        cut = count * self.page_bytes
        upper = Node(node.parent, node.key[:cut], node.pages[:count])
        upper.lock, upper.rank = node.lock, node.rank
        node.parent.children[self._first(upper)] = upper
        del node.key[:cut], node.pages[:count]
        node.parent = upper
        upper.children[self._first(node)] = node
        return upper

    def add(self, parent: Node, key: bytes, pages: list[int]) -> Node:
        """Hangs a new run below `parent`, which has no child beginning with the same page."""
        node = Node(parent, key, pages)
        first = self._first(node)
        assert first not in parent.children
        parent.children[first] = node
        return node

    def append(self, leaf: Node, key: bytes, pages: list[int]) -> None:
        """Lengthens a leaf's run."""
        assert leaf.parent is not None, "a root has no run"
        assert not leaf.children
        leaf.key += key
        leaf.pages += pages
        leaf.end += len(pages)

    def trim(self, leaf: Node, count: int) -> list[int]:
        """Takes up to `count` pages off a leaf's tail and returns them; a leaf left without any leaves the tree."""
        parent = leaf.parent
        assert parent is not None, "a root has no run"
        assert not leaf.children
        keep = max(len(leaf.pages) - count, 0)
        pages = leaf.pages[keep:]
        if keep == 0:
            del parent.children[self._first(leaf)]
        del leaf.pages[keep:], leaf.key[keep * self.page_bytes :]
        leaf.end -= len(pages)
        return pages

    def prune(self, root: Node) -> None:
        """Forgets a namespace that has neither pages nor users."""
        if not root.children and root.lock == 0:
            del self.roots[bytes(root.key)]

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def check(self) -> None:
        """Asserts that the tree is well formed."""
        for namespace, root in self.roots.items():
            assert root.key == namespace, "a root under another name"
            assert (root.parent, root.pages, root.end) == (None, [], 0)
            assert root.children or root.lock, f"namespace {namespace!r} is empty and unused"
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert parent.children.get(self._first(node)) is node, "bad link to a child"
            assert node.pages, "a node without pages"
            assert len(node.key) == len(node.pages) * self.page_bytes, "key and pages differ in length"
            assert node.end == parent.end + len(node.pages), "wrong depth"
            assert node.lock >= 0
        for node in (*self.roots.values(), *self.nodes()):
            below = sum(child.lock for child in node.children.values())
            assert node.lock >= below, f"locked {node.lock} times above {below} locks"

    def _first(self, node: Node) -> bytes:
        return bytes(node.key[: self.page_bytes])
