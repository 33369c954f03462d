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
    from .lang.backend import set_default_backend as set_default_backend
    from .lang.errors import BudgetError as BudgetError
    from .lang.errors import ProgramError as ProgramError
    from .lang.function import Function as Function
    from .lang.function import function as function
    from .lang.local import Engine as Engine
    from .lang.runtime import Runtime as Runtime
    from .lang.state import ProgramState as ProgramState
    from .lang.words import assistant as assistant
    from .lang.words import assistant_begin as assistant_begin
    from .lang.words import assistant_end as assistant_end
    from .lang.words import gen as gen
    from .lang.words import gen_int as gen_int
    from .lang.words import gen_string as gen_string
    from .lang.words import select as select
    from .lang.words import system as system
    from .lang.words import system_begin as system_begin
    from .lang.words import system_end as system_end
    from .lang.words import user as user
    from .lang.words import user_begin as user_begin
    from .lang.words import user_end as user_end

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
    "Engine": "lang.local",
    "Runtime": "lang.runtime",
    "Function": "lang.function",
    "ProgramState": "lang.state",
    "ProgramError": "lang.errors",
    "BudgetError": "lang.errors",
    "function": "lang.function",
    "set_default_backend": "lang.backend",
    "assistant": "lang.words",
    "assistant_begin": "lang.words",
    "assistant_end": "lang.words",
    "gen": "lang.words",
    "gen_int": "lang.words",
    "gen_string": "lang.words",
    "select": "lang.words",
    "system": "lang.words",
    "system_begin": "lang.words",
    "system_end": "lang.words",
    "user": "lang.words",
    "user_begin": "lang.words",
    "user_end": "lang.words",
}
"""Public name -> the module that defines it."""

__all__ = [
    "LLM",
    "BudgetError",
    "Choice",
    "ConfigError",
    "Constraint",
    "ConstraintError",
    "Engine",
    "EngineConfig",
    "Function",
    "Output",
    "ProgramError",
    "ProgramState",
    "Runtime",
    "SamplingParams",
    "TokenLogprob",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
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
