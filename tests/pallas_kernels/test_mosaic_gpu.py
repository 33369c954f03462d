"""The Hopper kernels without a GPU: numbers in Mosaic GPU's interpreter, and what they are lowered to.

The interpreter of jax 0.10.2 cannot run: dynamic grids ("Dynamic grid bounds not (yet) supported") and scalar operands
("Scalar arguments not (yet) supported"), of which the kernels have none; casts of register layouts ("MLIR translation rule
for primitive 'layout_cast' not found for platform cpu") and products with a transposed operand ("'TransposeTransform'
object has no attribute 'indices'") or one in registers. Those are left out or replaced by plain products when
interpreted (`Plan.interpreted`); barriers, copies, page walks, masks and the softmax run as they are. Copies happen at
once there and products are not asynchronous, so a missing fence or a wait that comes too late stays unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from helpers.attention_mixes import LAYER, POISON, Mix, Shape, assert_close, make_mix, plain, random_mix
from helpers.mosaic_interpreter import compiled_once, interpret_params
from tierax.pallas_kernels import attention
from tierax.pallas_kernels.batch import RaggedBatch
from tierax.pallas_kernels.gpu import hopper_attention, mosaic
from tierax.pallas_kernels.gpu.blocks import (
    COMPUTE_REGISTERS,
    COPY_REGISTERS,
    DECODE,
    PREFILL,
    SHARED_BYTES,
    Blocks,
    decode_splits,
)
from tierax.pallas_kernels.gpu.hopper_decode import combine
from tierax.pallas_kernels.kernels import AttentionShape, Target

HOPPER = Target("gpu", "9.0")
TOLERANCE = 0.02
"""Of bf16 inputs, weights and outputs, none larger than about 3."""


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with compiled_once():
        yield


@cache
def interpreted(soft_cap: float, scale: float | None) -> Callable[..., jax.Array]:
    return jax.jit(
        lambda q, pool, batch, window: hopper_attention.attend(
            q,
            pool,
            LAYER,
            batch,
            window=window,
            soft_cap=soft_cap,
            scale=scale,
            interpret=interpret_params(),
        )
    )


def in_bf16(mix: Mix) -> Mix:
    """The mix with the values that are left of it in bf16."""
    q, *kv = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in (mix.q, *mix.k, *mix.v))
    rows = len(mix.k)
    return mix._replace(q=q, k=kv[:rows], v=kv[rows:])


def check(mix: Mix, shape: Shape, window: int = 0, scale: float | None = None) -> None:
    attend = interpreted(shape.soft_cap, scale)
    # The largest poison: weighed by anything but 0, a few of them leave an infinity.
    pool = np.where(mix.pool == np.float32(POISON), np.float32(3e38), mix.pool)
    actual = attend(jnp.asarray(mix.q, jnp.bfloat16), jnp.asarray(pool, jnp.bfloat16), mix.batch, window)
    assert actual.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(actual, np.float32)).all()
    assert_close(actual, mix, plain(in_bf16(mix), shape, window, scale), TOLERANCE)


@pytest.mark.parametrize(
    ("shape", "counts", "contexts", "window", "scale"),
    [
        # Chunks and decodes in one tile; a row of padding, then nothing else; a page boundary and a KV block's edge.
        (Shape(24, 4, 8, 16, 4, 2, 64), [5, 3, 1], [12, 61, 64], 0, None),
        (Shape(24, 4, 8, 16, 4, 2, 64), [], [], 0, None),
        (Shape(12, 3, 8, 16, 3, 1, 64), [5, 3, 1], [11, 61, 64], 6, 0.3),
        # A chunk over two tiles, and one over both warpgroups of the second.
        (Shape(200, 3, 20, 16, 2, 1, 128), [130, 69, 1], [100, 0, 250], 0, None),
        (Shape(200, 3, 20, 16, 2, 1, 128), [130, 69, 1], [100, 0, 250], 70, None),
        # Pages longer than KV blocks; a decode that is split.
        (Shape(9, 1, 5, 256, 1, 1, 64, 20.0), [9], [300], 0, None),
        (Shape(1, 1, 5, 256, 2, 1, 64), [1], [1100], 0, None),
        (Shape(1, 1, 5, 256, 2, 1, 64), [1], [1100], 300, None),
    ],
    ids=str,
)
def test_equals_plain_numpy(
    shape: Shape, counts: list[int], contexts: list[int], window: int, scale: float | None
) -> None:
    check(make_mix(np.random.default_rng(1), shape, counts, contexts), shape, window, scale)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", PREFILL)
@pytest.mark.parametrize("page_size", mosaic.PAGE_SIZES)
def test_equals_plain_numpy_over_random_mixes(head_dim: int, page_size: int) -> None:
    rng = np.random.default_rng(head_dim + page_size)
    heads, kv_heads = ((6, 2), (3, 3), (4, 1))[page_size // 16 % 3]
    shape = Shape(
        150, 5, 320 // page_size + 1, page_size, heads, kv_heads, head_dim, (0.0, 15.0)[head_dim == 96]
    )
    for window in (0, 40):
        check(random_mix(rng, shape), shape, window)


def test_shares_of_a_decode_combine_to_one_softmax() -> None:
    rng = np.random.default_rng(3)
    scores, values = rng.standard_normal((1, 1, 3, 40)), rng.standard_normal((1, 1, 40, 8))
    weights = 2.0**scores
    expected = weights @ values / weights.sum(-1, keepdims=True)
    mixed = np.zeros((1, 1, 3, 3, 8), np.float32)
    # The last share saw nothing.
    log_weight = np.full((1, 1, 3, 3), -1e20, np.float32)
    for share, seen in enumerate((slice(0, 31), slice(31, 40))):
        part = weights[..., seen]
        mixed[:, :, share] = part @ values[:, :, seen] / part.sum(-1, keepdims=True)
        log_weight[:, :, share] = np.log2(part.sum(-1))
    np.testing.assert_allclose(combine(jnp.asarray(mixed), jnp.asarray(log_weight)), expected, rtol=1e-5)


def lowered(
    heads: int, kv_heads: int, head_dim: int, page_size: int, soft_cap: float = 0.0, tokens: int = 256
) -> str:
    """The program for a GPU, which names its kernels."""
    rows, layers, table = min(16, tokens), 3, 64

    def spec(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def attend(q, pool, layer, batch, window):
        return hopper_attention.attend(q, pool, layer, batch, window=window, soft_cap=soft_cap)

    arguments = (
        spec(tokens, heads, head_dim, dtype=jnp.bfloat16),
        spec(9, layers, page_size, kv_heads, 2 * head_dim, dtype=jnp.bfloat16),
        spec(),
        RaggedBatch(spec(rows + 1), spec(rows), spec(rows, table), spec(), spec()),
        spec(),
    )
    return export.export(jax.jit(attend), platforms=["cuda"])(*arguments).mlir_module()


@pytest.mark.parametrize(
    "model", [(32, 8, 128, 16), (9, 3, 64, 16, 30.0), (8, 2, 256, 256)], ids=["8B", "demo", "wide"]
)
def test_lowers_to_mosaic_kernels(model: tuple[int, int, int, int]) -> None:
    program = lowered(*model)
    assert program.count("@mosaic_gpu") >= 2
    assert "hopper_prefill" in program
    assert "hopper_decode" in program


@pytest.mark.parametrize("tokens", [1, 7])
def test_lowers_whatever_the_number_of_tokens(tokens: int) -> None:
    program = lowered(9, 3, 64, 16, tokens=tokens)
    assert "hopper_decode" in program
    # One token is a decode.
    assert ("hopper_prefill" in program) == (tokens > 1)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", PREFILL)
@pytest.mark.parametrize("page_size", mosaic.PAGE_SIZES)
def test_every_block_size_lowers(head_dim: int, page_size: int) -> None:
    assert "hopper_prefill" in lowered(8, 2, head_dim, page_size, soft_cap=20.0)


def test_block_sizes_stay_within_a_multiprocessor() -> None:
    assert PREFILL.keys() == DECODE.keys()
    for table in (PREFILL, DECODE):
        for head_dim, blocks in table.items():
            assert blocks.shared_bytes(head_dim, float_rows=table is DECODE) <= SHARED_BYTES
            assert 128 * (blocks.compute_warpgroups * COMPUTE_REGISTERS + COPY_REGISTERS) <= 65536
            # A tile of shared memory belongs to K or V alone; weights fill whole tiles.
            assert 2 * head_dim % blocks.swizzle == 0
            assert 2 * blocks.kv_tokens % blocks.swizzle == 0
    # Places in the ring belong to one warpgroup each when warpgroups take turns.
    assert all(blocks.stages % blocks.compute_warpgroups == 0 for blocks in DECODE.values())


def test_decodes_are_split_when_rows_alone_leave_the_gpu_idle() -> None:
    blocks = Blocks(2, 64, 4, 128)
    assert decode_splits(1, 8, 32768, blocks) == 33
    assert decode_splits(1, 8, 1024, blocks) == 2
    assert decode_splits(64, 8, 32768, blocks) == 1
    assert decode_splits(1, 1, 16, blocks) == 1


@pytest.mark.parametrize(
    ("target", "change", "reason"),
    [
        (Target("cpu"), {}, r"needs a GPU of compute capability 9\.0"),
        (Target("gpu", "8.0"), {}, r"needs a GPU of compute capability 9\.0"),
        (Target("gpu", "10.0"), {}, r"needs a GPU of compute capability 9\.0"),
        (HOPPER, {"dtype": "f32"}, "needs bf16 queries"),
        (HOPPER, {"kv_dtype": "f32"}, "needs bf16 KV, not f32"),
        (HOPPER, {"kv_dtype": "fp8"}, "needs bf16 KV, not fp8"),
        (HOPPER, {"head_dim": 72}, "no block sizes for head_dim 72: has 64, 80, 96, 128, 256"),
        (HOPPER, {"heads": 65, "kv_heads": 1}, "serves up to 64 query heads per KV head, and there are 65"),
        (HOPPER, {"page_size": 24}, "needs pages of 16, 32, 64, 128, 256 tokens"),
        (HOPPER, {"page_size": 8}, "needs pages of 16, 32, 64, 128, 256 tokens"),
    ],
)
def test_refuses_what_it_cannot_serve(target: Target, change: dict[str, object], reason: str) -> None:
    shape = AttentionShape(32, 8, 128, 16, "bf16", "bf16")._replace(**change)
    with pytest.raises(ValueError, match=f"attention backend mosaic-gpu: {reason}"):
        attention.select(target, shape, "mosaic-gpu")


@pytest.mark.parametrize(
    "change", [{"dtype": "f32", "kv_dtype": "f32"}, {"kv_dtype": "fp8"}, {"page_size": 24}]
)
def test_auto_takes_another_where_it_refuses(change: dict[str, object]) -> None:
    shape = AttentionShape(32, 8, 128, 16, "bf16", "bf16")._replace(**change)
    assert attention.select(HOPPER, shape).name != "mosaic-gpu"


@pytest.mark.parametrize("shape", [(32, 8, 128, 16), (9, 3, 64, 16), (8, 1, 64, 256)])
def test_auto_takes_it_on_hopper(shape: tuple[int, int, int, int]) -> None:
    assert attention.select(HOPPER, AttentionShape(*shape, "bf16", "bf16")).name == "mosaic-gpu"
