"""What a store keeps beside its pages: small records that are no pages, and never in the way of any."""

from __future__ import annotations

from helpers.disk_pages import NAMESPACE
from tierax.cache.disk.store import PageStore


def test_namespaces_are_described_once_for_people(store: PageStore) -> None:
    assert store.papers.description(NAMESPACE) == {}
    store.papers.describe(NAMESPACE, {"model": "tiny", "page_size": 16, "weights": b"\x01\xff"})
    store.papers.describe(NAMESPACE, {"model": "another"})
    assert store.papers.description(NAMESPACE) == {"model": "tiny", "page_size": 16, "weights": "01ff"}
    assert store.papers.described() == {NAMESPACE}
    assert list(store.list()) == [], "a description is no page"
    store.papers.forget(NAMESPACE)
    assert store.papers.described() == set()


def test_index_snapshot_is_kept(store: PageStore) -> None:
    assert store.papers.load_index() == b""
    assert store.papers.save_index(b"snapshot")
    assert store.papers.load_index() == b"snapshot"
    assert list(store.list()) == []
    store.papers.forget_index()
    assert store.papers.load_index() == b""


def test_a_mark_shows_who_has_the_same_store(store: PageStore) -> None:
    mark = store.papers.mark("a1b2")
    assert store.papers.sees(mark)
    assert not PageStore("memory://").papers.sees(mark), "another place"
    assert list(store.list()) == []
    store.papers.unmark(mark)
    assert not store.papers.sees(mark)
    store.papers.unmark(mark)
