"""Counts compilations, and keeps compiled programs on disk."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
from jax import monitoring

from .stats import EngineStats

_MADE = "/jax/core/compile/backend_compile_duration"
_LOADED = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Keeps `stats.compiles` and `stats.loaded_programs` of this process, from when it is made.

    jax reports every program that it makes, and before that whether the compile cache had it, through process-wide
    listeners; `close` takes ours away again.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._made = 0
        self._loaded = 0
        self._kept = 0
        # Copies of a model compile at the same time, each in its own thread.
        self._lock = threading.Lock()
        monitoring.register_event_duration_secs_listener(self._on_duration)
        monitoring.register_event_listener(self._on_event)

    def close(self) -> None:
        monitoring.unregister_event_duration_listener(self._on_duration)
        monitoring.unregister_event_listener(self._on_event)

    def on_load(self) -> None:
        """A program was loaded that jax was not asked for (`programs.ProgramStore`)."""
        with self._lock:
            self._kept += 1
            self._stats.loaded_programs = self._loaded + self._kept

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _LOADED:
            with self._lock:
                self._loaded += 1

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _MADE:
            with self._lock:
                self._made += 1
                self._stats.loaded_programs = self._loaded + self._kept
                self._stats.compiles = self._made - self._loaded


def use_compile_cache(directory: Path) -> None:
    """Makes jax keep every compiled program below `directory`, however small and quickly compiled."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
