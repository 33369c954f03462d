"""A trace through the engine's own loop, scheduler, tree, tiers and policies, in simulated time.

What is simulated is what takes time: the device (`SimExecutor`), the copies between the tiers (`SimMover`), the users
(`Arrivals`) and the clock. All else is the code that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..cache.disk.index import DiskIndex
from ..cache.manager import CacheManager
from ..cache.policies.registry import load_policy
from ..cache.writer import Writer
from ..engine.loop import EngineLoop
from ..engine.plan import Limits
from ..engine.prefetch import Prefetcher
from ..engine.prefetch_policy import PrefetchPolicy
from ..engine.request import Request, SamplingParams
from ..engine.schedule_policy import SCHEDULE_POLICIES
from ..engine.tier_transfers import TierTransfers
from .arrivals import Arrivals, Pace
from .clock import SimClock
from .result import Recorder, Result
from .setup import Setup
from .sim_executor import SimExecutor
from .sim_mover import Path, SimMover
from .tokens import known_tokens
from .traces.trace import Trace

LOOK_AGAIN = 0.001
"""Seconds before the engine's thread looks again when requests wait for a transfer, as `engine.thread` has it."""
STUCK = 100_000
"""Such looks in a row that change nothing are a bug."""


def simulate(
    trace: Trace,
    setup: Setup,
    pace: Pace | None = None,
    *,
    interval: float | None = None,
    progress: Callable[[int], object] = lambda ended: None,
) -> Result:
    """Serves a whole trace. `interval`: seconds between two samples of the timeline; None: a hundredth of the trace.

    `progress` hears of requests that have ended. Raises `LabError` for a setup that is impossible, ValueError for a name
    that no policy has.
    """
    return Simulation(trace, setup, pace or Pace(), interval).run(progress)


class Simulation:
    """One run: the engine's parts, put together as `engine.engine` and `engine.tiers` do it, on simulated ones."""

    def __init__(self, trace: Trace, setup: Setup, pace: Pace, interval: float | None = None) -> None:
        self.clock = SimClock()
        self.cache = CacheManager(
            setup.device_pages(),
            setup.page_tokens,
            load_policy(setup.eviction_policy),
            enabled=setup.caching,
            host_pages=setup.host_pages(),
            host_policy=load_policy(setup.host_eviction_policy or setup.eviction_policy),
            write_policy=setup.write_policy,
            identity={"model": setup.model.family},
            clock=self.clock,
        )
        self.executor = SimExecutor(setup.cost, self.clock)
        self.mover = _mover(setup, self.clock)
        self.index: DiskIndex | None = None
        self.transfers = self._transfers(setup) if self.cache.host.num_pages else None
        self.loop = EngineLoop(
            self.cache,
            self.executor,
            Limits(setup.max_num_seqs, setup.max_num_batched_tokens, setup.shared_step_tokens),
            SCHEDULE_POLICIES[setup.schedule_policy](),
            clock=self.clock,
            transfers=self.transfers,
        )
        self._trace = trace
        self._arrivals = Arrivals(trace, pace)
        self._params = SamplingParams(ignore_eos=True)
        self._recorder = Recorder(trace, setup, self, interval)

    def _transfers(self, setup: Setup) -> TierTransfers:
        if setup.disk_bytes:
            policy = load_policy(setup.disk_eviction_policy or setup.eviction_policy)
            self.index = DiskIndex(setup.disk_bytes, policy)
        self.prefetcher = Prefetcher(
            self.cache,
            self.mover,
            self.index,
            page_bytes=setup.page_bytes,
            policy=PrefetchPolicy.parse(setup.prefetch_policy),
            max_wait=setup.prefetch_max_wait,
            on_arrival=setup.prefetch_on_arrival,
        )
        self.writer = Writer(
            self.cache,
            self.mover,
            self.index,
            record_bytes=setup.record_bytes,
            max_bytes_in_flight=setup.write_bytes,
        )
        return TierTransfers(self.mover, self.prefetcher, self.writer, clock=self.clock)

    def run(self, progress: Callable[[int], object] = lambda ended: None) -> Result:
        """Until every request has ended, and every page is where it is to be."""
        looks = 0
        while self._admit():
            if self.loop.step():
                looks = 0
            elif not self._wait():
                break
            else:
                looks += 1
                assert looks < STUCK, f"nothing happens any more: {self.loop.request_ids[:5]} …"
            if self.executor.ending and (ended := self._account()):
                progress(ended)
            self._recorder.look(self.clock.now)
        return self._recorder.result(self.clock.now)

    def _admit(self) -> bool:
        """Hands what has arrived to the loop; with nothing to do, waits for the next arrival. False: there is none."""
        while (at := self._arrivals.next_time()) is not None and (at <= self.clock.now or self.loop.idle):
            self.clock.wait_until(at)
            self._arrive(*self._arrivals.pop())
        return not self.loop.idle

    def _arrive(self, at: float, number: int) -> None:
        tokens, answer = known_tokens(self._trace, self._trace.requests[number])
        wanted = self._trace.requests[number]
        capacity = self.cache.capacity_tokens
        if not tokens or len(tokens) >= capacity or wanted.output_tokens < 1:
            self._recorder.refuse(wanted)
            self._arrivals.ended(number, at)
            return
        request = Request(
            id=str(number),
            tokens=tokens,
            num_prompt=len(tokens),
            params=self._params,
            seed=0,
            stop_ids=frozenset(),
            max_total=min(len(tokens) + wanted.output_tokens, capacity),
            namespace=wanted.tenant.encode(),
        )
        self.executor.expect(request, answer)
        self._recorder.arrive(request, at)
        self.loop.add(request)

    def _account(self) -> int:
        """Takes leave of the requests that have ended; returns how many."""
        ended = [request for request in self.executor.ending if request.finished_at is not None]
        for request in ended:
            self.executor.forget(request)
            self._recorder.end(request)
            self._arrivals.ended(int(request.id), self.clock.now)
        return len(ended)

    def _wait(self) -> bool:
        """Until something can have changed. False: nothing will, and nobody waits for it."""
        times = [at for at in (self.mover.next_event(), self._arrivals.next_time()) if at is not None]
        if self.loop.stats.waiting:
            times.append(self.clock.now + LOOK_AGAIN)
        if times:
            self.clock.wait_until(min(times))
        return bool(times)


def _mover(setup: Setup, clock: SimClock) -> SimMover:
    device, lanes = setup.device, setup.devices
    to_device = partial(Path, device.host_bytes_s * lanes, 20e-6)
    paths = {
        "save": to_device(),
        "load": to_device(),
        "read": Path(device.disk_read_bytes_s, device.disk_latency_s),
        "write": Path(device.disk_write_bytes_s, device.disk_latency_s),
    }
    return SimMover(clock, paths, setup.page_bytes, setup.record_bytes)
