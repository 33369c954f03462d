"""Which pages of a tier are free. Knows page numbers only: neither what they hold nor who holds them."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Hands out the page numbers `0 … num_pages - 1`, each to one owner at a time."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"a pool has no fewer than 0 pages, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        """A stack, lowest number on top at first, so that neighbours in a sequence tend to be neighbours in memory."""
        self._taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages that were free; the caller has made sure that there are as many."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} are free"
        cut = len(self._free) - count
        pages = self._free[cut:]
        del self._free[cut:]
        pages.reverse()
        for page in pages:
            self._taken[page] = 1
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Frees pages that were taken. A page out of range, or given back twice, is a bug of the caller."""
        taken = self._taken
        for page in pages:
            assert 0 <= page < self.num_pages, f"page {page} is outside the pool of {self.num_pages}"
            assert taken[page], f"page {page} is given back, but it is free"
            taken[page] = 0
        self._free.extend(reversed(pages))

    def check(self, owned: Iterable[int]) -> None:
        """Asserts that `owned`, every page that anyone holds, and the free pages are the whole pool, each once."""
        held = list(owned)
        assert len(set(held)) == len(held), "a page has two owners"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not set(held) & set(self._free), "a page is both owned and free"
        assert set(held) | set(self._free) == set(range(self.num_pages)), "a page is lost, or out of range"
        flagged = {page for page, taken in enumerate(self._taken) if taken}
        assert flagged == set(held), "flags disagree"
