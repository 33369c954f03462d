"""What the machine can do at best: memory read bandwidth and f32 matmul speed, and the bounds that follow.

A decode step reads all weights and the KV of all that run; a prefill computes. On an accelerator the same numbers
are measured through XLA.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Clock = Callable[[], float]

TOLERANCE = 1.05
"""A figure this many times its bound says that the bound was measured wrongly."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Best of all repetitions of all methods."""

    read_bytes_s: float
    read_method: str
    flop_s: float
    read_buffer_bytes: int

    @staticmethod
    def best(first: Machine, second: Machine) -> Machine:
        """The better of two measurements, figure by figure."""
        read = max(first, second, key=lambda machine: machine.read_bytes_s)
        return Machine(
            read.read_bytes_s, read.read_method, max(first.flop_s, second.flop_s), read.read_buffer_bytes
        )


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a step of one model must at least read and compute."""

    weight_bytes: int
    """Read by every step; an embedding table that is no output head is not."""
    kv_bytes_per_token: int
    matrix_parameters: int
    """Of the layers: 2 FLOPs each per token."""
    head_parameters: int
    """2 FLOPs each per row that is sampled."""
    attention_flops_per_pair: int
    """Per query and key: scores and weighted sum, all layers and heads."""

    def decode_bound(self, machine: Machine, batch: int, context: int) -> float:
        """Tokens per second of `batch` sequences with `context` tokens of KV each, limited by reading."""
        step = self.weight_bytes + batch * context * self.kv_bytes_per_token
        return batch * machine.read_bytes_s / step

    def prefill_bound(self, machine: Machine, tokens: int) -> float:
        """Tokens per second of one prompt, limited by arithmetic; logits of its last token only."""
        pairs = tokens * (tokens + 1) / 2
        flops = 2 * self.matrix_parameters * tokens + 2 * self.head_parameters
        return tokens * machine.flop_s / (flops + self.attention_flops_per_pair * pairs)


def impossible(name: str, figure: float, bound: float) -> str | None:
    """A message if the figure exceeds its bound by more than rounding and noise explain."""
    if figure <= TOLERANCE * bound:
        return None
    return (
        f"{name}: {figure:.1f} is {figure / bound:.2f} times its bound of {bound:.1f}: the bound was measured too low "
        "(was the machine busy?), so no ratio of this run counts"
    )


def measure_machine(clock: Clock, *, buffer_bytes: int = 1 << 30, repeats: int = 5) -> Machine:
    """Reads a buffer with all cores by several methods, and multiplies matrices."""
    best, method = 0.0, ""
    for name, make in _READS.items():
        read = make(buffer_bytes)
        read()
        seconds = min(_timed(read, clock) for _ in range(repeats))
        if buffer_bytes / seconds > best:
            best, method = buffer_bytes / seconds, name
    return Machine(best, method, _matmul_speed(clock, repeats), buffer_bytes)


def _timed(work: Callable[[], object], clock: Clock) -> float:
    started = clock()
    work()
    return clock() - started


def _threaded(reduce: Callable[[np.ndarray], object]) -> Callable[[int], Callable[[], object]]:
    """A NumPy reduction over disjoint parts of the buffer, one thread per core."""

    def make(size: int) -> Callable[[], object]:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        parts = np.array_split(np.ones(size // 4, np.float32), threads)
        pool = ThreadPoolExecutor(threads)
        return lambda: list(pool.map(reduce, parts))

    return make


def _jitted_max(size: int) -> Callable[[], object]:
    buffer = jnp.ones((64, size // 256), jnp.float32)
    reduce = jax.jit(lambda x: x.max(axis=1))
    return lambda: reduce(buffer).block_until_ready()


def _matvec(size: int) -> Callable[[], object]:
    width = 2048
    matrix, vector = jnp.ones((size // 4 // width, width), jnp.float32), jnp.ones(width, jnp.float32)
    multiply = jax.jit(lambda w, x: w @ x)
    return lambda: multiply(matrix, vector).block_until_ready()


_READS: dict[str, Callable[[int], Callable[[], object]]] = {
    "numpy max": _threaded(np.max),
    "numpy sum": _threaded(np.sum),
    "numpy dot": _threaded(lambda part: np.dot(part, part)),
    "jitted max": _jitted_max,
    "jitted matvec": _matvec,
}


def _matmul_speed(clock: Clock, repeats: int, size: int = 2048) -> float:
    a = jnp.ones((size, size), jnp.float32)
    multiply = jax.jit(lambda x: x @ x.T)
    multiply(a).block_until_ready()
    seconds = min(_timed(lambda: multiply(a).block_until_ready(), clock) for _ in range(2 * repeats))
    return 2 * size**3 / seconds
