"""The backend "triton": ragged paged attention for NVIDIA GPUs from Ampere on, while jax can lower Pallas to Triton.

jax 0.11 deprecates that lowering; once it is gone this backend refuses and the next one serves.
"""

from __future__ import annotations

from functools import partial

from ..experts import looped_linear
from ..kernels import AttentionShape, Kernels, Target
from ..linear import linear
from ..pages import write_kv
from .triton_blocks import MOST_GROUPED, WIDEST, blocks_for


def refuses(target: Target, shape: AttentionShape) -> str | None:
    """See `attention.Backend`."""
    if target.platform not in ("gpu", "cuda"):
        return "needs an NVIDIA GPU"
    if _major(target.generation) < 8:
        return f"needs compute capability 8.0 (Ampere) or newer, and this is {target.generation or 'unknown'}"
    if shape.head_dim > WIDEST:
        return f"serves heads of up to {WIDEST}, and these have {shape.head_dim}"
    if shape.heads // shape.kv_heads > MOST_GROUPED:
        return f"serves up to {MOST_GROUPED} query heads per KV head, and there are {shape.heads // shape.kv_heads}"
    return None if _has_lowering() else "this version of jax has no Triton lowering for Pallas any more"


def kernels(target: Target, shape: AttentionShape) -> Kernels:
    """See `attention.Backend`."""
    # Not above: where jax has no such lowering, `refuses` must still be able to say so.
    from .triton_attention import attend

    blocks = blocks_for(target, shape)
    return Kernels(
        "triton", partial(attend, blocks=blocks), write_kv, linear, partial(looped_linear, most_rows=128)
    )


def _major(generation: str) -> int:
    major = generation.partition(".")[0]
    return int(major) if major.isdigit() else 0


def _has_lowering() -> bool:
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return False
    return hasattr(triton, "CompilerParams")
