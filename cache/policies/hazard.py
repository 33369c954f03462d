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
"""Of requests; two more lanes are for heads that many share, and for loose ends."""
HEADS, ENDS = KINDS, KINDS + 1
SHORT_PAUSE, LONG_PAUSE = 8.0, 45.0
"""Seconds since the request before in the same conversation."""
SHARED = 3
"""Continuations that make an item a shared head, which is judged by itself."""
MOST_GHOSTS = 200_000
"""Names of pages that have gone and may yet come back."""
LOOSE = 0.5
"""A path's last page that comes back so much more seldom than its others is a loose end: what follows mostly replaces it."""
END_WEIGHT, END_MEMORY = 10.0, 0.999
"""Returns that stand for no difference at first; weight of a return after the next one."""


class _Path:
    """What one request used: its items come back together or not at all, so they are one life."""

    __slots__ = ("end", "fresh", "kind", "left", "loose", "pages", "pause", "tick", "time", "turn")

    def __init__(self, use: Use, kind: int | None = None, *, loose: bool = False) -> None:
        self.tick, self.time = use
        self.end = 0
        """Depth of its last page."""
        self.loose = loose
        """Its last page goes by itself."""
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

    lanes = KINDS + 2

    def __init__(self, *, cold: bool = False) -> None:
        # Here, so that whoever only names policies does without NumPy.
        from .hazard_table import HazardTable

        self._table = HazardTable(KINDS, group=SIZES * PAUSES)
        if not cold:
            self._table.load_prior()
        self._path: _Path | None = None
        self._ghosts: OrderedDict[Hashable, tuple[_Path, int, bool]] = OrderedDict()
        """Page -> its path, for how many pages up to the next name it stands, and whether it was the path's last."""
        self._ends_back, self._pages_back = END_WEIGHT, END_WEIGHT
        """Returns of last pages, and of an average page of the same paths."""

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
        rank.path.end = item.end
        path.turn = rank.turn
        item.rank = rank

    def priority(self, item: Evictable) -> int:
        return item.rank.tick

    def lane(self, item: Evictable) -> int:
        return ENDS if _has_loose_end(item) else self._kind(item.rank.path)

    def choose(self, firsts: Sequence[Evictable | None], pages: Sequence[int], use: Use) -> int:
        index = self._table.index
        least, chosen = (float("inf"), 0), 0
        for lane, item in enumerate(firsts):
            if item is not None:
                rank = item.rank
                age = use.now - rank.path.time
                if lane == ENDS:
                    value = (index(self._kind(rank.path), age, self._worth_of_ends), rank.tick)
                else:
                    value = (index(lane, age), rank.tick)
                if value < least:
                    least, chosen = value, lane
        return chosen

    def spare(self, item: Evictable, use: Use) -> bool:
        """Spares nothing. It notes names of what is about to go, closer to each other towards the end of the run."""
        path: _Path = item.rank.path
        if path.left:
            names = item.identities
            end, step = len(names), 1
            first = end - 1 if _has_loose_end(item) else 0
            while end > first:
                at = max(end - step, 0)
                self._ghosts[names[at]] = path, end - at, end == len(names) and item.end == path.end
                end, step = at, 2 * step
            while len(self._ghosts) > MOST_GHOSTS:
                self._ghosts.popitem(last=False)
        return False

    def at_a_time(self, item: Evictable) -> int | None:
        return 1 if _has_loose_end(item) else None

    @property
    def _worth_of_ends(self) -> float:
        """How often last pages come back, where others come back once."""
        return self._ends_back / self._pages_back

    def _begin(self, use: Use, kind: int | None = None) -> _Path:
        path = _Path(use, kind, loose=kind is None and self._worth_of_ends < LOOSE)
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
                gone, pages, last = ghost
                self._came_back(gone, pages, use, last=last)
                turn, fresh = max(turn, gone.turn + 1), item.size - 1 - at
                path.pause = use.now - gone.time
        path.fresh += fresh
        return _Rank(path, use.tick, use.tick, turn, 0)

    def _use_again(self, item: Evictable, rank: _Rank, path: _Path, use: Use) -> _Rank:
        self._came_back(rank.path, item.size, use, last=item.end == rank.path.end)
        if rank.branches >= SHARED:
            path = self._begin(use, HEADS)
        else:
            path.pause = use.now - rank.path.time
        return rank._replace(path=path, tick=use.tick)

    def _came_back(self, path: _Path, pages: int, use: Use, *, last: bool) -> None:
        pages = min(pages, path.left)
        if pages:
            path.left -= pages
            share = pages / path.pages
            self._table.event(self._kind(path), use.now - path.time, share)
            if path.pages > 1 and path.kind != HEADS:
                fades = END_MEMORY**share
                self._ends_back = self._ends_back * fades + last
                self._pages_back = self._pages_back * fades + share

    def _kind(self, path: _Path) -> int:
        if path.kind is None:
            turn = min(path.turn, TURNS) - 1
            size = bisect_right((3, 15, 63), path.fresh)
            pause = 0 if path.pause is None else bisect_right((SHORT_PAUSE, LONG_PAUSE), path.pause)
            path.kind = (turn * SIZES + size) * PAUSES + pause
        return path.kind


def _has_loose_end(item: Evictable) -> bool:
    path: _Path = item.rank.path
    return path.loose and item.end == path.end
