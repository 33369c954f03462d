"""What a run would have cost at rented prices, in parts, and the formula behind it."""

from __future__ import annotations

from dataclasses import dataclass

HOURS_PER_MONTH = 730
GB = 1e9


@dataclass(frozen=True, slots=True)
class Bill:
    """US dollars for a million prompt and output tokens, by what they are paid for."""

    accelerator: float
    dram: float
    ssd: float
    io: float

    @property
    def total(self) -> float:
        return self.accelerator + self.dram + self.ssd + self.io


@dataclass(frozen=True, slots=True)
class Prices:
    """In US dollars: one accelerator by the hour, memory and disk by GB (10^9 bytes) and month, requests to a remote
    store by the million."""

    accelerator_hour: float = 2.5
    dram_gb_month: float = 0.05
    ssd_gb_month: float = 0.01
    million_ios: float = 0.0
    """A local disk charges nothing for them."""

    def bill(
        self,
        *,
        seconds: float,
        tokens: int,
        dram_bytes: int,
        ssd_bytes: int,
        accelerators: int = 1,
        ios: int = 0,
    ) -> Bill:
        """For `tokens` prompt and output tokens served in `seconds` by so many accelerators beside that much storage."""
        per_hour = seconds / 3600 / tokens * 1e6
        return Bill(
            accelerator=self.accelerator_hour * accelerators * per_hour,
            dram=dram_bytes / GB * self.dram_gb_month / HOURS_PER_MONTH * per_hour,
            ssd=ssd_bytes / GB * self.ssd_gb_month / HOURS_PER_MONTH * per_hour,
            io=self.million_ios * ios / tokens,
        )

    def per_million_tokens(self, *, seconds: float, tokens: int, dram_bytes: int, ssd_bytes: int) -> float:
        """The sum of a `bill` for one accelerator."""
        return self.bill(seconds=seconds, tokens=tokens, dram_bytes=dram_bytes, ssd_bytes=ssd_bytes).total

    @property
    def formula(self) -> str:
        """For people."""
        return (
            f"$/M tokens = (${self.accelerator_hour:g}/h + (${self.dram_gb_month:g} x GB of host pool"
            f" + ${self.ssd_gb_month:g} x GB on disk) / {HOURS_PER_MONTH} h) x hours / million prompt and output tokens"
        )
