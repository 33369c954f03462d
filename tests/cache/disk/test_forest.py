"""Pages below their heads: who has a place, and what hangs below whom."""

from __future__ import annotations

import pytest

from helpers.disk_pages import NAMESPACE, OTHER_NAMESPACE, sequence
from tierax.cache.disk.forest import Forest
from tierax.cache.page_keys import PageKey

KEYS = sequence(4)


def planted(*sequences: list[PageKey]) -> Forest:
    forest = Forest()
    for keys in sequences:
        for key in keys:
            if (page := forest.place(key, 10, stored=True)) is not None:
                forest.add(page)
    forest.check()
    return forest


def test_a_page_has_a_place_only_below_its_head() -> None:
    forest = planted(KEYS[:1])
    assert forest.place(KEYS[2], 10, stored=True) is None, "its head is absent"
    assert forest.place(KEYS[0], 10, stored=True) is None, "it is there"
    assert forest.place(KEYS[1], 10, stored=True) is not None


@pytest.mark.parametrize(
    "key",
    [
        KEYS[1]._replace(depth=2),
        KEYS[1]._replace(namespace=OTHER_NAMESPACE),
        sequence(1, start=b"other")[0]._replace(parent=OTHER_NAMESPACE),
    ],
)
def test_a_key_that_contradicts_its_head_has_none(key: PageKey) -> None:
    assert planted(KEYS[:1]).place(key, 10, stored=True) is None


def test_a_subtree_is_named_tails_first_and_leaves_in_that_order() -> None:
    forest = planted(KEYS)
    doomed = forest.subtree(forest.heads(None)[0])
    assert [page.key for page in doomed] == KEYS[::-1]
    for page in doomed:
        forest.remove(page)
        forest.check()
    assert len(forest) == 0


def test_namespaces_have_heads_and_sums_of_their_own() -> None:
    forest = planted(KEYS, sequence(2, namespace=OTHER_NAMESPACE))
    assert [page.key for page in forest.heads(NAMESPACE)] == KEYS[:1]
    stats = forest.namespaces()
    assert (stats[NAMESPACE].pages, stats[NAMESPACE].deepest) == (4, 4)
    assert stats[OTHER_NAMESPACE].bytes == 20
