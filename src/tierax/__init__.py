"""tierax: LLM inference in JAX around a tiered KV cache. Public names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.config import ConfigError as ConfigError
    from .engine.config import EngineConfig as EngineConfig
    from .engine.constraint import Constraint as Constraint
    from .engine.constraint import ConstraintError as ConstraintError
    from .engine.llm import LLM as LLM
    from .engine.offline import Choice as Choice
    from .engine.offline import Output as Output
    from .engine.request import SamplingParams as SamplingParams
    from .engine.request import TokenLogprob as TokenLogprob
    from .engine.version import __version__ as __version__

_HOMES = {
    "LLM": "engine.llm",
    "Output": "engine.offline",
    "Choice": "engine.offline",
    "SamplingParams": "engine.request",
    "TokenLogprob": "engine.request",
    "Constraint": "engine.constraint",
    "ConstraintError": "engine.constraint",
    "EngineConfig": "engine.config",
    "ConfigError": "engine.config",
    "__version__": "engine.version",
}
"""Public name -> the module that defines it."""

__all__ = [
    "LLM",
    "Choice",
    "ConfigError",
    "Constraint",
    "ConstraintError",
    "EngineConfig",
    "Output",
    "SamplingParams",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'tierax' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
