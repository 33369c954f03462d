"""What the dtypes of weights and of stored KV cost in quality: a fixed text's perplexity under each, and how often greedy
decoding would choose another token.

The text is forced through the model's own step in chunks, as a prompt would be: attention reads all KV, the chunk's
included, from a paged pool of its dtype. Activations are f32 in every row of the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ..engine.engine import load_tokenizer
from ..engine.platform import device_target
from ..engine.tokenizer import TokenizerError
from ..models.errors import ModelError
from ..models.quantized import TYPES
from ..models.source import resolve_model
from ..models.transformer import Decoder, Params, StepTokens, attention_shape
from ..models.weights.loader import load_params
from ..pallas_kernels import attention
from ..pallas_kernels.batch import RaggedBatch
from ..pallas_kernels.pages import PoolShape
from .prose import TEXT
from .report import Parser, table, write_report

KV_DTYPES: dict[str, Any] = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}
WEIGHTS = {
    "f32": ("f32", "none"),
    "bf16": ("bf16", "none"),
    **{name: ("f32", name) for name in ("int8", "int8-rows", "fp8", "int4")},
}
"""Name -> dtype and quantization, as the loader takes them."""


class Format(NamedTuple):
    """How numbers are stored."""

    weights: str
    """Of `WEIGHTS`."""
    kv: str
    """Of `KV_DTYPES`."""


FORMATS = tuple(
    Format(*pair.split())
    for pair in ("f32 f32", "f32 bf16", "f32 fp8", "bf16 f32", "bf16 bf16", "int8 f32", "int8 fp8")
)
QUANTIZED = tuple(Format(weights, "f32") for weights in TYPES)
"""As accelerators hold them; measured where qwix is installed."""
CHUNK = 128
"""Tokens per step: their logits over the vocabulary are there at once."""
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """One format on one text."""

    weights: str
    kv: str
    kv_bytes_per_token: int
    perplexity: float
    change: float
    """Of the perplexity, relative to the first format measured."""
    mean_difference: float
    """Of a token's log-prob to that under the first format, in absolute value."""
    agreement: float
    """The share of places at which the likeliest token is that of the first format."""


def measure(
    model_path: str = "demo",
    text: str = TEXT,
    formats: Sequence[Format] = FORMATS,
    *,
    most_tokens: int | None = None,
) -> tuple[int, list[Quality]]:
    """Tokens of the text that were predicted, and one entry per format.

    The text is cut to `most_tokens` and to the model's context. Raises `ModelError` or `TokenizerError` for a model
    that cannot be used, ValueError for a text of less than two tokens.
    """
    source = resolve_model(model_path)
    tokenizer = load_tokenizer(source)
    longest = min(most_tokens or sys.maxsize, source.config.max_position_embeddings)
    ids = tokenizer.encode(text, add_bos=tokenizer.add_bos)[:longest]
    if len(ids) < 2:
        raise ValueError("the text must have at least two tokens")
    found: list[Quality] = []
    params, loaded = {}, None
    first, first_choice = np.empty(0), np.empty(0)
    for weights, kv in tqdm(formats, desc="perplexity", unit="format", leave=False):
        if weights != loaded:
            dtype, quantization = WEIGHTS[weights]
            params.clear()
            params = load_params(source, source.config, dtype=dtype, quantization=quantization, stacked=False)
            loaded = weights
        kernels = attention.select(device_target(), attention_shape(source.config, PAGE_SIZE, "f32", kv))
        decoder = Decoder(source.config, jnp.dtype(jnp.float32), kernels)
        shape = pool_shape(decoder, len(ids), KV_DTYPES[kv])
        pool = jnp.zeros(shape.array, KV_DTYPES[kv])
        logprobs, choice = forced_logprobs(decoder, params, pool, ids)
        if not found:
            first, first_choice = logprobs, choice
        perplexity = float(np.exp(-logprobs.mean()))
        found.append(
            Quality(
                weights,
                kv,
                shape.page_elements * pool.dtype.itemsize // shape.page_size,
                perplexity,
                perplexity / (found[0].perplexity if found else perplexity) - 1,
                float(np.abs(logprobs - first).mean()),
                float((choice == first_choice).mean()),
            )
        )
    return len(ids) - 1, found


def pool_shape(decoder: Decoder, tokens: int, dtype: Any) -> PoolShape:
    """Of a pool that holds one sequence."""
    c = decoder.config
    pages = -(-tokens // PAGE_SIZE)
    return PoolShape(pages, c.num_layers, PAGE_SIZE, c.num_kv_heads, c.head_dim, dtype == jnp.uint8)


def forced_logprobs(
    decoder: Decoder, params: Params, pool: jax.Array, ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """f64 and i32 `[len(ids) - 1]`: log-prob of each token after those before it, and the likeliest token there.

    `pool` is given away.
    """
    total = len(ids)
    step = jax.jit(partial(_step, decoder), donate_argnames="pool")
    padded = np.zeros(-(-total // CHUNK) * CHUNK + 1, np.int32)
    padded[:total] = ids
    logprobs, choices = [], []
    for start in range(0, total, CHUNK):
        here = slice(start, start + CHUNK)
        count = np.int32(min(CHUNK, total - start))
        values, likeliest, pool = step(
            params, pool, padded[here], padded[start + 1 :][:CHUNK], np.int32(start), count
        )
        logprobs.append(np.array(values, np.float64))
        choices.append(np.array(likeliest))
    return np.concatenate(logprobs)[: total - 1], np.concatenate(choices)[: total - 1]


def _step(
    decoder: Decoder,
    params: Params,
    pool: jax.Array,
    ids: jax.Array,
    following: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs `[CHUNK]` of the tokens that follow, the likeliest ones, and the pool with the chunk's KV."""
    pages = PoolShape.of(pool).pages
    index = jnp.arange(CHUNK, dtype=jnp.int32)
    positions = start + index
    # Pages are used in order, so a position is its slot; padding goes to the page behind them.
    slots = jnp.where(index < count, positions, pages * PAGE_SIZE + index % PAGE_SIZE)
    batch = RaggedBatch(
        jnp.stack([jnp.int32(0), count]),
        jnp.stack([start + count]),
        jnp.arange(pages, dtype=jnp.int32)[None],
        num_chunks=jnp.int32(1),
        num_rows=jnp.int32(1),
    )
    hidden, pool = decoder.forward(params, pool, StepTokens(ids, positions, slots), batch)
    logprobs = jax.nn.log_softmax(decoder.logits(params, hidden))
    given = jnp.take_along_axis(logprobs, following[:, None], axis=-1)[:, 0]
    return given, jnp.argmax(logprobs, axis=-1).astype(jnp.int32), pool


def main(argv: list[str] | None = None, *, say: Callable[[str], None] = print) -> int:
    parser = Parser("tierax bench perplexity", __doc__)
    parser.add_argument("--model-path", "--model", default="demo", metavar="MODEL")
    parser.add_argument(
        "--text", metavar="FILE", help="another text, UTF-8; the default is a story of our own"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="only the first N tokens of the text")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is the standard output")
    args = parser.parse_args(argv)
    if args.tokens is not None and args.tokens < 2:
        parser.error("--tokens must be at least 2")
    try:
        text = TEXT
        if args.text is not None:
            with open(args.text, encoding="utf-8") as file:
                text = file.read()
        formats = (*FORMATS, *(QUANTIZED if find_spec("qwix") else ()))
        predicted, rows = measure(args.model_path, text, formats, most_tokens=args.tokens)
    except (OSError, ValueError, ModelError, TokenizerError) as error:
        parser.exit(1, f"tierax bench perplexity: {error}\n")
    if args.json is not None:
        report = {"model": args.model_path, "tokens": predicted, "rows": [asdict(row) for row in rows]}
        write_report(report, args.json)
        return 0
    cells = [
        [
            row.weights,
            row.kv,
            str(row.kv_bytes_per_token),
            f"{row.perplexity:.4f}",
            f"{row.change:+.3%}",
            f"{row.mean_difference:.5f}",
            f"{row.agreement:.2%}",
        ]
        for row in rows
    ]
    say(f"{args.model_path}: {predicted} tokens predicted, in chunks of {CHUNK}, activations in f32")
    header = ["weights", "KV", "KV bytes/token", "perplexity", "change", "mean |log-prob difference|"]
    say(table([*header, "same greedy token"], cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
