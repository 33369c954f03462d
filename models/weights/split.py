"""Reads parameters in the order of their shares: for each device of this process its own part, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from .names import Parameter

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
    target = buffer.swapaxes(0, axis)
    if wanted.size and wanted.max() >= size:
        target[wanted >= size] = 0
    for at, first, count in _runs(wanted):
        for name, start, stop in _stored(parameter, axis, first, min(first + count, size)):
            values = weights.read_range(name, axis, start, stop).swapaxes(0, axis)
            target[at : at + len(values)] = values
            at += len(values)


def _stored(parameter: Parameter, axis: int, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Where `[start, stop)` lies in the stored tensors, which are joined along the first axis: (name, start, stop)."""
    if axis != 0:
        ((name, _),) = parameter.parts
        if start < stop:
            yield name, start, stop
        return
    offset = 0
    for name, shape in parameter.parts:
        first, last = max(start - offset, 0), min(stop - offset, shape[0])
        if first < last:
            yield name, first, last
        offset += shape[0]


def _runs(wanted: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """(position, first element, length) of each stretch of consecutive elements."""
    step = np.diff(wanted)
    bounds = [0, *(np.flatnonzero(step != 1) + 1).tolist(), len(wanted)]
    for start, end in pairwise(bounds):
        if start < end:
            yield start, int(wanted[start]), end - start
