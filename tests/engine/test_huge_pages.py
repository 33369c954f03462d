"""Parameters in huge pages: the same numbers at the same addresses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tierax.engine.huge_pages import HUGE, merged, use_huge_pages


def test_what_shares_a_page_is_moved_once() -> None:
    assert merged([]) == []
    assert merged([(5 * HUGE, 6 * HUGE), (HUGE + 5, HUGE + 9)]) == [
        (HUGE + 5, HUGE + 9),
        (5 * HUGE, 6 * HUGE),
    ]
    assert merged([(10, 20), (30, 40), (HUGE + 1, HUGE + 2)]) == [(10, 40), (HUGE + 1, HUGE + 2)]
    assert merged([(10, HUGE), (HUGE, HUGE + 5), (20, 30)]) == [(10, HUGE + 5)]


def huge_bytes(begin: int, end: int) -> int:
    """What the system says of the mappings that have a part of this span."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) < end and int(head[2], 16) > begin
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages are asked for on Linux alone")
def test_arrays_keep_their_numbers_and_addresses() -> None:
    numbers = np.random.default_rng(3).integers(0, 2**31, 3 * HUGE, np.int32)
    arrays = [jnp.asarray(numbers).copy(), jnp.arange(7), jnp.zeros((0, 4))]
    before = [array.unsafe_buffer_pointer() for array in arrays]
    moved = use_huge_pages(arrays)
    assert [array.unsafe_buffer_pointer() for array in arrays] == before
    np.testing.assert_array_equal(arrays[0], numbers)
    np.testing.assert_array_equal(arrays[1], np.arange(7))
    assert 0 <= moved <= sum(array.nbytes for array in arrays)
    assert huge_bytes(before[0], before[0] + numbers.nbytes) >= moved - 2 * HUGE


def test_what_cannot_be_moved_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages([jnp.arange(7)]) == 0
