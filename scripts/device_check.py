"""Are the attention kernels right on this machine's device, and how fast are they? One table, within five minutes.

    python scripts/device_check.py [--quick] [--backends NAME,NAME] [--budget SECONDS] [--json FILE|-]

Needs jax, numpy and the tierax package (installed, or `PYTHONPATH=src`), nothing else. It says:

- of each backend that serves the device: the error of attention over a mixed batch, ragged and paged, with poison in all
  memory that no row may read, against float64;
- its time for decodes and for a prefill chunk, and which part that is of what the device can do: KV bytes over the
  bandwidth of a plain sum, FLOPs over the rate of a plain matrix product, both measured here in the same run;
- the time of what jax itself offers: gathered pages and XLA, and cuDNN on keys and values that lie in one piece.

The exit status is 1 when a value is wrong or a backend fails.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tierax.bench.bounds import Machine
from tierax.bench.kernels import Case, all_layers, bound_ms, make_inputs, padded, pool_shape
from tierax.bench.report import write_json
from tierax.engine.platform import device_target
from tierax.pallas_kernels import attention
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.kernels import AttentionShape, Kernels, Target
from tierax.pallas_kernels.quant import dequantize_kv, quantize_kv

DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16), "fp8": jnp.dtype(jnp.uint8)}
LARGEST_ERROR = {"f32": 3e-5, "bf16": 1.2e-2}
"""Of a token and head, |out - exact| / |exact|. f32: sums of thousands of terms in another order. bf16: weights and
results are rounded to 8 bits, 2**-9 each at most. 8-bit KV is compared with what its codes mean, so it adds nothing."""
POISON = {"f32": 1e30, "bf16": 1e30, "fp8": 0x70}
"""Finite, as stale KV is; as bytes, scales of 3e29 for codes of 128."""


@dataclass
class Row:
    """One line of the table; times are of one layer."""

    check: str
    """values, decode or prefill."""
    case: str
    by: str
    """A backend, or jax: what of jax."""
    error: float | None = None
    ms: float | None = None
    bound_ms: float | None = None
    note: str = ""
    failed: bool = False


class Work(NamedTuple):
    """What is timed: rows of equal sizes in a pool of `layers`."""

    check: str
    shape: AttentionShape
    rows: int
    new: int
    """Tokens of each row that are new."""
    context: int
    """Tokens of each row in all."""
    layers: int

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.new} of {self.context}, {shape_name(self.shape)}"

    @property
    def case(self) -> Case:
        return Case(self.rows, self.new, self.context - self.new)


class Mixed(NamedTuple):
    """A batch of rows of (new, earlier) tokens, and the values of its keys."""

    shape: AttentionShape
    rows: list[tuple[int, int]]
    window: int = 0
    soft_cap: float = 0.0

    @property
    def name(self) -> str:
        return shape_name(self.shape) + f", window {self.window}, cap {self.soft_cap:g}" * bool(self.window)


def shape_name(s: AttentionShape) -> str:
    return f"{s.heads}/{s.kv_heads}x{s.head_dim} page {s.page_size} {s.dtype}, KV {s.kv_dtype}"


def mixes(quick: bool) -> list[Mixed]:
    """What values are compared of: models' shapes, lengths around page and block boundaries."""
    demo = AttentionShape(9, 3, 64, 16, "f32", "f32")
    if quick:
        rows = [(33, 0), (20, 60), (1, 0), (1, 15), (1, 16), (1, 127)]
        return [Mixed(demo, rows), Mixed(demo._replace(kv_dtype="fp8"), rows, window=20, soft_cap=30.0)]
    rows = [(300, 0), (129, 383), (2, 0), (1, 0), (1, 15), (1, 16), (1, 255), (1, 1023), (1, 2047)]
    large = AttentionShape(32, 8, 128, 64, "bf16", "bf16")
    return [
        Mixed(demo, rows),
        Mixed(demo._replace(dtype="bf16", kv_dtype="bf16"), rows),
        Mixed(large, rows),
        Mixed(large._replace(kv_dtype="fp8"), rows),
        Mixed(AttentionShape(16, 8, 256, 16, "bf16", "bf16"), rows, window=100, soft_cap=30.0),
    ]


def works(platform: str, quick: bool) -> list[Work]:
    """What is timed. On an accelerator the KV of a layer is many times the size of its caches."""
    if quick or platform == "cpu":
        demo = AttentionShape(9, 3, 64, 16, "f32", "f32")
        times = 1 if quick else 8
        return [
            Work("decode", demo, 4, 1, 128 * times, 2),
            Work("prefill", demo, 1, 64 * times, 128 * times, 2),
        ]
    large = AttentionShape(32, 8, 128, 64, "bf16", "bf16")
    return [
        Work("decode", large, 32, 1, 4096, 4),
        Work("decode", large._replace(page_size=16), 32, 1, 4096, 4),
        Work("decode", large._replace(kv_dtype="fp8"), 32, 1, 4096, 4),
        Work("decode", large, 1, 1, 32768, 4),
        Work("decode", AttentionShape(9, 3, 64, 16, "bf16", "bf16"), 64, 1, 1024, 4),
        Work("prefill", large, 1, 4096, 4096, 4),
        Work("prefill", large, 1, 512, 8192, 4),
    ]


def check_values(mixed: Mixed, kernels: Kernels) -> float:
    """The largest relative error of a token and head."""
    s, rng = mixed.shape, np.random.default_rng(0)
    dtype, kv_dtype = DTYPES[s.dtype], DTYPES[s.kv_dtype]
    counts, earlier = np.array(mixed.rows).T
    lens = counts + earlier
    used = -(-lens // s.page_size)
    pages = int(used.sum()) + 3
    # Two rows of padding, and entries beyond a row's pages.
    table = np.zeros((len(lens) + 2, used.max() + 1), np.int32)
    taken = np.split(rng.permutation(pages)[: used.sum()], np.cumsum(used)[:-1])
    for row, row_pages in enumerate(taken):
        table[row, : len(row_pages)] = row_pages
    starts = np.concatenate([[0], np.cumsum(counts), [counts.sum()] * 2])
    batch = RaggedBatch(
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(np.append(lens, [7, 7]), jnp.int32),
        jnp.asarray(table, jnp.int32),
        num_chunks=jnp.int32((counts > 1).sum()),
        num_rows=jnp.int32(len(lens)),
    )

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((*shape, s.head_dim), np.float32), dtype)

    k, v = normal(lens.sum(), s.kv_heads), normal(lens.sum(), s.kv_heads)
    q = normal(counts.sum() + 5, s.heads)
    position = np.concatenate([np.arange(n) for n in lens])
    slots = table[np.repeat(np.arange(len(lens)), lens), position // s.page_size] * s.page_size
    slots = jnp.asarray(slots + position % s.page_size, jnp.int32)
    layer = jnp.int32(1)
    shape = pool_shape(s, pages, 3)
    pool = jnp.full(shape.array, POISON[s.kv_dtype], kv_dtype)
    pool = jax.jit(kernels.write_kv, donate_argnums=0)(pool, k, v, slots, layer)

    @jax.jit
    def attend(q: jax.Array, pool: jax.Array, batch: RaggedBatch, window: jax.Array) -> jax.Array:
        return kernels.attend(q, pool, layer, batch, window=window, soft_cap=mixed.soft_cap)

    # By its own default XLA rounds f32 operands for the matrix units, and there is no more to compare.
    with jax.default_matmul_precision("highest" if s.dtype == "f32" else None):
        out = np.asarray(attend(q, pool, batch, jnp.int32(mixed.window)), np.float64)
    if not np.isfinite(out).all():
        return np.inf
    if shape.quantized:
        k, v = jnp.split(dequantize_kv(quantize_kv(k, v)), 2, axis=-1)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    exact = attend_exactly(q, k, v, counts, lens, mixed)
    difference = np.linalg.norm(out[: len(exact)] - exact, axis=-1)
    return float((difference / np.linalg.norm(exact, axis=-1)).max())


def attend_exactly(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, counts: np.ndarray, lens: np.ndarray, mixed: Mixed
) -> np.ndarray:
    """`[tokens, heads, head_dim]` in float64, row by row and KV head by KV head."""
    group = mixed.shape.heads // mixed.shape.kv_heads
    out = np.empty((counts.sum(), *q.shape[1:]))
    for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
        start, first = counts[:row].sum(), lens[:row].sum()
        position = np.arange(length - count, length)[:, None]
        seen = np.arange(length) <= position
        if mixed.window:
            seen &= np.arange(length) > position - mixed.window
        for head in range(mixed.shape.heads):
            keys, values = (x[first : first + length, head // group] for x in (k, v))
            scores = q[start : start + count, head] @ keys.T * mixed.shape.head_dim**-0.5
            if mixed.soft_cap:
                scores = mixed.soft_cap * np.tanh(scores / mixed.soft_cap)
            weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
            out[start : start + count, head] = weights @ values / weights.sum(-1, keepdims=True)
    return out


def seconds(run: Callable[..., Any], *arguments: Any, goal: float = 0.05) -> float:
    """Of one call, the median of five rounds of about `goal` seconds; compiled, and run once, beforehand."""
    jax.block_until_ready(run(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    calls = max(1, min(100, int(goal / (time.perf_counter() - start))))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([run(*arguments) for _ in range(calls)][-1])
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds)


def measure_machine(platform: str, quick: bool) -> Machine:
    """What the device reads in a sum, and multiplies in a product; the best of some sizes."""
    big = platform != "cpu" and not quick
    x = jnp.ones((512, 1 << (20 if big else 16)), jnp.float32)
    x_bytes = x.nbytes
    bytes_s = x_bytes / seconds(jax.jit(partial(jnp.sum, axis=1)), x)
    del x
    size, dtype = (8192, jnp.bfloat16) if big else (1024, jnp.float32 if platform == "cpu" else jnp.bfloat16)
    a = jnp.ones((size, size), dtype)
    return Machine(bytes_s, "sum", 2 * size**3 / seconds(jax.jit(jnp.matmul), a, a), x_bytes)


class Timed:
    """The arrays of one `Work`, and the ways to attend to them. Times are seconds of a layer."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.q, self.pool, self.batch = make_inputs(work.shape, work.layers, work.case)

    def attention(self, attend: Callable[..., jax.Array], kv: Any) -> float:
        run = all_layers(attend, self.work.layers)
        return seconds(run, self.q, kv, self.batch) / self.work.layers

    def gathered(self) -> float:
        """Pages copied into one piece, and XLA's attention over them."""
        return self.attention(padded, self.pool)

    def cudnn(self) -> float:
        """cuDNN's attention over keys and values that are in one piece already, as paged ones are not."""
        work, shape = self.work, self.work.shape
        sizes = (2, work.rows, work.context, shape.kv_heads, shape.head_dim)
        kv = jax.random.normal(jax.random.key(2), sizes, DTYPES[shape.dtype])
        options: dict[str, Any] = {}
        if work.new == work.context:
            options["is_causal"] = True
        elif work.new > 1:
            seen = jnp.arange(work.context) <= jnp.arange(work.context - work.new, work.context)[:, None]
            options["mask"] = seen[None, None]

        def attend(q: jax.Array, kv: jax.Array, layer: jax.Array, batch: RaggedBatch) -> jax.Array:
            rows = q.reshape(work.rows, work.new, *q.shape[1:])
            out = jax.nn.dot_product_attention(rows, kv[0], kv[1], implementation="cudnn", **options)
            return out.reshape(q.shape)

        return self.attention(attend, kv)


def all_values(target: Target, backends: list[str], quick: bool) -> Iterator[Row]:
    for mixed in mixes(quick):
        allowed = LARGEST_ERROR[mixed.shape.dtype]
        for name in backends:
            row = Row("values", mixed.name, name)
            if (kernels := select(target, mixed.shape, row)) is not None:
                with failures_in(row):
                    row.error = check_values(mixed, kernels)
                    row.failed = not row.error <= allowed
                    row.note = f"{'WRONG, above' if row.failed else 'right, below'} {allowed:g}"
            yield row


def all_times(target: Target, backends: list[str], machine: Machine, quick: bool) -> Iterator[Row]:
    for work in works(target.platform, quick):
        timed = Timed(work)
        offers = {"jax: gather + XLA": timed.gathered}
        if target.platform == "gpu":
            offers["jax: cuDNN, no pages"] = timed.cudnn
        for name in (*backends, *offers):
            row = Row(work.check, work.name, name, bound_ms=bound_ms(machine, work.shape, work.case))
            if name in offers:
                with failures_in(row):
                    row.ms = offers[name]() * 1e3
                row.failed = False
            elif (kernels := select(target, work.shape, row)) is not None:
                with failures_in(row):
                    row.ms = timed.attention(kernels.attend, timed.pool) * 1e3
            yield row


def select(target: Target, shape: AttentionShape, row: Row) -> Kernels | None:
    """The kernels of the row's backend, or why there are none."""
    try:
        return attention.select(target, shape, row.by)
    except ValueError as error:
        row.note = str(error).replace(f"attention backend {row.by}:", "refused:")
        return None


@contextlib.contextmanager
def failures_in(row: Row) -> Iterator[None]:
    """Whatever a compiler or device says is a result here."""
    try:
        yield
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        row.failed, row.note = True, f"FAILED: {first_line[:160]}"


def without_repeated_refusals(rows: Iterable[Row]) -> Iterator[Row]:
    seen = set()
    for row in rows:
        if not row.note.startswith("refused") or (row.by, row.note) not in seen:
            yield row
        seen.add((row.by, row.note))


def table(rows: list[Row]) -> str:
    def cells(row: Row) -> list[str]:
        share = "" if row.ms is None or row.bound_ms is None else f"{row.bound_ms / row.ms:.0%}"
        numbers = ["" if x is None else f"{x:.3g}" for x in (row.error, row.ms, row.bound_ms)]
        return [row.check, row.case, row.by, *numbers, share, row.note]

    lines = [["check", "case", "by", "error", "ms", "bound", "share", ""], *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds on a CPU")
    parser.add_argument("--backends", help="names with commas between; all of them without")
    parser.add_argument(
        "--budget", type=float, default=270, metavar="SECONDS", help="start nothing after these"
    )
    parser.add_argument("--json", metavar="FILE", help="also there, or in place of the table for -")
    arguments = parser.parse_args()
    backends = arguments.backends.split(",") if arguments.backends else list(attention.BACKENDS)
    if unknown := [name for name in backends if name not in attention.BACKENDS]:
        parser.error(f"unknown backend {unknown[0]!r}: choose from {', '.join(attention.BACKENDS)}")

    started = time.monotonic()
    device, target = jax.devices()[0], device_target()
    machine = measure_machine(target.platform, arguments.quick)
    rows, complete = [], True
    for row in without_repeated_refusals(
        chain(
            all_values(target, backends, arguments.quick),
            all_times(target, backends, machine, arguments.quick),
        )
    ):
        rows.append(row)
        print(f"{time.monotonic() - started:5.0f} s  {row.check} {row.case}: {row.by}", file=sys.stderr)
        complete = time.monotonic() - started < arguments.budget
        if not complete:
            break

    title = f"{device.device_kind} ({device.platform} {target.generation}), jax {jax.__version__}"
    rates = f"measured: {machine.read_bytes_s / 1e9:.0f} GB/s, {machine.flop_s / 1e12:.3g} TFLOP/s"
    end = "complete" if complete else "stopped by --budget"
    if arguments.quick:
        end += "; quick sizes fit a cache, which may be faster than the bound's memory"
    if arguments.json != "-":
        print(f"{title}\n{rates}\n\n{table(rows)}\n\n{end}, {time.monotonic() - started:.0f} s")
    if arguments.json:
        report = {
            "device": device.device_kind,
            "platform": target.platform,
            "generation": target.generation,
            "jax": jax.__version__,
            "bytes_s": machine.read_bytes_s,
            "flop_s": machine.flop_s,
            "complete": complete,
            "rows": [asdict(row) for row in rows],
        }
        write_json(report, arguments.json)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
