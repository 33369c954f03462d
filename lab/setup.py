"""What is simulated: a model on a machine, its tiers and its policies."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cache.manager import WRITE_POLICIES
from ..cache.policies.registry import load_policy
from ..engine.prefetch_policy import PrefetchPolicy
from ..engine.schedule_policy import SCHEDULE_POLICIES
from ..models.config import ModelConfig
from .cost import ModelWork, Roofline, StepCost
from .errors import LabError
from .presets import DEVICES, MODELS, Device
from .prices import Prices

POOL_SHARE = 0.9
"""Of the memory that weights leave, where the device cache's size is left to us."""
STAGING_BYTES = 256 << 20
"""Host memory through which the disk is read and written where no host cache is wanted."""
WRITE_BYTES, WRITE_PAGES = 256 << 20, 64
RECORD_OVERHEAD = 64
"""Bytes of a disk record beside the page: about a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Sizes are in bytes and of all devices together; names are as on the command line of `tierax serve`."""

    model: ModelConfig = field(default_factory=lambda: MODELS["qwen3-8b"])
    device: Device = field(default_factory=lambda: DEVICES["a100-80g"])
    devices: int = 1
    page_tokens: int = 16
    device_bytes: int | None = None
    """Of the pool of pages; None: as much as there is room for."""
    host_bytes: int = 0
    disk_bytes: int = 0
    caching: bool = True
    """False: nothing is ever shared, and there are no tiers below the device."""
    eviction_policy: str = "lru"
    host_eviction_policy: str | None = None
    disk_eviction_policy: str | None = None
    write_policy: str = "write_through"
    prefetch_policy: str = "timeout=300ms"
    prefetch_max_wait: float = 10.0
    prefetch_on_arrival: bool = True
    schedule_policy: str = "fcfs"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    shared_step_tokens: int | None = None
    """See `engine.plan.Limits`."""
    prices: Prices = field(default_factory=Prices)
    measured: StepCost | None = None
    """Seconds of a step as they were measured, in place of the device's roofline."""

    @property
    def work(self) -> ModelWork:
        return ModelWork.of(self.model, self.device.weight_bytes, self.device.kv_itemsize)

    @property
    def cost(self) -> StepCost:
        return self.measured or Roofline(self.work, self.device, self.devices)

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.work.kv_bytes

    @property
    def record_bytes(self) -> int:
        """Of a page on the disk."""
        return self.page_bytes + RECORD_OVERHEAD

    @property
    def write_bytes(self) -> int:
        """Bytes that may be on their way to the disk: the engine's bound, or some pages where these are large."""
        return max(WRITE_BYTES, WRITE_PAGES * self.record_bytes)

    def check(self) -> None:
        """Raises ValueError for a policy that there is not, `LabError` where the sizes do not fit."""
        for name in (self.eviction_policy, self.host_eviction_policy, self.disk_eviction_policy):
            if name is not None:
                load_policy(name)
        PrefetchPolicy.parse(self.prefetch_policy)
        for name, known in ((self.write_policy, WRITE_POLICIES), (self.schedule_policy, SCHEDULE_POLICIES)):
            if name not in known:
                raise ValueError(f"no policy {name!r}: choose one of {', '.join(known)}")
        self.device_pages()

    def device_pages(self) -> int:
        """Raises `LabError`, with the numbers, where the model leaves no room for a page."""
        memory = self.device.memory_bytes * self.devices
        weights = self.model.num_parameters() * self.device.weight_bytes
        wanted = self.device_bytes
        if wanted is None:
            wanted = int((memory - weights) * POOL_SHARE)
        elif wanted + weights > memory:
            raise LabError(
                f"{wanted / 1e9:.1f} GB of device cache beside {weights / 1e9:.1f} GB of weights are more than the "
                f"{memory / 1e9:.0f} GB of {self.devices} x {self.device.name}"
            )
        if wanted < self.page_bytes:
            raise LabError(
                f"{self.devices} x {self.device.name} ({memory / 1e9:.0f} GB) has no room for a page beside "
                f"{weights / 1e9:.1f} GB of weights; give more --devices"
            )
        return wanted // self.page_bytes

    def host_pages(self) -> int:
        if not self.caching:
            return 0
        pages = self.host_bytes // self.page_bytes
        if self.disk_bytes and pages < 2:
            return max(STAGING_BYTES // self.page_bytes, 2)
        return pages
