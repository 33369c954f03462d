"""The allocator: each page has one owner."""

from __future__ import annotations

import pytest

from tierax.cache.page_pool import PagePool


def test_hands_out_neighbours_first_and_each_page_once() -> None:
    pool = PagePool(5)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(0) == []
    assert pool.take(2) == [3, 4]
    assert pool.num_free == 0
    pool.give_back([1, 3])
    assert pool.num_free == 2
    assert pool.take(2) == [1, 3]
    pool.check(range(5))


@pytest.mark.parametrize(
    ("pages", "message"),
    [([0, 0], "it is free"), ([3], "it is free"), ([5], "outside the pool"), ([-1], "outside")],
)
def test_refuses_pages_that_are_not_taken(pages: list[int], message: str) -> None:
    pool = PagePool(5)
    pool.take(2)
    with pytest.raises(AssertionError, match=message):
        pool.give_back(pages)


def test_refuses_more_than_is_free() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 are free"):
        pool.take(3)
    with pytest.raises(ValueError, match="no fewer than 0 pages, got -1"):
        PagePool(-1)


@pytest.mark.parametrize("owned", [[0], [0, 1, 1], [0, 1, 2], [0, 7]])
def test_check_sees_lost_and_twice_owned_pages(owned: list[int]) -> None:
    pool = PagePool(4)
    pool.take(2)
    pool.check([1, 0])
    with pytest.raises(AssertionError):
        pool.check(owned)
