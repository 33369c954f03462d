"""How long attention takes, over all layers of a model's shape: each backend that serves here, and simpler forms of it.

`bound` is what reading the KV, or computing on it, takes at the speed that this machine is measured at. Forms take turns,
so that what else the machine does meets all of them; the median of their runs counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from ..pallas_kernels import attention
from ..pallas_kernels.batch import RaggedBatch
from ..pallas_kernels.kernels import Attend, AttentionShape, Target
from ..pallas_kernels.pages import PoolShape, gather_layer
from .bounds import Machine, impossible, measure_machine
from .pictures import Panel, bars
from .report import Parser, number, table, write_report

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}


@dataclass(frozen=True)
class Model:
    """What is measured; the default is the demo model."""

    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16

    def attention(self, kv_dtype: str) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.page_size, "f32", kv_dtype)


@dataclass(frozen=True)
class Case:
    """`rows` sequences, each with `queries` new tokens behind `prefix` ones."""

    rows: int
    queries: int
    prefix: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """`16x2048`: 16 decodes with a context of 2,048; `512+2048`: a chunk of 512 tokens behind a prefix of 2,048."""
        for sign in "x+":
            first, found, second = text.partition(sign)
            if found and first.isdecimal() and second.isdecimal() and int(first) > 0:
                if sign == "+":
                    return cls(1, int(first), int(second))
                if int(second) > 0:
                    return cls(int(first), 1, int(second) - 1)
        raise ValueError(f"{text!r} is neither ROWSxCONTEXT nor TOKENS+PREFIX, as 16x2048 and 512+2048 are")

    def __str__(self) -> str:
        if self.queries == 1:
            return f"{self.rows}x{self.prefix + 1}"
        return f"{self.queries}+{self.prefix}"

    @property
    def length(self) -> int:
        return self.prefix + self.queries


@dataclass(frozen=True)
class Result:
    case: str
    kv_dtype: str
    bound_ms: float
    forms_ms: dict[str, float]
    """Medians."""
    spread_ms: dict[str, tuple[float, float]]
    """The least and the most."""

    def show(self, form: str) -> str:
        """For the table."""
        if form not in self.forms_ms:
            return ""
        least, most = map(number, self.spread_ms[form])
        return f"{number(self.forms_ms[form])} ({least} - {most})" if least != most else least


def bound_ms(machine: Machine, shape: AttentionShape, case: Case) -> float:
    """Milliseconds that a layer needs at least: each key and value is read once, each visible pair computed."""
    row = pool_shape(shape, 1, 1).row_width * shape.kv_heads * jnp.dtype(DTYPES[shape.kv_dtype]).itemsize
    pairs = case.rows * sum(range(case.prefix + 1, case.length + 1))
    flops = 4 * shape.heads * shape.head_dim * pairs
    return max(case.rows * case.length * row / machine.read_bytes_s, flops / machine.flop_s) * 1e3


def pool_shape(shape: AttentionShape, pages: int, layers: int) -> PoolShape:
    """Of a pool for that attention."""
    return PoolShape(pages, layers, shape.page_size, shape.kv_heads, shape.head_dim, shape.kv_dtype == "fp8")


def forms(shape: AttentionShape) -> dict[str, Attend]:
    """Name -> attention; the forms after the backends serve batches of equal rows only."""
    target = Target(jax.default_backend())
    found: dict[str, Attend] = {}
    for name in attention.BACKENDS:
        try:
            found[name] = attention.select(target, shape, name).attend
        except ValueError:
            continue
    return {**found, "padded": padded, "expanded": _expanded}


def padded(q: jax.Array, pool: jax.Array, layer: jax.Array, batch: RaggedBatch) -> jax.Array:
    """All pages of all rows gathered, one product over the padded batch."""
    rows = batch.page_table.shape[0]
    kv_heads, head_dim = PoolShape.of(pool).kv_heads, q.shape[-1]
    kv = gather_layer(pool, batch.page_table.reshape(-1), layer).astype(q.dtype)
    k, v = jnp.split(kv.reshape(rows, -1, kv_heads, 2 * head_dim), 2, axis=-1)
    q_rtkgd = q.reshape(rows, -1, kv_heads, q.shape[1] // kv_heads, head_dim) * head_dim**-0.5
    scores = jnp.einsum("rtkgd,rnkd->rkgtn", q_rtkgd, k)
    weights = jax.nn.softmax(jnp.where(_visible(batch, scores.shape), scores, -jnp.inf))
    return jnp.einsum("rkgtn,rnkd->rtkgd", weights, v).reshape(q.shape)


def _expanded(q: jax.Array, pool: jax.Array, layer: jax.Array, batch: RaggedBatch) -> jax.Array:
    """Row by row: queries with zeros where other heads' keys and all values are, so that each product is one plain
    matrix product with the row's KV as it lies in its pages."""
    rows, kv_heads, head_dim = batch.page_table.shape[0], PoolShape.of(pool).kv_heads, q.shape[-1]
    group = q.shape[1] // kv_heads
    own = jnp.eye(kv_heads, dtype=q.dtype)[:, None, :, None, None]
    side = jnp.asarray([1, 0], q.dtype)[:, None]

    def row(r: jax.Array) -> jax.Array:
        kv = gather_layer(pool, batch.page_table[r], layer).astype(q.dtype)
        flat = kv.reshape(kv.shape[0], -1)
        mine = q.reshape(rows, -1, kv_heads, group, head_dim)[r] * head_dim**-0.5
        wide = (mine[:, :, :, None, None, :] * own * side).reshape(-1, flat.shape[1])
        scores = wide @ flat.T
        visible = _visible(batch, (rows, 1, 1, mine.shape[0], kv.shape[0]))[r]
        visible = jnp.repeat(visible[0, 0], q.shape[1], axis=0)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        mixed = (weights @ flat).reshape(-1, kv_heads, group, kv_heads, 2, head_dim)
        return jnp.einsum("tkgkd->tkgd", mixed[..., 1, :])

    return lax.map(row, jnp.arange(rows)).reshape(q.shape)


def _visible(batch: RaggedBatch, shape: tuple[int, ...]) -> jax.Array:
    """Of scores `[rows, 1, 1, queries, keys]`."""
    queries, keys = shape[-2:]
    positions = batch.kv_lens[:, None] - queries + jnp.arange(queries)
    return (jnp.arange(keys) <= positions[..., None])[:, None, None]


def make_inputs(shape: AttentionShape, layers: int, case: Case) -> tuple[jax.Array, jax.Array, RaggedBatch]:
    """Queries, a pool that holds the rows' pages in random order, and the batch."""
    per_row = -(-case.length // shape.page_size)
    pool = pool_shape(shape, case.rows * per_row, layers)
    rng = np.random.default_rng(0)
    table = rng.permutation(pool.pages).reshape(case.rows, per_row).astype(np.int32)
    q = rng.standard_normal((case.rows * case.queries, shape.heads, shape.head_dim), np.float32)
    batch = RaggedBatch(
        jnp.arange(case.rows + 1, dtype=jnp.int32) * case.queries,
        jnp.full(case.rows, case.length, jnp.int32),
        jnp.asarray(table),
        jnp.int32(case.rows if case.queries > 1 else 0),
        jnp.int32(case.rows),
    )
    fill = jax.jit(partial(_fill, pool.array, shape.kv_dtype))
    return jnp.asarray(q, DTYPES[shape.dtype]), fill(jax.random.key(0)), batch


def _fill(array: tuple[int, ...], kv_dtype: str, key: jax.Array) -> jax.Array:
    """The same page everywhere, of finite numbers of ordinary size: any such code is one, and so is a scale of two of
    these bytes."""
    if kv_dtype == "fp8":
        page = jax.random.bits(key, array[1:], jnp.uint8) & jnp.uint8(0x3F)
    else:
        page = jax.random.normal(key, array[1:], DTYPES[kv_dtype])
    return jnp.broadcast_to(page, array)


def all_layers(attend: Callable[..., jax.Array], layers: int) -> Callable[..., jax.Array]:
    """Layer after layer in one program, each with the output of the one before as its queries, as in a step."""

    def run(q: jax.Array, pool: Any, batch: RaggedBatch) -> jax.Array:
        def layer(q: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return attend(q, pool, index, batch), None

        return lax.scan(layer, q, jnp.arange(layers, dtype=jnp.int32))[0]

    return jax.jit(run)


def measure(
    shape: AttentionShape,
    layers: int,
    case: Case,
    chosen: dict[str, Attend],
    repeats: int,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """Name -> milliseconds of all layers, of each run."""
    inputs = make_inputs(shape, layers, case)
    programs = {name: all_layers(attend, layers) for name, attend in chosen.items()}
    for program in programs.values():
        program(*inputs).block_until_ready()
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            begin = clock()
            program(*inputs).block_until_ready()
            times[name].append((clock() - begin) * 1e3)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tierax bench kernels", __doc__)
    defaults = [Case(1, 1, 511), Case(1, 1, 2047), Case(16, 1, 2047), Case(1, 512, 2048)]
    parser.add_argument(
        "--cases", type=_case, nargs="+", default=defaults, metavar="ROWSxCONTEXT|TOKENS+PREFIX"
    )
    parser.add_argument("--kv-dtypes", nargs="+", choices=DTYPES, default=["f32"])
    parser.add_argument("--forms", nargs="+", metavar="NAME", help="only these columns")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    for name, default in asdict(Model()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")
    parser.add_outputs("the times of each case, a panel for each")
    args = parser.parse_args(argv)
    model = Model(**{name: getattr(args, name) for name in asdict(Model())})
    if min(args.repeats, *asdict(model).values()) < 1:
        parser.error("every number must be at least 1")
    if model.heads % model.kv_heads:
        parser.error(f"--heads {model.heads} is no multiple of --kv-heads {model.kv_heads}")

    machine = measure_machine(perf_counter)
    results = []
    work = [(case, kv_dtype) for case in args.cases for kv_dtype in args.kv_dtypes]
    for case, kv_dtype in tqdm(work, desc="attention", unit="case", leave=False):
        shape = model.attention(kv_dtype)
        chosen = forms(shape)
        if unknown := sorted(set(args.forms or ()) - set(chosen)):
            parser.error(f"no form {unknown[0]!r} here: there are {', '.join(chosen)}")
        wanted = {name: attend for name, attend in chosen.items() if name in (args.forms or chosen)}
        times = measure(shape, model.layers, case, wanted, args.repeats)
        bound = model.layers * bound_ms(machine, shape, case)
        medians = {name: statistics.median(spans) for name, spans in times.items()}
        spreads = {name: (min(spans), max(spans)) for name, spans in times.items()}
        results.append(Result(str(case), kv_dtype, bound, medians, spreads))

    if args.json is not None:
        write_report(
            {
                "model": asdict(model),
                "machine": asdict(machine),
                "results": [asdict(result) for result in results],
            },
            args.json,
        )
    else:
        print("\n".join(_report(results, machine)))
    parser.draw(args.plot, *map(_panel, results))
    return 0


def _panel(result: Result) -> Panel:
    title = f"Attention of all layers, {result.case} {result.kv_dtype}"
    return bars({"bound": result.bound_ms, **result.forms_ms}, "ms, median", title)


def _case(text: str) -> Case:
    try:
        return Case.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _report(results: Sequence[Result], machine: Machine) -> Iterator[str]:
    names = list(dict.fromkeys(name for result in results for name in result.forms_ms))
    rows = [
        [
            f"{result.case} {result.kv_dtype}",
            number(result.bound_ms),
            *(result.show(name) for name in names),
        ]
        for result in results
    ]
    yield table(["ms of all layers, medians (least - most)", "bound", *names], rows)
    yield f"memory {machine.read_bytes_s / 1e9:.1f} GB/s, f32 products {machine.flop_s / 1e9:.0f} GFLOP/s"
    for result in results:
        for name, ms in result.forms_ms.items():
            if warning := impossible(f"{result.case} {name}, 1/s", 1e3 / ms, 1e3 / result.bound_ms):
                yield warning


if __name__ == "__main__":
    sys.exit(main())
