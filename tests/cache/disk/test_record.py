"""A record proves that it is the wanted page, whole and unchanged; anything else is refused with the reason."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from helpers.disk_pages import LAYOUT, OTHER_NAMESPACE, payload, record, sequence
from tierax.cache.disk.record import PAYLOAD_OFFSET, PageLayout, RecordError, inspect, pack, unpack

KEY, NEXT_KEY = sequence(2)


def test_payload_comes_back_as_a_view_of_the_record() -> None:
    packed = record(KEY)
    found = unpack(packed, KEY, LAYOUT)
    assert bytes(found) == payload(KEY)
    assert found.obj is packed, "it was copied"
    assert len(packed) == LAYOUT.record_bytes == PAYLOAD_OFFSET + LAYOUT.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "uint8"])
def test_arrays_of_every_kv_dtype_round_trip(dtype: str) -> None:
    array = (
        np.random.default_rng(1)
        .integers(0, 100, (3, 5, 2))
        .astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    )
    layout = PageLayout(array.shape, dtype)
    assert layout.nbytes == array.nbytes
    assert bytes(unpack(memoryview(pack(KEY, layout, array)), KEY, layout)) == array.tobytes()


def test_record_tells_what_it_is() -> None:
    key, layout, found = inspect(record(KEY))
    assert (key, layout, bytes(found)) == (KEY, LAYOUT, payload(KEY))


def test_every_single_flipped_bit_of_the_used_header_and_some_of_the_payload_are_noticed() -> None:
    good = record(KEY)
    used = good.index(b"}]}") + 3
    for place in (*range(used), PAYLOAD_OFFSET - 1, PAYLOAD_OFFSET, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        with pytest.raises(RecordError):
            unpack(bytes(bad), KEY, LAYOUT)


@pytest.mark.parametrize("length", [0, 1, 31, PAYLOAD_OFFSET - 1, PAYLOAD_OFFSET, LAYOUT.record_bytes - 10])
def test_short_record_is_refused_for_its_length(length: int) -> None:
    with pytest.raises(RecordError, match="length"):
        unpack(record(KEY)[:length], KEY, LAYOUT)


def test_longer_record_is_refused() -> None:
    with pytest.raises(RecordError, match="length"):
        unpack(record(KEY) + b"x", KEY, LAYOUT)


def test_foreign_bytes_and_later_versions_are_told_apart() -> None:
    with pytest.raises(RecordError, match="magic"):
        unpack(bytes(LAYOUT.record_bytes), KEY, LAYOUT)
    later = bytearray(record(KEY))
    later[8] = 2
    with pytest.raises(RecordError, match="version: format 2"):
        unpack(bytes(later), KEY, LAYOUT)


def test_another_page_under_this_name_is_refused() -> None:
    same_tokens_of_another = sequence(1, namespace=OTHER_NAMESPACE)[0]
    for other in (NEXT_KEY, same_tokens_of_another, KEY._replace(depth=1), KEY._replace(parent=NEXT_KEY.key)):
        with pytest.raises(RecordError, match="other key"):
            unpack(record(other), KEY, LAYOUT)


@pytest.mark.parametrize("layout", [PageLayout((2, 16, 8, 3), "float32"), PageLayout(LAYOUT.shape, "int32")])
def test_same_bytes_in_another_layout_are_refused(layout: PageLayout) -> None:
    with pytest.raises(RecordError, match="other layout"):
        unpack(record(KEY), KEY, layout)


def test_payload_of_the_wrong_size_is_not_packed() -> None:
    with pytest.raises(ValueError, match="3072 bytes, not 3071"):
        pack(KEY, LAYOUT, bytes(LAYOUT.nbytes - 1))


def test_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float7"):
        _ = PageLayout((1,), "float7").nbytes
