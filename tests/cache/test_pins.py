"""Pinned prefixes: their quota, what they share, and that nothing of them is left over."""

from __future__ import annotations

from array import array

import pytest

from tierax.cache.manager import CacheManager
from tierax.cache.pins import PinError, Pins
from tierax.cache.radix_tree import HOST

PAGE = 4


def tokens(name: int, pages: int) -> array[int]:
    return array("i", [name * 1000 + i for i in range(pages * PAGE)])


def make(pages: int = 32, host_pages: int = 16) -> CacheManager:
    return CacheManager(pages, PAGE, host_pages=host_pages, write_policy="write_back")


def put(cache: CacheManager, ids: array[int], namespace: bytes = b"") -> None:
    """A request comes and goes; its whole pages stay on the device."""
    lease = cache.open(namespace, ids, len(ids))
    assert cache.grow(lease, len(ids))
    cache.commit(lease, ids, len(ids))
    cache.release(lease)


def test_a_pin_brings_what_only_the_device_has_to_the_host_and_keeps_it() -> None:
    cache = make()
    pins = Pins(cache, 0.5)
    put(cache, tokens(1, 3))
    pin = pins.pin(b"", tokens(1, 3))
    assert (pin.pages, pin.held_pages, pins.pages) == (3, 3, 3)
    pages, rows = cache.take_saves()
    assert (len(pages), len(rows)) == (3, 3)
    cache.clear()
    assert cache.match(b"", tokens(1, 3), 99) == (0, 3)
    cache.check()
    pins.unpin(pin.id)
    assert (len(pins), pins.pages) == (0, 0)
    cache.clear()
    assert cache.match(b"", tokens(1, 3), 99) == (0, 0)
    assert cache.host.free == 16
    with pytest.raises(KeyError):
        pins.unpin(pin.id)


def test_shared_pages_count_once_in_their_namespace_only() -> None:
    cache = make()
    pins = Pins(cache, 0.5)
    short, long = tokens(1, 4), tokens(1, 4) + tokens(2, 3)
    for namespace in (b"", b"other"):
        put(cache, long, namespace)
    pins.pin(b"", short)
    pins.pin(b"", long)
    assert pins.pages == 7
    with pytest.raises(PinError, match="2 more pages would be pinned, but 7 of the 8"):
        pins.pin(b"other", tokens(1, 2))
    pins.pin(b"other", tokens(1, 1))
    assert (len(pins), pins.pages) == (3, 8)
    pins.pin(b"", long)
    assert (len(pins), pins.pages) == (3, 8), "the same again is the same pin"
    cache.check()


def test_what_cannot_be_pinned_leaves_no_trace() -> None:
    cache = make()
    pins = Pins(cache, 0.5)
    for ids, code in (
        (tokens(1, 1)[:3], "too_short"),
        (tokens(1, 2), "not_cached"),
        (tokens(1, 9), "pin_quota_exceeded"),
    ):
        with pytest.raises(PinError) as refused:
            pins.pin(b"", ids)
        assert refused.value.code == code
    put(cache, tokens(1, 2))
    with pytest.raises(PinError, match="Only 2 of 3 pages"):
        pins.pin(b"", tokens(1, 3))
    assert cache.host.in_use == 0
    cache.check()
    for unusable in (Pins(make(host_pages=0), 0.5), Pins(cache, 0.5, staging_only=True)):
        with pytest.raises(PinError, match="no host cache"):
            unusable.pin(b"", tokens(1, 1))


def test_a_lost_device_voids_holds_and_restore_takes_them_again() -> None:
    cache = make()
    pins = Pins(cache, 1.0)
    for name in (1, 2):
        put(cache, tokens(name, 3))
    pins.pin(b"", tokens(1, 3))
    cache.take_saves()
    pins.pin(b"", tokens(2, 3))
    unfilled = set(cache.take_saves()[1][1:])
    cache.reset(unfilled)
    assert [pin.held_pages for pin in pins] == [0, 0]
    assert pins.restore() == 1
    assert [pin.held_pages for pin in pins] == [3, 1]
    cache.check()
    put(cache, tokens(2, 3))
    cache.hold(b"", tokens(2, 3), 99, save=True)
    assert pins.restore() == 0, "somebody has brought the rest back"
    assert pins.pages == 6


def test_clearing_a_namespace_spares_the_others_and_what_is_held() -> None:
    cache = make()
    for namespace in (b"a", b"b"):
        put(cache, tokens(1, 2) + tokens(2, 2), namespace)
        put(cache, tokens(1, 2) + tokens(3, 2), namespace)
    hold = cache.hold(b"a", tokens(1, 2), 99, save=True)
    cache.clear(namespace=b"a")
    cache.check()
    assert cache.match(b"a", tokens(1, 2), 99) == (0, 2)
    assert cache.match(b"b", tokens(1, 2) + tokens(3, 2), 99) == (4, 0)
    cache.drop(hold)
    cache.clear(HOST, b"a")
    cache.clear(namespace=b"never seen")
    cache.check()
    assert (cache.host.free, cache.free) == (16, 26)
