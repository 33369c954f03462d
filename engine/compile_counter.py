"""Counts compilations, and keeps compiled programs on disk."""

from __future__ import annotations

from pathlib import Path

import jax
from jax import monitoring

from .stats import EngineStats

_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Keeps `stats.compiles`: programs that XLA had to compile or load, in this process, since it was made.

    jax reports through process-wide listeners; `close` takes ours away again.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        monitoring.register_event_duration_secs_listener(self._on_duration)

    def close(self) -> None:
        monitoring.unregister_event_duration_listener(self._on_duration)

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self._stats.compiles += 1


def use_compile_cache(directory: Path) -> None:
    """Makes jax keep every compiled program below `directory`, however small and quickly compiled."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
