"""Which copy of a model a request goes to."""

from __future__ import annotations

from array import array

import pytest

from tierax.cache.manager import CacheManager
from tierax.engine.router import ANSWER_TOKENS, LOAD_WEIGHT, PageView, Router, Standing, choose
from tierax.engine.stats import EngineStats, total

PAGE = 4


class Copies:
    """Caches without engines, and the router before them."""

    def __init__(self, count: int = 2, pages: int = 64) -> None:
        self.caches = [CacheManager(pages, PAGE, host_pages=8) for _ in range(count)]
        self.views = [PageView() for _ in range(count)]
        for cache, view in zip(self.caches, self.views, strict=True):
            cache.tiers.listen(view)
        self.router = Router(self.views, PAGE)

    def keys(self, tokens: list[int]) -> list[bytes]:
        names = self.caches[0].page_names(b"", array("i", tokens), len(tokens) // PAGE)
        return [name.key for name in names]

    def route(self, tokens: list[int]) -> int:
        """Where a request goes; it is under way from then on."""
        return self.router.route(self.keys(tokens), len(tokens)).replica

    def serve(self, tokens: list[int], answer: int = 8) -> int:
        """A request from its beginning to its end."""
        visit = self.router.route(self.keys(tokens), len(tokens))
        cache, whole = self.caches[visit.replica], array("i", [*tokens, *range(answer)])
        lease = cache.open(b"", whole, len(whole) - 1)
        assert cache.grow(lease, len(whole))
        cache.commit(lease, whole, len(whole))
        cache.release(lease)
        self.router.end(visit)
        return visit.replica


@pytest.mark.parametrize(
    ("standings", "place"),
    [
        ([Standing(0, 0, 0), Standing(0, 0, 0)], 0),
        # Nothing to choose between but room.
        ([Standing(0, 0, 9), Standing(0, 0, 3)], 1),
        ([Standing(8, 0, 9), Standing(0, 0, 0)], 0),
        ([Standing(8, 0, 0), Standing(64, 0, 9)], 1),
        # The prefix is worth a wait that is short, and no more than that.
        ([Standing(100, 300, 0), Standing(0, 0, 0)], 0),
        ([Standing(100, 500, 0), Standing(0, 0, 0)], 1),
        ([Standing(0, 500, 0), Standing(0, 400, 0), Standing(0, 100, 0)], 2),
        # So is room for others: a system prompt moves, a conversation does not.
        ([Standing(100, 0, 4000), Standing(0, 0, 0)], 0),
        ([Standing(100, 0, 6000), Standing(0, 0, 0)], 1),
        ([Standing(1000, 0, 10**9), Standing(0, 0, 0)], 0),
    ],
)
def test_what_is_cached_and_what_waits_are_weighed_up(standings: list[Standing], place: int) -> None:
    assert choose(standings) == place


def test_a_conversation_stays_where_its_pages_are() -> None:
    copies = Copies(pages=2000)
    homes, talks = [], [[100, 101, 102, 103, *range(n * 1000, n * 1000 + 200)] for n in range(8)]
    for talk in talks:
        homes.append(copies.serve(talk))
    assert min(homes.count(0), homes.count(1)) >= 2, "what they have in common is little"
    for turn in range(3):
        for number, talk in enumerate(talks):
            talk += [*range(8), *range(5000 + turn, 5011 + turn)]
            assert copies.serve(talk) == homes[number]
    assert copies.router.loads == [0, 0]


def test_requests_with_one_new_prefix_go_together_until_too_many_wait() -> None:
    copies = Copies()
    document = list(range(1, 2001))
    places = [copies.route([*document, 7000 + number]) for number in range(12)]
    # Nothing is computed yet: the second finds what the first is going to leave.
    ahead = places.index(1)
    assert places[:ahead] == [0] * ahead
    assert ahead == pytest.approx(2000 / (LOAD_WEIGHT * (2001 + ANSWER_TOKENS)), abs=1)
    assert places[ahead:].count(1) >= 5


def test_the_next_one_goes_to_the_idle_copy() -> None:
    copies = Copies(3)
    assert [copies.route([number] * 10) for number in range(6)] == [0, 1, 2, 0, 1, 2]


def test_what_was_evicted_is_not_looked_for() -> None:
    copies = Copies(pages=16)
    first = list(range(40))
    home = copies.serve(first)
    copies.caches[home].clear(0)
    copies.caches[home].clear(1)
    assert len(copies.views[home]) == 0
    other = list(range(9000, 9012))
    assert copies.serve(other) == home, "it holds least again"
    assert len(copies.views[home]) == 5


def test_a_page_on_two_tiers_is_held_until_it_has_left_both() -> None:
    cache, view = CacheManager(8, PAGE, host_pages=8), PageView()
    cache.tiers.listen(view)
    tokens = array("i", range(PAGE))
    lease = cache.open(b"", tokens, PAGE)
    assert cache.grow(lease, PAGE)
    cache.commit(lease, tokens, PAGE)
    cache.release(lease)
    hold = cache.hold(b"", tokens, PAGE, save=True)
    cache.drop(hold)
    cache.take_saves()
    (name,) = cache.page_names(b"", tokens, 1)
    cache.clear(0)
    assert name.key in view
    cache.clear(1)
    assert name.key not in view


def test_counters_of_copies_are_added_up() -> None:
    first, second = EngineStats(prompt_tokens=3, finished={"stop": 1}), EngineStats(prompt_tokens=4)
    first.cached_by_tier["host"], second.cached_by_tier["host"] = 5, 6
    second.finished["length"] = 2
    summed = total([first, second])
    assert (summed.prompt_tokens, summed.finished) == (7, {"stop": 1, "length": 2})
    assert summed.cached_by_tier == {"device": 0, "host": 11, "disk": 0}
    assert first.prompt_tokens == 3
