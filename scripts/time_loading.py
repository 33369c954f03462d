"""Prints how long a model takes to open and to load: `python scripts/time_loading.py [MODEL] [--dtype f32|bf16]`."""

from __future__ import annotations

import argparse
import time

import jax

from tierax.models.source import resolve_model
from tierax.models.weights.loader import load_params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="directory, GGUF file or demo")
    parser.add_argument("--dtype", default="f32", choices=("f32", "bf16"))
    arguments = parser.parse_args()
    jax.devices()

    start = time.perf_counter()
    source = resolve_model(arguments.model)
    opened = time.perf_counter()
    params = jax.block_until_ready(
        load_params(source, source.config, dtype=arguments.dtype, stacked=True, progress=True)
    )
    loaded = time.perf_counter()
    mib = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20
    vocabulary = len(source.raw.get("tokenizer.ggml.tokens", ()))
    print(
        f"open {opened - start:.3f} s (config, {vocabulary:,} tokenizer entries), load {loaded - opened:.2f} s ({mib:.0f} MiB)"
    )


if __name__ == "__main__":
    main()
