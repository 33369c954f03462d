"""What a run would have cost at rented prices, and the formula behind it."""

from __future__ import annotations

from dataclasses import dataclass

HOURS_PER_MONTH = 730
GB = 1e9


@dataclass(frozen=True, slots=True)
class Prices:
    """In US dollars: one accelerator by the hour, memory and disk by GB (10^9 bytes) and month."""

    accelerator_hour: float = 2.5
    dram_gb_month: float = 0.05
    ssd_gb_month: float = 0.01

    def per_million_tokens(self, *, seconds: float, tokens: int, dram_bytes: int, ssd_bytes: int) -> float:
        """For `tokens` prompt and output tokens served in `seconds` by one accelerator beside that much storage."""
        storage = dram_bytes / GB * self.dram_gb_month + ssd_bytes / GB * self.ssd_gb_month
        hourly = self.accelerator_hour + storage / HOURS_PER_MONTH
        return hourly * seconds / 3600 / tokens * 1e6

    @property
    def formula(self) -> str:
        """For people."""
        return (
            f"$/M tokens = (${self.accelerator_hour:g}/h + (${self.dram_gb_month:g} x GB of host pool"
            f" + ${self.ssd_gb_month:g} x GB on disk) / {HOURS_PER_MONTH} h) x hours / million prompt and output tokens"
        )
