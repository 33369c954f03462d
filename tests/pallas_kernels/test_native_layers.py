"""All layers by one call of the native library, against the same layers one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.tiny_engine import TinyModel
from tierax.engine.platform import device_target
from tierax.models.transformer import Decoder, StepTokens, attention_shape
from tierax.pallas_kernels import attention
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.cpu.library import library
from tierax.pallas_kernels.pages import PoolShape, gather_layer

pytestmark = pytest.mark.skipif(bool(library().absence), reason=library().absence)

PAGE_SIZE, TABLE = 16, 5
STEPS = (((37, 37), (60, 60), (2, 2)), ((1, 38), (9, 69), (1, 3)))
"""Of each step, its rows: tokens in the step, and context behind it."""
CASES = (
    ("llama3", "none", "f32"),
    ("llama-bias", "int8", "f32"),
    ("mistral-window", "bf16", "f32"),
    ("qwen2-window", "none", "bf16"),
    ("qwen3", "none", "fp8"),
)
POOL = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}


class Trial:
    """A tiny model, and decoders of it that may run their layers in one call, and may not."""

    def __init__(self, family: str, weights: str, kv: str) -> None:
        model = TinyModel(family, quantization="int8" if weights == "int8" else "none")
        self.config, self.params = model.config, model.params
        if weights == "bf16":
            self.params = jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.ndim > 1 else w, self.params)
        kernels = attention.select(device_target(), attention_shape(self.config, PAGE_SIZE, "f32", kv))
        assert kernels.layers is not None
        self.whole = Decoder(self.config, jnp.dtype(jnp.float32), kernels)
        self.parted = Decoder(self.config, jnp.dtype(jnp.float32), kernels._replace(layers=None))
        rng = np.random.default_rng(3)
        rows = len(STEPS[0])
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        self.shape = PoolShape(rows * TABLE, self.config.num_layers, PAGE_SIZE, heads, head_dim, kv == "fp8")
        self.dtype = POOL[kv]
        self.table = rng.permutation(rows * TABLE).reshape(rows, TABLE).astype(np.int32)
        self.ids = rng.integers(0, self.config.vocab_size, (rows, TABLE * PAGE_SIZE), np.int32)

    def new_pool(self) -> jax.Array:
        return jnp.zeros(self.shape.array, self.dtype)

    def step(self, rows: tuple[tuple[int, int], ...], width: int) -> tuple[StepTokens, RaggedBatch]:
        """One step's arguments, padded to `width` tokens; rows of no tokens are left out."""
        ids, positions, slots = [], [], []
        for row, (count, length) in enumerate(rows):
            at = np.arange(length - count, length)
            ids.append(self.ids[row, at])
            positions.append(at)
            slots.append(self.table[row, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
        used = [row for row, (count, _) in enumerate(rows) if count]
        padding = width - sum(map(len, ids))
        scratch = self.shape.pages * PAGE_SIZE + np.arange(padding) % PAGE_SIZE
        tokens = StepTokens(
            *(
                jnp.asarray(np.concatenate([*parts, behind]), jnp.int32)
                for parts, behind in (
                    (ids, np.zeros(padding)),
                    (positions, np.zeros(padding)),
                    (slots, scratch),
                )
            )
        )
        starts = np.cumsum([0] + [rows[row][0] for row in used])
        batch = RaggedBatch(
            *(jnp.asarray(part, jnp.int32) for part in (starts, [rows[row][1] for row in used])),
            page_table=jnp.asarray(self.table[used]),
            num_chunks=jnp.int32(sum(rows[row][0] > 1 for row in used)),
            num_rows=jnp.int32(len(used)),
        )
        return tokens, batch

    def kv(self, pool: jax.Array) -> np.ndarray:
        """K and V of what the last step's rows hold, all layers, as f32."""
        held = []
        for row, (_, length) in enumerate(STEPS[-1]):
            for layer in range(self.config.num_layers):
                held.append(gather_layer(pool, jnp.asarray(self.table[row]), layer)[:length])
        return np.asarray(jnp.concatenate(held).astype(jnp.float32))


@pytest.mark.parametrize(("family", "weights", "kv"), CASES)
def test_one_call_computes_what_the_layers_do_one_after_the_other(family: str, weights: str, kv: str) -> None:
    trial = Trial(family, weights, kv)
    results = []
    for decoder in (trial.whole, trial.parted):
        pool, hidden = trial.new_pool(), []
        for rows in STEPS:
            count = sum(tokens for tokens, _ in rows)
            width = count + 3
            # Within what the call serves: int8 weights of many rows are XLA's.
            one_call = decoder is trial.whole and (weights != "int8" or width <= 32)
            lowered = jax.jit(decoder.forward, donate_argnums=1).lower(
                trial.params, pool, *trial.step(rows, width)
            )
            assert ("tierax_layers" in lowered.as_text()) == one_call
            out, pool = lowered.compile()(trial.params, pool, *trial.step(rows, width))
            assert np.isfinite(out).all()
            hidden.append(np.asarray(out)[:count])
        results.append((np.concatenate(hidden), trial.kv(pool)))
    (whole, whole_kv), (parted, parted_kv) = results
    # Of 8-bit KV, a number beside a boundary may fall to either side of it.
    loose = {"f32": 2e-4, "bf16": 0.02, "fp8": 0.1}[kv]
    np.testing.assert_allclose(whole, parted, atol=loose, rtol=loose)
    near = np.isclose(whole_kv, parted_kv, atol=1e-5, rtol=1e-5)
    assert near.mean() > (0.999 if kv == "f32" else 0.97)
    np.testing.assert_allclose(whole_kv, parted_kv, atol=loose, rtol=loose)


@pytest.mark.parametrize(("weights", "kv"), [("none", "f32"), ("int8", "fp8")])
def test_a_rows_kv_is_the_same_to_the_bit_whatever_shares_its_step(weights: str, kv: str) -> None:
    trial = Trial("llama3", weights, kv)
    forward = jax.jit(trial.whole.forward)
    together, pool = forward(trial.params, trial.new_pool(), *trial.step(STEPS[0], 128))
    alone_pool = trial.new_pool()
    at = 0
    for row, (count, length) in enumerate(STEPS[0]):
        done = 0
        for part in (1, count - 1):
            done += part
            rows = tuple((part, done) if i == row else (0, 0) for i in range(len(STEPS[0])))
            out, alone_pool = forward(trial.params, alone_pool, *trial.step(rows, part))
            # (The norm behind the layers is XLA's.)
            np.testing.assert_allclose(out, together[at : at + part], atol=2e-6)
            at += part
        assert done == length
    np.testing.assert_array_equal(trial.kv(alone_pool), trial.kv(pool))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("page", "outside the pool"),
        ("slot", "outside the pool"),
        ("length", "more positions than its page table"),
    ],
)
def test_a_step_that_does_not_fit_the_pool_fails(broken: str, message: str) -> None:
    trial = Trial("llama3", "none", "f32")
    tokens, batch = trial.step(((1, 1), (0, 0), (0, 0)), 1)
    if broken == "page":
        batch = batch._replace(page_table=batch.page_table.at[0, 0].set(10_000))
    if broken == "slot":
        tokens = tokens._replace(slots=tokens.slots + 10_000)
    if broken == "length":
        batch = batch._replace(kv_lens=batch.kv_lens + 10_000)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(trial.whole.forward)(trial.params, trial.new_pool(), tokens, batch))
