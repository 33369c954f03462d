"""Each family's forward pass through pages, against values made with another implementation."""

from __future__ import annotations

from array import array
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.plain_forward import plain_logprobs
from helpers.tiny_engine import TinyModel
from helpers.tiny_models import TINY_MODELS
from tierax.models.transformer import StepTokens
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.pages import PoolShape

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny.npz"
TOLERANCE = 1e-3


class PagedForward:
    """Feeds a sequence chunk by chunk through the pages of a shuffled pool; every chunk is padded to `width`."""

    def __init__(self, model: TinyModel, length: int, width: int, page_size: int = 16) -> None:
        config = model.config
        pages = -(-length // page_size)
        shape = PoolShape(pages, config.num_layers, page_size, config.num_kv_heads, config.head_dim)
        self._model, self._width, self._page_size, self._pages = model, width, page_size, pages
        # Stale KV is finite, but it may be anything.
        self._pool = jnp.full(shape.array, 1e4, jnp.float32)
        self._table = np.random.default_rng(1).permutation(pages).astype(np.int32)
        self._step = jax.jit(model.decoder.forward, donate_argnums=1)
        self._logits = jax.jit(model.decoder.logits)

    def logprobs(self, ids: np.ndarray, chunks: list[int], positions: list[int]) -> np.ndarray:
        """f32 `[len(positions), V]` of the token after each position; `chunks` are the sizes, in order."""
        assert sum(chunks) == len(ids)
        hidden = {}
        start = 0
        for count in chunks:
            out, self._pool = self._step(self._model.params, self._pool, *self._chunk(ids, start, count))
            hidden |= {
                position: out[position - start] for position in positions if 0 <= position - start < count
            }
            start += count
        logits = self._logits(self._model.params, jnp.stack([hidden[position] for position in positions]))
        return np.asarray(jax.nn.log_softmax(logits))

    def _chunk(self, ids: np.ndarray, start: int, count: int) -> tuple[StepTokens, RaggedBatch]:
        size, width = self._page_size, self._width
        positions = np.arange(start, start + count, dtype=np.int32)
        slots = np.full(width, self._pages * size, np.int32) + np.arange(width, dtype=np.int32) % size
        slots[:count] = self._table[positions // size] * size + positions % size
        step = StepTokens(
            ids=np.pad(ids[start : start + count], (0, width - count)),  # pyright: ignore[reportArgumentType]
            positions=np.pad(positions, (0, width - count)),  # pyright: ignore[reportArgumentType]
            slots=slots,  # pyright: ignore[reportArgumentType]
        )
        batch = RaggedBatch(
            *map(jnp.asarray, (np.array([0, count], np.int32), np.array([start + count], np.int32))),
            page_table=jnp.asarray(self._table[None]),
            num_chunks=jnp.int32(count > 1),
            num_rows=jnp.int32(1),
        )
        return step, batch


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_log_probs_equal_the_reference_values_up_to_position_8192(
    golden: dict[str, np.ndarray], family: str
) -> None:
    ids = golden["ids"]
    # 16 chunks and a decode of one token, at position 8,192.
    chunks = [512] * (len(ids) // 512) + [1]
    actual = PagedForward(TinyModel(family), len(ids), 512).logprobs(
        ids, chunks, golden["positions"].tolist()
    )
    np.testing.assert_allclose(actual, golden[family], atol=TOLERANCE, rtol=0)


def test_stacked_and_separate_layers_give_the_same() -> None:
    family = "qwen2-window"
    ids = np.random.default_rng(2).integers(0, 256, 100).astype(np.int32)
    positions = [0, 1, 47, 63, 99]
    expected = plain_logprobs(
        (model := TinyModel(family, stacked=True)).params, model.config, ids.tolist(), positions
    )
    for tiny in (model, TinyModel(family, stacked=False)):
        actual = PagedForward(tiny, 100, 64, page_size=4).logprobs(ids, [1, 40, 1, 1, 57], positions)
        np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


def test_the_chunking_does_not_matter() -> None:
    model = TinyModel("mistral-window")
    ids = np.random.default_rng(3).integers(0, 256, 90).astype(np.int32)
    positions = [10, 62, 89]
    forward = PagedForward(model, 90, 64, page_size=4)
    whole, *others = (
        forward.logprobs(ids, chunks, positions)
        for chunks in ([64, 26], [5, 7, 64, 14], [1] * 90, [31, 1, 1, 32, 25])
    )
    for other in others:
        np.testing.assert_allclose(other, whole, atol=1e-4, rtol=0)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model = TinyModel("qwen3")
    rng = np.random.default_rng(4)
    sequences = [rng.integers(0, 256, length).astype(np.int32) for length in (9, 4, 1, 1)]
    shape = PoolShape(12, 2, 4, model.config.num_kv_heads, model.config.head_dim)
    tokens = sum(map(len, sequences))
    width, starts = 20, np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    positions = np.concatenate([np.arange(len(s)) for s in sequences]).astype(np.int32)
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    row = np.repeat(np.arange(4), [len(s) for s in sequences])
    slots = np.full(width, 48, np.int32)
    slots[tokens:] += np.arange(width - tokens) % 4
    slots[:tokens] = table[row, positions // 4] * 4 + positions % 4
    pad = (0, width - tokens)
    step = StepTokens(
        *map(jnp.asarray, (np.pad(np.concatenate(sequences), pad), np.pad(positions, pad), slots))
    )
    batch = RaggedBatch(
        *map(jnp.asarray, (starts, np.array([9, 4, 1, 1], np.int32), table)),
        num_chunks=jnp.int32(2),
        num_rows=jnp.int32(4),
    )
    hidden, _ = jax.jit(model.decoder.forward)(model.params, jnp.zeros(shape.array), step, batch)
    actual = np.asarray(jax.nn.log_softmax(model.decoder.logits(model.params, hidden[starts[1:] - 1])))
    stacked = TinyModel("qwen3", stacked=True).params
    for index, ids in enumerate(sequences):
        expected = plain_logprobs(stacked, model.config, array("i", ids).tolist(), [len(ids) - 1])[0]
        np.testing.assert_allclose(actual[index], expected, atol=TOLERANCE, rtol=0)
