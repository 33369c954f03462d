"""A mixture of experts and its grouped product: against float64, and each token as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tierax.pallas_kernels.cpu.experts import grouped_linear
from tierax.pallas_kernels.cpu.library import library
from tierax.pallas_kernels.experts import Choice, looped_linear, mix, ragged_linear, route
from tierax.pallas_kernels.kernels import GroupedLinear
from tierax.pallas_kernels.linear import Weight, dequantize, quantize
from tierax.pallas_kernels.tpu import experts as tpu

native = pytest.mark.skipif(bool(library().absence), reason=library().absence)
GROUPED = {
    "ragged": ragged_linear,
    "looped": looped_linear,
    "native": grouped_linear,
    "tpu": partial(tpu.grouped_linear, interpret=True),
}
EACH = pytest.mark.parametrize(
    "grouped",
    [pytest.param(GROUPED[name], id=name, marks=native if name == "native" else ()) for name in GROUPED],
)
EXPERTS, HIDDEN, INNER = 5, 70, 24


def weights(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[-1]))


def experts(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    return weights(rng, EXPERTS, 2 * INNER, HIDDEN), weights(rng, EXPERTS, HIDDEN, INNER)


@EACH
@pytest.mark.parametrize("kind", ["f32", pytest.param("int8", marks=pytest.mark.slow)])
def test_each_group_of_rows_meets_its_own_matrix(grouped: GroupedLinear, kind: str) -> None:
    product = jax.jit(grouped)
    for sizes in ((0, 3, 0, 20, 1), (0, 0, 0, 0, 0), (24, 0, 0, 0, 0), (1, 1, 1, 1, 1)):
        check_groups(product, sizes, kind)


def check_groups(product: Callable[..., jax.Array], sizes: tuple[int, ...], kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    x, matrix = weights(rng, 24, HIDDEN), weights(rng, EXPERTS, 7, HIDDEN)
    weight: Weight = quantize(matrix) if kind == "int8" else matrix
    actual = np.asarray(product(x, weight, jnp.asarray(sizes, jnp.int32)))
    plain = np.asarray(dequantize(quantize(matrix)) if kind == "int8" else matrix, np.float64)
    # The same as the second layer of three.
    others = jax.tree.map(lambda leaf: jnp.concatenate([jnp.ones_like(leaf), leaf, -leaf]), weight)
    of_layer = product(x, others, jnp.asarray(sizes, jnp.int32), jnp.int32(EXPERTS))
    np.testing.assert_array_equal(np.asarray(of_layer)[: sum(sizes)], actual[: sum(sizes)])
    start = 0
    for expert, size in enumerate(sizes):
        rows = slice(start, start + size)
        np.testing.assert_allclose(actual[rows], np.asarray(x)[rows] @ plain[expert].T, atol=1e-5)
        start += size


@EACH
def test_a_token_gets_the_weighted_sum_of_its_experts(grouped: GroupedLinear) -> None:
    rng = np.random.default_rng(0)
    x, (gate_up, down) = weights(rng, 9, HIDDEN), experts(rng)
    choice = route(weights(rng, 9, EXPERTS) * 4, 3, normalized=True)
    chosen = np.array(choice.experts)
    chosen[4] = (-1, 2, EXPERTS)  # one of its own, and two that are none
    chosen[8] = -1  # padding
    mixed = jax.jit(lambda x, choice: mix(x, choice, gate_up, down, grouped, count=EXPERTS))
    actual = mixed(x, choice._replace(experts=jnp.asarray(chosen)))
    expected = np.zeros((9, HIDDEN))
    for token, row in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(chosen[token], np.asarray(choice.weights)[token], strict=True):
            if 0 <= expert < EXPERTS:
                gate, up = np.split(np.asarray(gate_up)[expert] @ row, 2)
                expected[token] += weight * (np.asarray(down)[expert] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert not np.asarray(actual)[8].any()


@native
def test_on_a_cpu_a_token_gets_the_same_to_the_bit_in_any_company() -> None:
    rng = np.random.default_rng(1)
    x, (gate_up, down) = weights(rng, 40, HIDDEN), experts(rng)
    choice = route(weights(rng, 40, EXPERTS) * 4, 2, normalized=False)
    mixed = jax.jit(lambda x, choice: mix(x, choice, gate_up, down, grouped_linear, count=EXPERTS))
    together = np.asarray(mixed(x, choice))
    for token in (0, 17, 39):
        alone = mixed(x[token : token + 1], Choice(*(part[token : token + 1] for part in choice)))
        np.testing.assert_array_equal(alone[0], together[token])


def test_the_likeliest_experts_are_chosen_and_weighted() -> None:
    logits = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]))
    plain, normalized = (route(logits, 2, normalized=flag) for flag in (False, True))
    assert np.asarray(plain.experts).tolist() == [[1, 3], [0, 1]]
    np.testing.assert_allclose(plain.weights, [[0.4, 0.3], [0.25, 0.25]], rtol=1e-5)
    np.testing.assert_allclose(normalized.weights, [[4 / 7, 3 / 7], [0.5, 0.5]], rtol=1e-5)


@native
def test_the_native_product_refuses_what_does_not_fit() -> None:
    x, matrix = jnp.zeros((4, 8)), jnp.zeros((2, 3, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="sizes add up to more than m"):
        jax.block_until_ready(grouped_linear(x, matrix, jnp.asarray([3, 2], jnp.int32)))
