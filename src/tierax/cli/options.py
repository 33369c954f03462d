"""One table of flags: their spellings, and the settings they fill."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..engine.config import DTYPES, KV_DTYPES, POLICIES, QUANTIZATIONS, EngineConfig
from .option import Option, Parser, add_options, pick
from .options_of_tiers import HIERARCHICAL_SIZE, TIER_OPTIONS


def _fraction(text: str) -> str:
    """`0.4` -> `40%`, the spelling of `device_cache_size`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0 and at most 1")
    return f"{value * 100:.10g}%"


def _schedule_policy(text: str) -> str:
    """`priority` asks for what every policy does: requests' priorities count first."""
    return "fcfs" if text == "priority" else text


ENGINE_OPTIONS = (
    Option(
        "model_path",
        ("--model-path", "--model"),
        "a Hugging Face directory, a .gguf file, an Orbax checkpoint, or demo",
    ),
    Option("dtype", ("--dtype",), f"dtype of weights: {', '.join(DTYPES)}"),
    Option("quantization", ("--quantization",), f"of the weights' matrices: {', '.join(QUANTIZATIONS)}"),
    Option(
        "kv_cache_dtype",
        ("--kv-cache-dtype",),
        f"dtype of stored KV: {', '.join(KV_DTYPES)} (e4m3)",
    ),
    Option(
        "tp_size",
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        "devices that the model is split over",
        int,
        "N",
    ),
    Option(
        "dp_size",
        ("--dp-size", "--data-parallel-size", "--dp"),
        "copies of the model in this process, each on --tp-size devices of its own",
        int,
        "N",
    ),
    Option(
        "coordinator_address",
        ("--coordinator-address", "--dist-init-addr"),
        "where several processes run one model: process 0, whose next port is used too",
        metavar="HOST:PORT",
    ),
    Option("num_processes", ("--num-processes", "--nnodes"), "how many they are", int, "N"),
    Option("process_id", ("--process-id", "--node-rank"), "which of them this is, from 0", int, "N"),
    Option("page_size", ("--page-size", "--block-size"), "tokens per page", int, "N"),
    Option(
        "device_cache_size",
        ("--device-cache-size",),
        "device memory of the page pool: auto, bytes, 2GiB, or 40%% of what is available once weights are loaded",
        metavar="SIZE",
    ),
    Option(
        "device_cache_size",
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        "the same as a fraction, 0.4 = 40%%",
        _fraction,
        "X",
    ),
    Option(
        "max_num_seqs", ("--max-num-seqs", "--max-running-requests"), "requests running at once", int, "N"
    ),
    Option(
        "max_num_batched_tokens",
        ("--max-num-batched-tokens", "--chunked-prefill-size"),
        "tokens computed in one step, prefill and decode together",
        int,
        "N",
    ),
    Option(
        "shared_step_tokens",
        ("--shared-step-tokens",),
        "up to which short prompts share a step; one that is longer fills it",
        int,
        "N",
    ),
    Option(
        "context_length",
        ("--context-length", "--max-model-len"),
        "longest prompt plus output, in tokens",
        int,
        "N",
    ),
    Option(
        "attention_backend",
        ("--attention-backend",),
        "kernels of the step: auto, tpu (TPU v5e and newer), native (CPU), mosaic-gpu (NVIDIA Hopper), triton (NVIDIA from Ampere on), xla (runs everywhere)",
    ),
    Option(
        "schedule_policy",
        ("--schedule-policy", "--scheduling-policy"),
        "order of waiting requests of one priority: fcfs, lpm (longest cached prefix first)",
        _schedule_policy,
        "POLICY",
    ),
    Option(
        "eviction_policy",
        ("--eviction-policy", "--radix-eviction-policy"),
        f"which cached page goes first: {', '.join(POLICIES)} (ttl=1h), or your own as module:Class",
    ),
    Option(
        "disable_radix_cache",
        ("--disable-radix-cache", "--no-enable-prefix-caching"),
        "share no KV",
        const=True,
    ),
    Option(
        "disable_radix_cache",
        ("--enable-prefix-caching",),
        "share KV between requests (the default)",
        const=False,
    ),
    Option("seed", ("--seed", "--random-seed"), "seed of requests that bring none", int, "N"),
    Option(
        "skip_warmup",
        ("--skip-warmup", "--skip-server-warmup"),
        "compile when first needed, not at start",
        const=True,
    ),
    Option(
        "compile_cache_dir",
        ("--compile-cache-dir",),
        "where compiled programs persist: auto, none, or a directory",
    ),
    Option(
        "trace_out",
        ("--trace-out",),
        "record requests in this new file for tierax lab: times, lengths and hashes, no text",
        metavar="FILE",
    ),
)

NAME_OPTION = Option("served_model_name", ("--served-model-name",), "name in /v1/models and in answers")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, and MODEL as a bare word."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the same as --model-path; demo when neither is given"
    )
    add_options(parser, ENGINE_OPTIONS, "engine")
    add_options(parser, TIER_OPTIONS, "tiers below the device")


def engine_config(values: Mapping[str, Any], parser: Parser) -> EngineConfig:
    """The engine's settings out of parsed flags."""
    settings = pick(values, (*ENGINE_OPTIONS, *TIER_OPTIONS, NAME_OPTION))
    if settings.pop("hierarchical", False):
        settings.setdefault("host_cache_size", HIERARCHICAL_SIZE)
    word = values["model"]
    if word is not None and settings.setdefault("model_path", word) != word:
        parser.error(f"two models given: {word} and {settings['model_path']}")
    settings.setdefault("model_path", "demo")
    return EngineConfig(**settings)
