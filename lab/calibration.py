"""What a machine was measured to do, in place of data sheets: reports of `tierax bench offline` and `bench cache`.

    decode     seconds of a step of r rows: a part by bucket of rows, and so much per token of their contexts
    prefill    seconds of a step of one chunk: a part by bucket of tokens, and so much per pair of query and key
    mixed      the chunk's bucket with all the step's tokens, what sampling more rows adds, and both kinds of attention

Steps are padded to buckets as the engine pads them. The engine's own work is in what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.plan import StepPlan
from .cost import step_load
from .errors import LabError
from .presets import Device

GB = 1e9


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size of a step: measured at some sizes, straight lines between, in proportion beyond the last."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        return float(np.interp(size, self.sizes, self.seconds))


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Implements `cost.StepCost`."""

    decode: Curve
    """By rows, at no context."""
    chunk: Curve
    """By tokens, at no context."""
    context_seconds: float
    """Of a decode, per token of its context."""
    pair_seconds: float
    """Of a chunk, per pair of query and key."""
    limit: int
    """Tokens of the largest bucket."""

    def device_seconds(self, plan: StepPlan) -> float:
        context = sum(row.start + 1 for row in plan.decodes)
        attention = context * self.context_seconds
        if not plan.chunks:
            return self.decode.at(self._bucket(len(plan.decodes))) + attention
        tokens, pairs, _, sampled = step_load(plan)
        rows = self._bucket(max(sampled, 1))
        more_rows = max(self.decode.at(rows) - self.chunk.at(rows), 0.0) if sampled > 1 else 0.0
        return (
            self.chunk.at(self._bucket(tokens))
            + more_rows
            + attention
            + (pairs - context) * self.pair_seconds
        )

    def host_seconds(self, plan: StepPlan) -> float:
        """What the loop does was part of every measured step."""
        return 0.0

    def _bucket(self, size: int) -> int:
        """Powers of two, as `engine.step.buckets` has them."""
        return min(1 << max(size - 1, 0).bit_length(), max(self.limit, size))


def read_steps(path: Path) -> MeasuredSteps:
    """From the JSON report of `tierax bench offline`. Raises `LabError` if it does not tell enough."""
    report = _report(path)
    try:
        decode = [(row["batch"], row["context"], row["batch"] / row["tok_s"]) for row in report["decode"]]
        prefill = [(row["tokens"], row["tokens"] / row["tok_s"]) for row in report["prefill"]]
        limit = report["limits"]["max_num_batched_tokens"]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise LabError(f"calibration {path}: it is no report of tierax bench offline ({error!r})") from None
    if len({context for _, context, _ in decode}) < 2 or sum(tokens <= limit for tokens, _ in prefill) < 2:
        raise LabError(
            f"calibration {path}: decode at two contexts and prefill of two sizes up to {limit} tokens are needed"
        )
    context_seconds = _context_seconds(decode)
    pair_seconds = _pair_seconds(prefill, limit)
    by_rows: dict[int, list[float]] = {}
    for batch, context, seconds in decode:
        by_rows.setdefault(batch, []).append(seconds - batch * context * context_seconds)
    chunks = {n: s - n * (n + 1) / 2 * pair_seconds for n, s in sorted(prefill) if n <= limit}
    return MeasuredSteps(
        decode=_curve({batch: max(min(found), 0.0) for batch, found in sorted(by_rows.items())}),
        chunk=_curve(chunks),
        context_seconds=context_seconds,
        pair_seconds=pair_seconds,
        limit=limit,
    )


def read_copies(path: Path, device: Device) -> Device:
    """The device with the copies between its tiers as `tierax bench cache` measured them."""
    report = _report(path)
    try:
        speed = {row["path"]: row["gb_s"] * GB for row in report["copies"]}
        host = min(speed["device->host"], speed["host->device"])
        disk = speed["disk->host warm"]
    except (KeyError, TypeError) as error:
        raise LabError(f"calibration {path}: it has no copies of tierax bench cache ({error!r})") from None
    return replace(device, host_bytes_s=host, disk_read_bytes_s=disk, disk_write_bytes_s=disk)


def _report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LabError(f"calibration {path}: it is not JSON: {error}") from None
    if not isinstance(report, dict):
        raise LabError(f"calibration {path}: it is not a report")
    return report


def _context_seconds(decode: Sequence[tuple[int, int, float]]) -> float:
    """Least squares through the differences from each batch's mean: what a step adds per token of context."""
    upper = lower = 0.0
    for batch in {batch for batch, _, _ in decode}:
        same = [(batch * context, seconds) for b, context, seconds in decode if b == batch]
        mean_x = sum(x for x, _ in same) / len(same)
        mean_y = sum(y for _, y in same) / len(same)
        upper += sum((x - mean_x) * (y - mean_y) for x, y in same)
        lower += sum((x - mean_x) ** 2 for x, _ in same)
    return max(upper / lower, 0.0) if lower else 0.0


def _pair_seconds(prefill: Sequence[tuple[int, float]], limit: int) -> float:
    """What a prompt of several full chunks takes beyond as many first chunks, per pair of query and key beyond theirs."""
    full = dict(prefill).get(limit)
    upper = lower = 0.0
    for tokens, seconds in prefill:
        chunks = tokens // limit
        if full is not None and chunks > 1 and tokens % limit == 0:
            pairs = (tokens * (tokens + 1) - chunks * limit * (limit + 1)) / 2
            upper += max(seconds - chunks * full, 0.0) * pairs
            lower += pairs * pairs
    return upper / lower if lower else 0.0


def _curve(points: dict[int, float]) -> Curve:
    """A larger step is never faster; where it was measured to be, something else took the machine's time before."""
    seconds = list(points.values())
    for i in range(len(seconds) - 2, -1, -1):
        seconds[i] = min(seconds[i], seconds[i + 1])
    return Curve(tuple(points), tuple(seconds))
