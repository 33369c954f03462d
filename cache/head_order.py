"""Pages of a pool that is split over devices by KV head, and the same pages with all heads in the model's order.

Host and disk hold the latter, so that what they hold does not depend on the number of devices. On a device there may be
places for heads that it has not got, and several devices may hold one head. NumPy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Held(NamedTuple):
    """Consecutive heads on one device, which fill its first places."""

    device: int
    """Index in the order of the split."""
    first: int
    """Of them, counted among the heads of `HeadOrder`."""
    size: int
    """How many."""


class HeadOrder:
    """Takes pages apart and puts them together, for the devices of one process."""

    def __init__(self, kv_heads: NDArray[np.int32], num_heads: int, devices: Sequence[int]) -> None:
        """kv_heads: i32 `[all devices, places]`, the model's head in each place, `num_heads` = none;
        devices: those of this process."""
        real = {device: kv_heads[device][kv_heads[device] < num_heads] for device in devices}
        own = sorted({int(head) for heads in real.values() for head in heads})
        assert own == list(range(own[0], own[0] + len(own))), "a process holds consecutive heads"
        self.heads = range(own[0], own[0] + len(own))
        """Heads of the model whose KV this process holds: those of its pages, in order."""
        self.places = kv_heads.shape[1]
        """For heads, on each device."""
        self.held = tuple(
            Held(device, int(heads[0]) - own[0] if len(heads) else 0, len(heads))
            for device, heads in real.items()
        )
        """What each device has got."""
        seen: set[int] = set()
        self.sources = tuple(held for held in self.held if held.size and not _already(held, seen))
        """Devices that have all heads between them, each once."""

    def join(self, blocks: Mapping[int, np.ndarray], pages: np.ndarray) -> None:
        """Fills `pages` `[n, layers, page_size, heads, width]` with what the `sources` have.

        blocks: by device, `[n or more, layers, page_size, places, width]`; a single place may have no axis.
        """
        for held in self.sources:
            block = self._with_places(blocks[held.device])[: len(pages)]
            pages[..., held.first : held.first + held.size, :] = block[..., : held.size, :]

    def part(self, pages: np.ndarray, held: Held, block: np.ndarray) -> None:
        """The opposite for one device: fills the first places of its block; others are left alone."""
        own = pages[..., held.first : held.first + held.size, :]
        self._with_places(block)[: len(pages), ..., : held.size, :] = own

    def _with_places(self, block: np.ndarray) -> np.ndarray:
        return block.reshape(*block.shape[:3], self.places, block.shape[-1])


def _already(held: Held, seen: set[int]) -> bool:
    # Heads that are on several devices are alone there, so that two devices have all of their heads in common or none.
    known = held.first in seen
    seen.add(held.first)
    return known
