"""Pages cut up for devices and put together again: every head once, in the model's order."""

from __future__ import annotations

import numpy as np
import pytest

from tierax.cache.head_order import HeadOrder
from tierax.models.sharding import split_heads

LAYERS, PAGE_SIZE, WIDTH, PAGES = 2, 3, 4, 5


def blocks_of(order: HeadOrder, pages: np.ndarray) -> dict[int, np.ndarray]:
    """What each device holds; places without a head hold -1."""
    blocks = {}
    for held in order.held:
        block = np.full((len(pages), LAYERS, PAGE_SIZE, order.places, WIDTH), -1.0)
        order.part(pages, held, block)
        blocks[held.device] = block
    return blocks


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_what_is_cut_up_comes_back_together(kv_heads: int, devices: int) -> None:
    _, held = split_heads(2 * kv_heads, kv_heads, devices)
    order = HeadOrder(held, kv_heads, range(devices))
    assert order.heads == range(kv_heads)
    pages = np.random.default_rng(0).random((PAGES, LAYERS, PAGE_SIZE, kv_heads, WIDTH))
    blocks = blocks_of(order, pages)
    for device, block in blocks.items():
        for place, head in enumerate(held[device]):
            expected = pages[..., head, :] if head < kv_heads else -1.0
            np.testing.assert_array_equal(
                block[..., place, :], np.broadcast_to(expected, block[..., 0, :].shape)
            )
    # Nothing is read of a device that has nothing of its own.
    assert sum(source.size for source in order.sources) == kv_heads
    joined = np.zeros_like(pages)
    order.join({source.device: blocks[source.device] for source in order.sources}, joined)
    np.testing.assert_array_equal(joined, pages)


def test_a_single_place_needs_no_axis_and_a_batch_may_be_longer_than_what_counts() -> None:
    order = HeadOrder(np.array([[0], [1]], np.int32), 2, [0, 1])
    pages = np.random.default_rng(0).random((2, LAYERS, PAGE_SIZE, 2, WIDTH))
    blocks = {device: np.zeros((4, LAYERS, PAGE_SIZE, WIDTH)) for device in (0, 1)}
    for held in order.held:
        order.part(pages, held, blocks[held.device])
    np.testing.assert_array_equal(blocks[1][:2], pages[..., 1, :])
    joined = np.zeros_like(pages)
    order.join(blocks, joined)
    np.testing.assert_array_equal(joined, pages)


def test_a_process_has_the_heads_of_its_own_devices() -> None:
    _, held = split_heads(8, 4, 8)
    first, second = HeadOrder(held, 4, range(4)), HeadOrder(held, 4, range(4, 8))
    assert (first.heads, second.heads) == (range(2), range(2, 4))
    assert [source.device for source in second.sources] == [4, 6]
    assert [(part.first, part.size) for part in second.held] == [(0, 1), (0, 1), (1, 1), (1, 1)]
