"""What a simulated run was like: hits by tier, first tokens, throughput, the tiers over time, and the bill."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.request import Request
from .prices import Bill
from .setup import Setup
from .traces.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from .simulate import Simulation

TIERS = ("device", "host", "disk")
SAMPLES = 100
"""Of the timeline, where nobody says how far they lie apart."""


@dataclass(slots=True)
class Moment:
    """A sample of the timeline. Bytes moved and pages evicted are since the start."""

    seconds: float
    running: int
    waiting: int
    used_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    evicted_pages: dict[str, int]


@dataclass(slots=True)
class Result:
    """Times in seconds."""

    trace: str
    requests: int
    refused: int
    """Requests that the device could never hold, or that want no output."""
    prompt_tokens: int
    output_tokens: int
    seconds: float
    """From the first arrival to the last token."""
    hit_rate: float
    """Cached prompt tokens per prompt token."""
    hit_rate_by_tier: dict[str, float]
    compute_hit_rate: float
    """Share of the prompts' arithmetic that was saved: late tokens weigh more."""
    ttft: array[float]
    """By request, in order of their ends."""
    tpot: array[float]
    """The same, of requests with more than one token of output."""
    device_busy: float
    """Share of the time."""
    steps: int
    computed_tokens: int
    retractions: int
    device_kv_bytes: int
    """Of the whole pool."""
    most_bytes: dict[str, int]
    """By tier: the most that was used at a time."""
    moved_bytes: dict[str, int]
    evicted_pages: dict[str, int]
    bill: Bill
    """Dollars for a million tokens, prompt and output."""
    timeline: list[Moment] = field(default_factory=list)

    @property
    def ttft_mean(self) -> float:
        return float(np.mean(self.ttft)) if self.ttft else 0.0

    @property
    def req_s(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0

    def as_json(self, *, timeline: bool = True, cdf: bool = True) -> dict[str, Any]:
        """Figures by name, times in milliseconds. `cdf`: 101 percentiles of the time to the first token."""
        report = {
            "trace": self.trace,
            "requests": self.requests,
            "refused": self.refused,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "seconds": self.seconds,
            "hit_rate": self.hit_rate,
            "hit_rate_by_tier": self.hit_rate_by_tier,
            "compute_hit_rate": self.compute_hit_rate,
            **_spread("ttft_ms", self.ttft),
            "tpot_ms": 1e3 * float(np.mean(self.tpot)) if self.tpot else 0.0,
            "req_s": self.req_s,
            "output_tok_s": self.output_tokens / self.seconds if self.seconds else 0.0,
            "device_busy": self.device_busy,
            "steps": self.steps,
            "computed_tokens": self.computed_tokens,
            "retractions": self.retractions,
            "device_kv_bytes": self.device_kv_bytes,
            "most_bytes": self.most_bytes,
            "moved_bytes": self.moved_bytes,
            "evicted_pages": self.evicted_pages,
            "usd_per_mtok": self.bill.total,
            "usd_parts": asdict(self.bill),
        }
        if cdf and self.ttft:
            report["ttft_ms_percentiles"] = [float(x) for x in 1e3 * np.percentile(self.ttft, np.arange(101))]
        if timeline:
            report["timeline"] = [asdict(moment) for moment in self.timeline]
        return report


def _spread(name: str, seconds: array[float]) -> dict[str, float]:
    ms = 1e3 * np.asarray(seconds or [0.0])
    return {
        f"{name}_mean": float(ms.mean()),
        f"{name}_p50": float(np.percentile(ms, 50)),
        f"{name}_p99": float(np.percentile(ms, 99)),
        f"{name}_stddev": float(ms.std()),
    }


class Recorder:
    """Follows a simulation, and makes its result."""

    def __init__(self, trace: Trace, setup: Setup, run: Simulation, interval: float | None) -> None:
        self._trace = trace
        self._setup = setup
        self._run = run
        self._work = setup.work
        length = max((request.arrival for request in trace.requests), default=0.0)
        self._interval = interval or max(length / SAMPLES, 1.0)
        self._next_look = 0.0
        self._arrived: dict[Request, float] = {}
        self._ttft, self._tpot = array("d"), array("d")
        self._refused = 0
        self._prompt_tokens = self._output_tokens = 0
        self._cached: dict[str, int] = dict.fromkeys(TIERS, 0)
        self._saved_flops = self._all_flops = 0.0
        self._first_arrival: float | None = None
        self._last_end = 0.0
        self._timeline: list[Moment] = []

    def arrive(self, request: Request, at: float) -> None:
        self._arrived[request] = at
        self._first_arrival = at if self._first_arrival is None else min(at, self._first_arrival)

    def refuse(self, wanted: TraceRequest) -> None:
        self._refused += 1

    def end(self, request: Request) -> None:
        arrived = self._arrived.pop(request)
        assert request.first_token is not None
        assert request.finished_at is not None
        self._ttft.append(request.first_token - arrived)
        if request.num_output > 1:
            self._tpot.append((request.finished_at - request.first_token) / (request.num_output - 1))
        self._prompt_tokens += request.num_prompt
        self._output_tokens += request.num_output
        for tier, tokens in request.cached_by_tier.items():
            self._cached[tier] += tokens
        self._saved_flops += self._work.prefill_flops(0, request.cached_tokens)
        self._all_flops += self._work.prefill_flops(0, request.num_prompt)
        self._last_end = max(self._last_end, request.finished_at)

    def look(self, now: float) -> None:
        """Samples the tiers, when it is time to."""
        if now >= self._next_look:
            self._next_look = now + self._interval
            self._timeline.append(self._moment(now))

    def _moment(self, now: float) -> Moment:
        run, page = self._run, self._setup.page_bytes
        cache = run.cache
        used = {
            "device": (cache.num_pages - cache.free) * page,
            "host": (cache.host.num_pages - cache.host.free) * page,
            "disk": run.index.bytes if run.index is not None else 0,
        }
        evicted = {
            "device": cache.device.evicted_pages,
            "host": cache.host.evicted_pages,
            "disk": sum(run.index.stats.evicted_pages.values()) if run.index is not None else 0,
        }
        moved = {kind: path.moved_bytes for kind, path in run.mover.paths.items()}
        return Moment(now, run.loop.stats.running, run.loop.stats.waiting, used, moved, evicted)

    def result(self, now: float) -> Result:
        run, setup = self._run, self._setup
        last = self._moment(now)
        self._timeline.append(last)
        seconds = self._last_end - (self._first_arrival or 0.0)
        tokens = self._prompt_tokens + self._output_tokens
        host_bytes = run.cache.host.num_pages * setup.page_bytes
        most = {tier: max(moment.used_bytes[tier] for moment in self._timeline) for tier in TIERS}
        return Result(
            trace=self._trace.name,
            requests=len(self._ttft),
            refused=self._refused,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            seconds=seconds,
            hit_rate=_share(sum(self._cached.values()), self._prompt_tokens),
            hit_rate_by_tier={t: _share(n, self._prompt_tokens) for t, n in self._cached.items()},
            compute_hit_rate=_share(self._saved_flops, self._all_flops),
            ttft=self._ttft,
            tpot=self._tpot,
            device_busy=_share(run.executor.busy_seconds, seconds),
            steps=run.loop.stats.steps,
            computed_tokens=run.loop.stats.computed_tokens,
            retractions=run.loop.stats.retractions,
            device_kv_bytes=run.cache.num_pages * setup.page_bytes,
            most_bytes=most,
            moved_bytes=last.moved_bytes,
            evicted_pages=last.evicted_pages,
            bill=setup.prices.bill(
                seconds=seconds,
                tokens=max(tokens, 1),
                dram_bytes=host_bytes,
                ssd_bytes=most["disk"],
                accelerators=setup.devices,
                ios=run.mover.ios,
            ),
            timeline=self._timeline,
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
