"""The pages of the disk tier by key, each below its head: what follows from that, whoever may evict or use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..page_keys import PageKey
from .names import Stored
from .page import Listing, NamespaceStats, Page


class Forest:
    """A page has its place only while its head has one. Iterates over all pages, heads before tails."""

    def __init__(self) -> None:
        self._pages: dict[bytes, Page] = {}
        """By key alone: a key names its namespace, parent and depth as well."""

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        # Nobody adds a page before its head, and a dict keeps that order.
        return iter(self._pages.values())

    def find(self, key: PageKey) -> Page | None:
        page = self._pages.get(key.key)
        return page if page is not None and page.key == key else None

    def named(self, name: bytes) -> Page | None:
        """The page whose key is this."""
        return self._pages.get(name)

    def place(self, key: PageKey, nbytes: int, *, stored: bool) -> Page | None:
        """A page that may be added; None if there is another one of that key, or no head for it."""
        parent = self._pages.get(key.parent)
        if key.key in self._pages:
            return None
        if key.depth == 0:
            return Page(key, nbytes, None, stored=stored) if key.parent == key.namespace else None
        if parent is None or (parent.key.namespace, parent.key.depth + 1) != (key.namespace, key.depth):
            return None
        return Page(key, nbytes, parent, stored=stored)

    def add(self, page: Page) -> None:
        self._pages[page.key.key] = page
        if page.parent is not None:
            page.parent.children[page] = None

    def remove(self, page: Page) -> None:
        """One that has no tails."""
        del self._pages[page.key.key]
        if page.parent is not None:
            del page.parent.children[page]

    def subtree(self, page: Page) -> list[Page]:
        """The page and all that hangs below it, tails before heads."""
        found, waiting = [], [page]
        while waiting:
            item = waiting.pop()
            found.append(item)
            waiting.extend(item.children)
        return found[::-1]

    def heads(self, namespace: bytes | None) -> list[Page]:
        """The first pages of all sequences, or of those of one namespace."""
        return [page for page in self if page.parent is None and namespace in (None, page.key.namespace)]

    def namespaces(self) -> dict[bytes, NamespaceStats]:
        """What every namespace has here; a walk over all pages."""
        found: dict[bytes, NamespaceStats] = {}
        for page in self:
            stats = found.setdefault(page.key.namespace, NamespaceStats())
            stats.pages += 1
            stats.bytes += page.nbytes
            stats.deepest = max(stats.deepest, page.end)
        return found

    def compare(self, listed: Sequence[Stored]) -> Listing:
        """What a list of all that the store holds has to tell. For any thread: a large store takes a while to go through."""
        known = self._pages
        unknown = [page for page in listed if page.key.key not in known]
        there = {page.key.key for page in listed if not page.only_parts}
        absent = [page.key for page in list(known.values()) if page.key.key not in there]
        return Listing(unknown, frozenset(absent))

    def check(self) -> None:
        """Asserts that every page is below its head, and every head knows its tails."""
        for name, page in self._pages.items():
            key = page.key
            assert name == key.key, "a page under another's key"
            if page.parent is None:
                assert (key.depth, key.parent) == (0, key.namespace), "a page without its head"
            else:
                head = page.parent.key
                assert self._pages.get(head.key) is page.parent, "the head has left before its tail"
                assert page in page.parent.children, "a tail that its head does not know"
                assert (key.depth, key.parent, key.namespace) == (head.depth + 1, head.key, head.namespace)
        assert sum(len(page.children) for page in self) == sum(page.parent is not None for page in self)
