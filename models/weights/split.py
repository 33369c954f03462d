"""Reads parameters in the order of their shares: for each device of this process its own part, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from .names import Parameter, Part

if TYPE_CHECKING:
    from ..sharding import Shares
    from .loader import Weights


def read_split(
    weights: Weights,
    parameters: Sequence[Parameter],
    before: tuple[int, ...],
    shares: Shares,
    empty: Callable[[tuple[int, ...]], NDArray[Any]],
) -> jax.Array:
    """Parameters of one name and shape, rearranged and split as `shares` says, side by side along the axes `before`.

    `empty` makes arrays of the target type that jax may take over.
    """
    name, shape = parameters[0].name, parameters[0].shape
    axis, source = shares.split_axis(name), shares.source(name)
    elements = np.arange(shape[axis], dtype=np.int32) if source is None else source
    whole = jax.ShapeDtypeStruct((*before, *shape[:axis], len(elements), *shape[axis + 1 :]), np.float32)

    def part(index: tuple[slice, ...] | None) -> NDArray[Any]:
        assert index is not None
        wanted = elements[index[len(before) + axis]]
        own = (*shape[:axis], len(wanted), *shape[axis + 1 :])
        buffer = empty((*before, *own))
        for row, parameter in zip(buffer.reshape(-1, *own), parameters, strict=True):
            _fill(row, weights, parameter, axis, wanted)
        return buffer

    return jax.make_array_from_callback(whole.shape, shares.sharding(name, whole), part)


def _fill(
    buffer: NDArray[Any], weights: Weights, parameter: Parameter, axis: int, wanted: NDArray[np.int32]
) -> None:
    """Elements `wanted` along `axis` of a parameter; those past its end are zeros."""
    size = parameter.shape[axis]
    if wanted.size and wanted.max() >= size:
        buffer.swapaxes(0, axis)[wanted >= size] = 0
    for at, first, count in _runs(wanted):
        for part in parameter.parts:
            begin, end = _extent(part, axis, size)
            start, stop = max(first, begin), min(first + count, size, end)
            if start >= stop:
                continue
            place = list(part.at) + [slice(None)] * (axis + 1 - len(part.at))
            one = isinstance(place[axis], int)
            place[axis] = slice(at + start - first, at + stop - first)
            # A tensor that is one element along the axis has no such axis itself.
            buffer[tuple(place)] = (
                weights.read(part.name)
                if one
                else weights.read_range(part.name, axis, start - begin, stop - begin)
            )


def _extent(part: Part, axis: int, size: int) -> tuple[int, int]:
    """From where to where a stored tensor lies along an axis of its parameter, which is of this size."""
    place = part.at[axis] if axis < len(part.at) else slice(None)
    if isinstance(place, int):
        return place, place + 1
    first, last, _ = place.indices(size)
    return first, last


def _runs(wanted: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """(position, first element, length) of each stretch of consecutive elements."""
    step = np.diff(wanted)
    bounds = [0, *(np.flatnonzero(step != 1) + 1).tolist(), len(wanted)]
    for start, end in pairwise(bounds):
        if start < end:
            yield start, int(wanted[start]), end - start
