"""What one of several processes does, of those that write to one store, so that it stays within its size and nobody deletes
what another has just begun to use. No I/O, no clock, one thread; board.py carries out what is said here.

Every replica keeps a *note* in the store and renews it every turn; one whose note has not changed for a *lease* is taken for
dead. One of them holds the *claim*, and it alone deletes. A page leaves the store like this:

    the collector    dooms pages that nobody has used within a lease, and says so in the claim
    every replica    from its next turn on does without them, and says in its note that it knows; except for those it needs,
                     which stand in its note
    the collector    once all living replicas know, deletes what none of them needs, and says in the claim that it is done

All times are differences on one's own clock between one's own observations. A collector that is not heard of for a lease is
replaced by whoever is first to write the claim, on the condition that it has not changed. Where a store cannot keep such a
condition there may be two collectors for a turn: of two lists of doomed pages only the one that can be read in the claim is
ever known to all, so the other deletes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..page_keys import PageKey
from ..policies.policy import Use
from .names import Stored
from .notes import NOBODY, Claim, Note
from .shared_index import SharedIndex

TURNS_PER_LEASE = 6
"""How often a note is renewed within a lease."""
FULL, GOAL = 0.9, 0.8
"""Above the first share of its size the store is collected, down to the second: writers are to find room meanwhile, since
what they want to write while there is none stays unwritten."""
MOST_DOOMED = 4096
"""Pages at once: they must be deleted well within a lease."""
MOST_NOTED = 65_536
"""Pages in a note, the latest; it is renewed every turn."""


class News(NamedTuple):
    """What stands in the store, and what became of the last `Orders`."""

    began: float
    """When reading it began, on our clock."""
    ended: float
    notes: Mapping[bytes, Note]
    claim: Claim | None = None
    generation: bytes = b""
    """Of the claim, or of its absence."""
    deleted: tuple[PageKey, ...] = ()
    """Of those that were to be: these are gone."""


class Orders(NamedTuple):
    """To be carried out in this order. What fails is tried again in the next turn."""

    note: Note
    claim: Claim | None
    """To be written if the claim's generation is still that of the news."""
    delete: tuple[PageKey, ...]
    """Only if the claim was written."""
    bury: tuple[bytes, ...]
    """Replicas that are dead: their notes go."""


class Heard(NamedTuple):
    """The latest beat of a note or of the claim, and when it was first seen."""

    beat: tuple[bytes, int]
    at: float


@dataclass(slots=True)
class FleetStats:
    """Counters since the start, `replicas` excepted; they only grow."""

    replicas: int = 1
    """Alive, this one included."""
    deleted_pages: int = 0
    spared_pages: int = 0
    """Were to be deleted, but others needed them."""
    buried: int = 0
    """Replicas that were found dead."""


@dataclass(slots=True)
class _Collection:
    """As long as this replica holds the claim."""

    round: int
    doomed: tuple[PageKey, ...] = ()
    deleting: tuple[PageKey, ...] | None = None
    """What was ordered to be deleted; None before all know that it is doomed."""


class Fleet:
    """One replica; `turn` is everything."""

    def __init__(self, replica: bytes, index: SharedIndex, *, record_bytes: int, lease: float) -> None:
        """`replica`: an id that no other has, `REPLICA_BYTES` long. `record_bytes`: of each of its pages in the store.
        `lease`: in seconds; the same for all."""
        self.stats = FleetStats()
        self._replica = replica
        self._index = index
        self._record_bytes = record_bytes
        self._lease = lease
        self._beat = 0
        self._recent: dict[PageKey, float] = {}
        """Used here within a lease, the latest last."""
        self._others: dict[bytes, Note] = {}
        """Of the living."""
        self._anew = False
        """What their notes say is to be taken in again, all of it."""
        self._heard: dict[bytes, Heard] = {}
        self._claim_heard: Heard | None = None
        self._known = NOBODY, 0
        """Holder and round of the claim last taken in."""
        self._collection: _Collection | None = None

    @property
    def collects(self) -> bool:
        """Whether it holds the claim, as far as it knows."""
        return self._collection is not None

    def turn(self, news: News, use: Use) -> Orders:
        """Takes in what others say, and says what is to be written and deleted. `use` is the next moment."""
        dead = self._hear(news, use)
        self._remember_uses(use.now)
        claim_lives = self._hear_claim(news)
        if news.claim is not None and news.claim.holder != self._replica:
            self._collection = None
            self._obey(news.claim, use.now)
        claim, delete = self._collect(news, use) if self._may_collect(news.claim, claim_lives) else (None, ())
        self._beat += 1
        bury = dead if self.collects else ()
        self.stats.buried += len(bury)
        return Orders(self._note(), claim, delete, bury)

    def farewell(self, news: News) -> Orders:
        """The last turn of a replica that ends: nobody need wait for it."""
        claim = None
        if news.claim is not None and news.claim.holder == self._replica:
            claim = news.claim._replace(holder=NOBODY, round=news.claim.round + 1)
        return Orders(self._note(), claim, (), (self._replica,))

    # What others say.

    def _hear(self, news: News, use: Use) -> tuple[bytes, ...]:
        """Takes in the notes of the others; returns who is dead."""
        dead = []
        others = {}
        for name, note in news.notes.items():
            if name == self._replica:
                continue
            heard = self._heard.get(name)
            if heard is None or heard.beat != (name, note.beat):
                heard = self._heard[name] = Heard((name, note.beat), news.ended)
            if news.began - heard.at > self._lease:
                dead.append(name)
            else:
                others[name] = note
        for name in set(self._heard).difference(news.notes):
            del self._heard[name]
        before = {} if self._anew else self._others
        self._anew = False
        for name, note in others.items():
            self._take_over(note, before.get(name), use)
        self._others = others
        self.stats.replicas = 1 + len(others)
        return tuple(dead)

    def _take_over(self, note: Note, before: Note | None, use: Use) -> None:
        """What another has stored can be a hit at once, and what it has begun to use counts as used."""
        new = note.stored if before is None else note.stored - before.stored
        keys = sorted(new, key=lambda page: page.depth)
        for namespace in {page.namespace for page in keys}:
            self._index.sizes.setdefault(namespace, note.record_bytes)
        unknown = [Stored(page, note.record_bytes) for page in keys if page not in self._index]
        self._index.add_listed(unknown, use=use)
        self._index.heard(keys, use)

    def _hear_claim(self, news: News) -> bool:
        """Whether the holder of the claim, if there is one, is alive."""
        claim = news.claim
        if claim is None:
            self._claim_heard = None
            return False
        beat = claim.holder, claim.beat
        if self._claim_heard is None or self._claim_heard.beat != beat:
            self._claim_heard = Heard(beat, news.ended)
        return claim.holder != NOBODY and news.began - self._claim_heard.at <= self._lease

    def _obey(self, claim: Claim, now: float) -> None:
        """Does without what another has doomed; what it has doomed no longer is deleted, or spared."""
        self._end_doom(claim.doomed)
        for page in self._index.doom(claim.doomed, self._recent.__contains__):
            self._recent.pop(page, None)
            self._recent[page] = now
        self._known = claim.holder, claim.round

    def _end_doom(self, doomed: Iterable[PageKey]) -> None:
        """Only these are doomed any more. What was, and is in a note, is there still: the notes are to be taken in anew."""
        over = self._index.doomed.difference(doomed)
        if over:
            self._index.end_doom(over)
            self._anew = True

    # What this one says.

    def _remember_uses(self, now: float) -> None:
        for page in self._index.take_used():
            self._recent.pop(page, None)
            self._recent[page] = now
        while self._recent:
            page, at = next(iter(self._recent.items()))
            if now - at <= self._lease and len(self._recent) <= MOST_NOTED:
                break
            del self._recent[page]

    def _note(self) -> Note:
        pages = [page for page in self._recent if page in self._index]
        stored = frozenset(page for page in pages if self._index.is_stored(page))
        writing = frozenset(pages) - stored
        return Note(self._replica, self._beat, *self._known, self._record_bytes, stored, writing)

    # The collector.

    def _may_collect(self, claim: Claim | None, lives: bool) -> bool:
        return self._index.limit is not None and (claim is None or claim.holder == self._replica or not lives)

    def _collect(self, news: News, use: Use) -> tuple[Claim, tuple[PageKey, ...]]:
        """Gets the claim, or goes on with it: what to write there, and what to delete after that."""
        if news.claim is None:
            return Claim(self._replica, 1, 1), ()
        if news.claim.holder != self._replica:
            # What the last holder has doomed and not deleted stays doomed: nobody knows these pages any more.
            return Claim(self._replica, 1, news.claim.round + 1, news.claim.doomed), ()
        work = self._collection
        if work is None:
            work = self._collection = _Collection(news.claim.round, news.claim.doomed)
        self._end_deletion(work, news)
        delete: tuple[PageKey, ...] = ()
        if not work.doomed:
            work.doomed = tuple(self._victims(use))
            work.round += bool(work.doomed)
        elif news.claim.round == work.round and self._all_know(work.round):
            delete = work.deleting = self._unneeded(work.doomed)
        self._known = self._replica, work.round
        return Claim(self._replica, news.claim.beat + 1, work.round, work.doomed), delete

    def _end_deletion(self, work: _Collection, news: News) -> None:
        """A list is done with when all of it is deleted, or spared."""
        if work.deleting is None:
            return
        gone = frozenset(news.deleted)
        self.stats.deleted_pages += len(gone)
        left = tuple(page for page in work.deleting if page not in gone)
        if left:
            work.doomed = left
        else:
            self.stats.spared_pages += len(work.doomed) - len(work.deleting)
            work.doomed = ()
            work.round += 1
        self._end_doom(work.doomed)
        work.deleting = None

    def _victims(self, use: Use) -> list[PageKey]:
        limit = self._index.limit
        assert limit is not None
        full = self._index.total_bytes > FULL * limit
        return self._index.choose(
            int(GOAL * limit) if full else limit,
            use.now,
            most=MOST_DOOMED,
            spare=self._is_needed,
            orphan_age=self._lease,
        )

    def _is_needed(self, page: PageKey) -> bool:
        """Whether anybody has used the page within a lease, as far as that is known."""
        return page in self._recent or any(
            page in note.stored or page in note.writing for note in self._others.values()
        )

    def _all_know(self, round: int) -> bool:
        return all((note.collector, note.round) == (self._replica, round) for note in self._others.values())

    def _unneeded(self, doomed: Iterable[PageKey]) -> tuple[PageKey, ...]:
        """Without what anybody needs, and the heads of that."""
        by_key = {page.key: page for page in doomed}
        others = (page for note in self._others.values() for page in (*note.stored, *note.writing))
        for needed in (*others, *self._recent):
            page: PageKey | None = by_key.pop(needed.key, None) or by_key.pop(needed.parent, None)
            while page is not None:
                page = by_key.pop(page.parent, None)
        return tuple(by_key.values())
