"""A model split over devices computes what the whole one does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from helpers.tiny_engine import TinyModel
from tierax.models.sharding import ShardingRules, Shares, split_heads

ALL = "heads+mlp+vocab"
MIXTURE = "heads+vocab+experts"
CASES = (
    f"llama-bias:2:{ALL}:fp8",  # two KV heads each, biases, 8-bit pool, layers in a tuple
    f"llama-linear:3:{ALL}:f32",  # nothing comes out even; tied embeddings
    # 8 experts on 3 devices, one layer of a plain MLP; scales are split with rows, and not with columns
    f"qwen3-moe:3:{ALL}+experts:fp8:int8-rows",
)
SLOW = (
    f"llama3:8:{ALL}:f32",  # 4 query and 2 KV heads: replicated ones, half of the places for queries empty
    "mistral-window:4:mlp:f32",  # attention is not split
    f"llama3:2:{ALL}:f32",  # a KV head each
    f"qwen2-window:4:{ALL}:f32",  # a KV head on two devices each, biases
    f"qwen3:4:{ALL}:f32",  # a single KV head, a pool without a heads axis
    "llama3:2:heads:f32",
    f"llama3:2:{ALL}:f32:int8-rows",
    f"mixtral:1:{MIXTURE}:f32",
    f"mixtral:2:{MIXTURE}:f32",  # two experts each, layers in stacks
    f"qwen3-moe:3:{ALL}+experts:fp8",  # layers in a tuple
    f"mixtral:4:{MIXTURE}:f32",
    f"mixtral:8:{MIXTURE}:f32",  # half of the devices have no expert
    f"qwen3-moe:8:{ALL}+experts:f32",
    "qwen3-moe:4:experts:f32",
    f"qwen3-moe:2:{MIXTURE}+mlp:f32:fp8",
)
EACH = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
TESTS = Path(__file__).parents[1]


class Results:
    """What `helpers.sharded_forward` finds, asked for a group of cases at a time: starting it takes seconds."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def __getitem__(self, case: str) -> dict[str, Any]:
        if case not in self._known:
            group = CASES if case in CASES else SLOW
            self._known |= dict(zip(group, _run(group), strict=True))
        return self._known[case]


def _run(cases: tuple[str, ...]) -> list[dict[str, Any]]:
    environment = os.environ | {
        # Much is compiled, and little computed.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
    }
    command = [sys.executable, "-m", "helpers.sharded_forward", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


@EACH
def test_values_are_those_of_the_whole_model(results: Results, case: str) -> None:
    result = results[case]
    # An 8-bit code may fall to the other side when a sum is taken in another order.
    quantized = case.split(":")[3] == "fp8"
    assert result["spread"] > 0.5
    assert result["difference"] < (0.2 if quantized else 1e-4)
    assert quantized or result["kv_difference"] < 1e-4


@EACH
def test_a_loader_that_knows_the_shares_gives_the_same(results: Results, case: str) -> None:
    assert results[case]["loaded"]


@EACH
def test_a_layer_costs_two_all_reduces_and_nothing_else(results: Results, case: str) -> None:
    # The scan's body is there once: one for `o`, one for `down` or for the experts; one more for the embedding.
    axes = case.split(":")[2].split("+")
    assert results[case]["collectives"] == {"all-reduce": len(axes)}


@EACH
def test_each_device_updates_its_share_of_the_pool_in_place(results: Results, case: str) -> None:
    result = results[case]
    assert result["aliased"] == result["pool_bytes_per_device"]
    if case.startswith("llama3:2"):
        assert result["pool_bytes_per_device"] * 2 == result["pool_bytes"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "q", "kv"),
    [
        (4, 2, 2, [[0, 1], [2, 3]], [[0], [1]]),
        (8, 4, 2, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3]]),
        (8, 2, 4, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0], [0], [1], [1]]),
        (3, 1, 2, [[0, 1], [2, 3]], [[0], [0]]),  # 3 = no head
        (9, 3, 3, [[0, 1, 2], [3, 4, 5], [6, 7, 8]], [[0], [1], [2]]),
        (9, 3, 4, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 9, 9]], [[0], [1], [2], [3]]),
        (3, 3, 2, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    ],
)
def test_heads_are_shared_out(
    heads: int, kv_heads: int, devices: int, q: list[list[int]], kv: list[list[int]]
) -> None:
    q_heads, kv_of = split_heads(heads, kv_heads, devices)
    assert (q_heads.tolist(), kv_of.tolist()) == (q, kv)


@pytest.mark.parametrize("devices", range(1, 9))
def test_every_query_head_is_computed_once_beside_its_kv_head(devices: int) -> None:
    for kv_heads in range(1, 9):
        for group in range(1, 6):
            heads = kv_heads * group
            q_heads, kv_of = split_heads(heads, kv_heads, devices)
            assert sorted(q_heads[q_heads < heads].tolist()) == list(range(heads))
            in_groups = q_heads.reshape(devices, kv_of.shape[1], -1)
            real = in_groups < heads
            of = np.broadcast_to(kv_of[..., None], in_groups.shape)
            assert (in_groups[real] // group == of[real]).all()


def test_a_share_is_a_smaller_model_and_its_arrays_are_known_without_any() -> None:
    model = TinyModel("llama3")
    mesh = AbstractMesh((4,), ("tp",))
    shares = Shares(model.config, mesh, ShardingRules(vocab=None))  # pyright: ignore[reportArgumentType]
    share = shares.share
    assert (share.num_heads, share.num_kv_heads, share.intermediate_size, share.vocab_size) == (1, 1, 24, 256)
    abstract = jax.eval_shape(shares.rearranged, jax.eval_shape(lambda: model.params))
    # Both KV heads are on two devices: 4 query heads and twice 4 KV heads of 16.
    assert abstract["layers"][0]["qkv"].shape == (12 * 16, 64)
    assert shares.pool_array(8, 4) == (9, 2, 4, 4 * 32)
    specs = shares.specs(abstract)
    assert specs["layers"][1]["qkv"] == PartitionSpec("tp", None)
    assert specs["layers"][1]["down"] == PartitionSpec(None, "tp")
    assert specs["layers"][1]["q_norm" if model.config.qk_norm else "attn_norm"] == PartitionSpec(None)
    assert specs["embed"] == PartitionSpec(None, None)


def test_source_tells_a_loader_which_rows_a_device_reads() -> None:
    model = TinyModel("llama3")
    shares = Shares(model.config, AbstractMesh((2,), ("tp",)))  # pyright: ignore[reportArgumentType]
    whole = np.asarray(model.params["layers"][0]["qkv"])
    rearranged = np.asarray(shares.rearranged(model.params)["layers"][0]["qkv"])
    source = shares.source("qkv")
    assert source is not None
    np.testing.assert_array_equal(rearranged, whole[source])
    # Device 0: query heads 0 and 1, KV head 0, that is rows of heads 0, 1, 4 and 6 of [q; k; v].
    assert source[: len(source) // 2].tolist() == [h * 16 + i for h in (0, 1, 4, 6) for i in range(16)]
    assert shares.source("down") is None
    assert jnp.asarray(rearranged).shape == whole.shape


def test_a_single_row_that_is_missing_is_filled_in() -> None:
    # 257 rows on 258 places: in order, but one too few.
    model = TinyModel("llama3")
    config = dataclasses.replace(model.config, vocab_size=257)
    shares = Shares(config, AbstractMesh((2,), ("tp",)))  # pyright: ignore[reportArgumentType]
    source = shares.source("embed")
    assert source is not None
    assert source.tolist() == list(range(258))
    abstract = jax.ShapeDtypeStruct((257, 64), jnp.float32)
    assert jax.eval_shape(lambda leaf: shares.rearrange("embed", leaf), abstract).shape == (258, 64)
