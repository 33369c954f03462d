"""An object store serves through the same code as a directory, and its failures cost no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.disk_pages import LAYOUT, answer, answers, fill, payload, sequence
from helpers.object_store import ObjectStore, running_object_store
from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.names import page_name
from tierax.cache.disk.record import unpack
from tierax.cache.disk.store import PageStore, StoreError
from tierax.cache.disk.upkeep import check_pages, list_with_sizes
from tierax.cache.moves import Outcome

KEYS = sequence(12)


@pytest.fixture
def bucket() -> Iterator[ObjectStore]:
    with running_object_store() as server:
        yield server


def test_pages_go_to_a_bucket_and_come_back_to_another_replica(bucket: ObjectStore) -> None:
    writer = PageStore(bucket.spec())
    fill(writer, KEYS)
    writer.papers.describe(KEYS[0].namespace, {"model": "tiny"})
    assert set(bucket.objects) >= {"cache/" + page_name(key) for key in KEYS}
    reader = PageStore(bucket.spec(), read_only=True)
    index = DiskIndex(None)
    assert index.add_listed(list_with_sizes(reader)) == []
    assert index.match(KEYS) == 12
    assert index.bytes == 12 * LAYOUT.record_bytes
    for key, (outcome, record) in zip(KEYS, answers((reader.read, key) for key in KEYS), strict=True):
        assert outcome is Outcome.OK
        assert bytes(unpack(record, key, LAYOUT)) == payload(key)
    assert reader.papers.description(KEYS[0].namespace) == {"model": "tiny"}


def test_deleted_and_damaged_objects_are_noticed(bucket: ObjectStore) -> None:
    store = PageStore(bucket.spec())
    fill(store, KEYS[:3])
    assert answer(store.delete, KEYS[0]) is Outcome.OK
    name = "cache/" + page_name(KEYS[1])
    bucket.objects[name] = bucket.objects[name][:-10]
    found = {key: reason for key, _, reason in check_pages(store, KEYS[:3])}
    assert found == {KEYS[0]: "missing", KEYS[1]: found[KEYS[1]], KEYS[2]: None}
    assert str(found[KEYS[1]]).startswith("length")


def test_broken_server_is_an_io_error_and_recovers(bucket: ObjectStore) -> None:
    store = PageStore(bucket.spec())
    fill(store, KEYS[:1])
    bucket.broken = True
    assert answer(store.read, KEYS[0]) == (Outcome.IO_ERROR, None)
    assert answer(store.write, KEYS[1], b"x") is Outcome.IO_ERROR
    with pytest.raises(StoreError):
        list(store.list())
    bucket.broken = False
    assert answer(store.read, KEYS[0])[0] is Outcome.OK
