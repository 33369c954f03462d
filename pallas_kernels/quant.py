"""8-bit KV: e4m3 codes and one scale per token and head, all in the bytes of a pool's row.

A row holds the codes of K, those of V, and their two scales, `[2 * head_dim + SCALE_BYTES]` bytes. Rows know nothing of
each other: a token that comes later rescales nothing, and a page of rows may be moved as it is. Codes are of the format
that ml_dtypes calls `float8_e4m3fn` (4 bits of exponent, 3 of mantissa, no infinities, at most 448; Micikevicius et al.,
2022). They are made and read with integers and f32 alone, the same to the bit on every platform: XLA's CPU backend
converts such types two to three times more slowly, and flushes f32 numbers below 2**-126 to zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SCALE_BYTES = 4
"""Of a row: the scales of K and V in bf16. That costs no accuracy, as codes are relative to the scale as it is stored."""
LARGEST = 448.0
"""Of a code."""

_SMALLEST_NORMAL = 2.0**-6
_SMALLEST = 2.0**-9
_SMALLEST_AMAX = 2.0**-100
_LARGEST_AMAX = 2.0**127
"""Bounds to the values that a scale is derived from, so that neither it nor what is decoded by it leaves f32."""
_MANTISSA = 20
"""Bits of an f32's mantissa below the three that a code keeps."""
_REBIAS = (127 - 7) << 3
"""Difference of the exponents' biases, above a code's mantissa."""
_ROUND_TO_SMALLEST = _SMALLEST * 2.0**23
"""A number whose last bit is worth `_SMALLEST`: adding it rounds to multiples of that."""


def quantize_kv(k_tkd: jax.Array, v_tkd: jax.Array) -> jax.Array:
    """u8 `[T, kv_heads, 2 * head_dim + SCALE_BYTES]` of K and V `[T, kv_heads, head_dim]` (f32 or bf16).

    The largest value of a token and head becomes the largest code; values of 2**127 and more, infinities among them,
    saturate; a row with a NaN reads as NaN, as it does in other pools.
    """
    kv_tkcd = jnp.stack([k_tkd, v_tkd], axis=-2).astype(jnp.float32)
    amax = jnp.clip(jnp.abs(kv_tkcd).max(-1), _SMALLEST_AMAX, _LARGEST_AMAX)
    scales = (amax / LARGEST).astype(jnp.bfloat16)
    codes = encode(kv_tkcd / scales.astype(jnp.float32)[..., None])
    rows = k_tkd.shape[:-1]
    scale_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
    return jnp.concatenate([codes.reshape(*rows, -1), scale_bytes.reshape(*rows, SCALE_BYTES)], axis=-1)


def dequantize_kv(rows: jax.Array) -> jax.Array:
    """f32 `[..., 2 * head_dim]`, K before V, of u8 rows `[..., 2 * head_dim + SCALE_BYTES]`."""
    *outer, width = rows.shape
    codes, scale_bytes = rows[..., : width - SCALE_BYTES], rows[..., width - SCALE_BYTES :]
    scales = lax.bitcast_convert_type(scale_bytes.reshape(*outer, 2, 2), jnp.bfloat16).astype(jnp.float32)
    kv = decode(codes.reshape(*outer, 2, -1)) * scales[..., None]
    return kv.reshape(*outer, -1)


def encode(values: jax.Array) -> jax.Array:
    """u8 codes of f32 values: rounded to the nearest, ties to even, and saturated at `LARGEST`; a NaN gives anything."""
    magnitude = jnp.minimum(jnp.abs(values), LARGEST)
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    half_or_less = (1 << (_MANTISSA - 1)) - 1 + ((bits >> _MANTISSA) & 1)
    normal = ((bits + half_or_less) >> _MANTISSA) - _REBIAS
    # Below the normal numbers codes are multiples of the smallest one; the largest multiple is the first normal code.
    subnormal = lax.bitcast_convert_type(magnitude + _ROUND_TO_SMALLEST, jnp.int32) & 0xF
    code = jnp.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    sign = (lax.bitcast_convert_type(values, jnp.int32) >> 24) & 0x80
    return (code | sign).astype(jnp.uint8)


def decode(codes: jax.Array) -> jax.Array:
    """f32 values of u8 codes. The two codes of NaN, which `encode` never makes, read as +-480."""
    codes = codes.astype(jnp.int32)
    magnitude = codes & 0x7F
    normal = lax.bitcast_convert_type((magnitude + _REBIAS) << _MANTISSA, jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * _SMALLEST, normal)
    return jnp.where(codes >= 0x80, -value, value)
