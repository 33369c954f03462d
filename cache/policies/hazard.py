"""Learns from what came back, and when, which pages will: a hazard rate by kind of request and age.

Survival analysis with right-censored lives (Kaplan and Meier, "Nonparametric estimation from incomplete observations",
1958), and of what waits the item of the least index goes first: the most hits per second that keeping it any
longer can bring (Gittins, "Bandit processes and dynamic allocation indices", 1979).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Self

from .policy import Evictable, EvictionPolicy, Use

TURNS, SIZES, PAUSES = 5, 4, 3
KINDS = TURNS * SIZES * PAUSES
"""Of requests; one more lane is for heads that many share."""
SHORT_PAUSE, LONG_PAUSE = 8.0, 45.0
"""Seconds since the request before in the same conversation."""
SHARED = 3
"""Continuations that make an item a shared head, which is judged by itself."""
MOST_GHOSTS = 200_000
"""Names of pages that have gone and may yet come back."""


class _Path:
    """What one request used: its items come back together or not at all, so they are one life."""

    __slots__ = ("fresh", "kind", "left", "pages", "pause", "tick", "time", "turn")

    def __init__(self, use: Use, kind: int | None = None) -> None:
        self.tick, self.time = use
        self.pages = 0
        self.left = 0
        """Pages not used since: a later request may share only a part."""
        self.fresh = 0
        """Pages that nobody had used before."""
        self.turn = 1
        self.pause: float | None = None
        """Seconds since the latest use of the known part; None: there is none."""
        self.kind = kind
        """Its row of the table, decided when the path is complete."""


class _Rank(NamedTuple):
    path: _Path
    """Of the latest use."""
    tick: int
    born: int
    """Tick of the first use."""
    turn: int
    """Requests that followed each other up to the one that brought it."""
    branches: int
    """Continuations that were hung below it."""


class Hazard(EvictionPolicy):
    """Evicts what brings the fewest hits per second of keeping it, as learned from this cache's own past.

    A request's kind is its turn in the conversation, how much of it is new, and how fast it followed. For each kind the
    policy counts how many paths survive to an age, and how many are used again there; pages that have gone count on as
    ghosts. Whatever waits is in the lane of its kind, oldest first, and the lane gives whose oldest has the least index, of equals the one out of use for longest.
    Until it has seen enough, it goes by what it knows from other traces (`hazard=cold`: by nothing).
    """

    lanes = KINDS + 1

    def __init__(self, *, cold: bool = False) -> None:
        # Here, so that whoever only names policies does without NumPy.
        from .hazard_table import HazardTable

        self._table = HazardTable(KINDS, group=SIZES * PAUSES)
        if not cold:
            self._table.load_prior()
        self._path: _Path | None = None
        self._ghosts: OrderedDict[Hashable, tuple[_Path, int]] = OrderedDict()
        """Page -> its path, and for how many pages up to the next name it stands."""

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        if option not in (None, "cold"):
            raise ValueError("the only option is cold, to start without what was learned from other traces")
        return cls(cold=option == "cold")

    def touch(self, item: Evictable, use: Use) -> None:
        path = self._path
        if path is None or path.tick != use.tick:
            path = self._path = self._begin(use)
        rank = item.rank
        rank = self._first_use(item, path, use) if rank is None else self._use_again(item, rank, path, use)
        rank.path.pages += item.size
        rank.path.left += item.size
        path.turn = rank.turn
        item.rank = rank

    def priority(self, item: Evictable) -> int:
        return item.rank.tick

    def lane(self, item: Evictable) -> int:
        return self._kind(item.rank.path)

    def choose(self, firsts: Sequence[Evictable | None], pages: Sequence[int], use: Use) -> int:
        index = self._table.index
        least, chosen = (float("inf"), 0), 0
        for lane, item in enumerate(firsts):
            if item is not None:
                rank = item.rank
                value = (index(lane, use.now - rank.path.time), rank.tick)
                if value < least:
                    least, chosen = value, lane
        return chosen

    def spare(self, item: Evictable, use: Use) -> bool:
        """Spares nothing. It notes names of what is about to go, closer to each other towards the end of the run."""
        path: _Path = item.rank.path
        if path.left:
            names = item.identities
            end, step = len(names), 1
            while end > 0:
                at = max(end - step, 0)
                self._ghosts[names[at]] = path, end - at
                end, step = at, 2 * step
            while len(self._ghosts) > MOST_GHOSTS:
                self._ghosts.popitem(last=False)
        return False

    def _begin(self, use: Use, kind: int | None = None) -> _Path:
        path = _Path(use, kind)
        self._table.advance(use.now, self._kind)
        self._table.add(path)
        return path

    def _first_use(self, item: Evictable, path: _Path, use: Use) -> _Rank:
        turn, fresh = 1, item.size
        head = item.head
        if head is not None and head.rank is not None:
            turn = head.rank.turn
            if head.rank.born != use.tick:
                turn += 1
                head.rank = head.rank._replace(branches=head.rank.branches + 1)
        for at, name in enumerate(item.identities):
            ghost = self._ghosts.pop(name, None)
            if ghost is not None:
                gone, pages = ghost
                self._came_back(gone, pages, use)
                turn, fresh = max(turn, gone.turn + 1), item.size - 1 - at
                path.pause = use.now - gone.time
        path.fresh += fresh
        return _Rank(path, use.tick, use.tick, turn, 0)

    def _use_again(self, item: Evictable, rank: _Rank, path: _Path, use: Use) -> _Rank:
        self._came_back(rank.path, item.size, use)
        if rank.branches >= SHARED:
            path = self._begin(use, KINDS)
        else:
            path.pause = use.now - rank.path.time
        return rank._replace(path=path, tick=use.tick)

    def _came_back(self, path: _Path, pages: int, use: Use) -> None:
        pages = min(pages, path.left)
        if pages:
            path.left -= pages
            self._table.event(self._kind(path), use.now - path.time, pages / path.pages)

    def _kind(self, path: _Path) -> int:
        if path.kind is None:
            turn = min(path.turn, TURNS) - 1
            size = bisect_right((3, 15, 63), path.fresh)
            pause = 0 if path.pause is None else bisect_right((SHORT_PAUSE, LONG_PAUSE), path.pause)
            path.kind = (turn * SIZES + size) * PAUSES + pause
        return path.kind
