"""Devices and models by name: what data sheets and published configs say of them, and what software gets out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ..models.config import ModelConfig, RopeConfig
from .errors import LabError

GB = 10**9
TFLOP = 1e12

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, and the machine around it."""

    name: str
    flops: float
    """Dense multiply-adds in the weights' dtype count two; per second, of the data sheet."""
    memory_bytes_s: float
    memory_bytes: int
    link_bytes_s: float
    """To its neighbours, where several serve one model."""
    host_bytes_s: float
    """Between host memory and the device, one way."""
    disk_read_bytes_s: float = 6 * GB
    disk_write_bytes_s: float = 3 * GB
    disk_latency_s: float = 150e-6
    hour_usd: float = 2.5
    """Rented."""
    flops_share: float = 0.6
    """Of the data sheet's, that large matrix products reach."""
    memory_share: float = 0.8
    """The same for reading."""
    step_seconds: float = 1e-3
    """Of the device in every step, beside what it computes and reads: launches, sampling."""
    host_step_seconds: float = 0.3e-3
    """Of the engine's thread for a step; hidden while the device is busy for longer."""
    host_row_seconds: float = 6e-6
    """The same for every request in it."""
    weight_bytes: float = 2.0
    """Per parameter."""
    kv_itemsize: int = 2
    """Bytes of a value of stored KV."""


DEVICES = {
    device.name: device
    for device in (
        Device("a100-80g", 312 * TFLOP, 2039 * GB, 80 * GB, 300 * GB, 25 * GB, hour_usd=2.5),
        Device("h100", 989 * TFLOP, 3350 * GB, 80 * GB, 450 * GB, 50 * GB, hour_usd=3.5),
        Device("h200", 989 * TFLOP, 4800 * GB, 141 * GB, 450 * GB, 50 * GB, hour_usd=4.0),
        Device("l4", 121 * TFLOP, 300 * GB, 24 * GB, 25 * GB, 25 * GB, hour_usd=0.8),
        Device("tpu-v5e", 197 * TFLOP, 819 * GB, 16 * GB, 100 * GB, 16 * GB, hour_usd=1.2),
        Device("tpu-v6e", 918 * TFLOP, 1640 * GB, 32 * GB, 200 * GB, 16 * GB, hour_usd=2.7),
        # Two cores of a server, f32: what this project's own figures were measured on.
        Device(
            "this-cpu",
            0.175 * TFLOP,
            36 * GB,
            8 * GB,
            GB,
            8 * GB,
            disk_read_bytes_s=1.2 * GB,
            disk_write_bytes_s=GB,
            disk_latency_s=300e-6,
            hour_usd=0.1,
            flops_share=0.8,
            step_seconds=2e-3,
            weight_bytes=4.0,
            kv_itemsize=4,
        ),
    )
}


def _model(
    family: str,
    *,
    vocab: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    tie_embeddings: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=131_072,
        tie_embeddings=tie_embeddings,
        qk_norm=qk_norm,
    )


MODELS = {
    "qwen3-8b": _model(
        "qwen3",
        vocab=151_936,
        hidden=4096,
        intermediate=12_288,
        layers=36,
        heads=32,
        kv_heads=8,
        qk_norm=True,
    ),
    "llama-3.1-8b": _model(
        "llama", vocab=128_256, hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8
    ),
    "llama-3.1-70b": _model(
        "llama", vocab=128_256, hidden=8192, intermediate=28_672, layers=80, heads=64, kv_heads=8
    ),
    "smollm2-135m": _model(
        "llama",
        vocab=49_152,
        hidden=576,
        intermediate=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        tie_embeddings=True,
    ),
}


def device_of(name: str) -> Device:
    """Raises `LabError` for a name that there is not."""
    return _named(DEVICES, name, "device")


def model_of(name: str) -> ModelConfig:
    """Raises `LabError` for a name that there is not."""
    return _named(MODELS, name, "model")


def _named(table: dict[str, T], name: str, kind: str) -> T:
    found = table.get(name.lower())
    if found is None:
        raise LabError(f"no {kind} {name!r}: choose one of {', '.join(table)}")
    return found
