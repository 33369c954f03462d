"""What enters and leaves the cache of an engine, for those outside of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cache.page_events import DISK, Cleared, PageEvent, PageLog, Removed, Stored, Taken
from ..cache.radix_tree import DEVICE, HOST

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["TIER_NAMES", "Cleared", "PageEvent", "PageLog", "Removed", "Stored", "Taken", "listen"]

TIER_NAMES = {DEVICE: "device", HOST: "host", DISK: "disk"}


def listen(engine: Engine, log: PageLog) -> None:
    """Lets `log` hear of every page from now on, and first of all that there are; again, to mend what it has lost.

    To be called in the engine's thread.
    """
    index = engine.tiers.index if engine.tiers is not None else None
    engine.cache.tiers.listen(log)
    if index is not None:
        index.listener = log
    log.tell_all(engine.cache.tiers, index)
