"""How long a step takes on a device: a roofline over what it must compute and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..engine.plan import StepPlan
from ..models.config import ModelConfig
from .presets import Device


class StepCost(Protocol):
    """Seconds of a device for a step, and of the engine's thread for preparing it."""

    def device_seconds(self, plan: StepPlan) -> float: ...

    def host_seconds(self, plan: StepPlan) -> float: ...


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a token costs in one model: arithmetic, and bytes to read."""

    matrix_flops: float
    """Per token, of the layers' matrices."""
    head_flops: float
    """Per token that is sampled."""
    pair_flops: float
    """Per query and key: scores and weighted sum, all layers and heads."""
    weight_bytes: float
    """Read by every step; an embedding table that is no output head is not."""
    kv_bytes: int
    """Of one token."""
    hidden_bytes: float
    """Of one token between two layers, over all of them: what devices exchange."""

    @classmethod
    def of(cls, model: ModelConfig, weight_bytes: float, kv_itemsize: int) -> ModelWork:
        embed = model.vocab_size * model.hidden_size
        tables = embed * (1 if model.tie_embeddings else 2)
        layers = model.num_parameters() - tables
        return cls(
            matrix_flops=2.0 * (model.parameters_per_token() - tables),
            head_flops=2.0 * embed,
            pair_flops=4.0 * model.num_layers * model.num_heads * model.head_dim,
            weight_bytes=weight_bytes * (layers + embed),
            kv_bytes=model.kv_bytes_per_token(kv_itemsize),
            hidden_bytes=2.0 * model.num_layers * model.hidden_size * weight_bytes,
        )

    def prefill_flops(self, start: int, end: int) -> float:
        """Of the prompt's positions `[start, end)`, each of which looks at all before it and at itself."""
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return self.matrix_flops * (end - start) + self.pair_flops * pairs


class Roofline:
    """The layers' matrices and attention take the longer of computing and reading, one after the other.

    Several devices share a model evenly (tensor parallel), and exchange every layer's results twice.
    """

    def __init__(self, work: ModelWork, device: Device, devices: int = 1) -> None:
        self._work = work
        self._device = device
        self._flops = device.flops * device.flops_share * devices
        self._bytes = device.memory_bytes_s * device.memory_share * devices
        share = 2 * (devices - 1) / devices
        self._exchange = share * work.hidden_bytes / device.link_bytes_s

    def device_seconds(self, plan: StepPlan) -> float:
        work = self._work
        tokens, pairs, read, sampled = step_load(plan)
        matrices = max(
            (tokens * work.matrix_flops + sampled * work.head_flops) / self._flops,
            work.weight_bytes / self._bytes,
        )
        attention = max(pairs * work.pair_flops / self._flops, read * work.kv_bytes / self._bytes)
        return matrices + attention + tokens * self._exchange + self._device.step_seconds

    def host_seconds(self, plan: StepPlan) -> float:
        rows = len(plan.chunks) + len(plan.decodes)
        return self._device.host_step_seconds + rows * self._device.host_row_seconds


def step_load(plan: StepPlan) -> tuple[int, float, int, int]:
    """Tokens, pairs of query and key, tokens of KV that are read, and rows that are sampled."""
    tokens = read = len(plan.decodes)
    sampled = 0
    for row in plan.decodes:
        read += row.start
        sampled += row.sample
    pairs = float(read)
    for row in plan.chunks:
        end = row.start + row.count
        tokens += row.count
        pairs += (end * (end + 1) - row.start * (row.start + 1)) / 2
        read += end
        sampled += row.sample
    return tokens, pairs, read, sampled
