"""The public names: lazy, complete, and the same objects as in the modules that define them."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tierax

SRC = Path(__file__).resolve().parents[1] / "src"
NAMES = {
    "LLM": "engine.llm",
    "Output": "engine.offline",
    "Choice": "engine.offline",
    "SamplingParams": "engine.request",
    "TokenLogprob": "engine.request",
    "Constraint": "engine.constraint",
    "ConstraintError": "engine.constraint",
    "EngineConfig": "engine.config",
    "ConfigError": "engine.config",
    "Engine": "lang.local",
    "Runtime": "lang.runtime",
    "Function": "lang.function",
    "ProgramState": "lang.state",
    "ProgramError": "lang.errors",
    "BudgetError": "lang.errors",
    "function": "lang.function",
    "set_default_backend": "lang.backend",
    **dict.fromkeys(
        (
            *("gen", "gen_int", "gen_string", "select", "system", "user", "assistant"),
            *("system_begin", "system_end", "user_begin", "user_end", "assistant_begin", "assistant_end"),
        ),
        "lang.words",
    ),
}
"""Classes and functions; `__version__` comes beside them."""


def test_exported_names() -> None:
    assert sorted(tierax.__all__) == sorted([*NAMES, "__version__"])
    assert set(NAMES) <= set(dir(tierax))


@pytest.mark.parametrize(("name", "home"), NAMES.items())
def test_name_is_the_one_of_its_module(name: str, home: str) -> None:
    value = getattr(tierax, name)
    assert value is getattr(importlib.import_module(f"tierax.{home}"), name)
    assert value.__module__ == f"tierax.{home}"
    assert value.__doc__


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((SRC / "tierax" / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {**NAMES, "__version__": "engine.version"}
    assert (SRC / "tierax" / "py.typed").is_file()


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'tierax' has no attribute 'Llm'"):
        _ = tierax.Llm  # pyright: ignore[reportAttributeAccessIssue]


def test_import_is_lazy() -> None:
    code = (
        "import sys; before = set(sys.modules); import tierax; new = set(sys.modules) - before;"
        "assert not {m for m in new if m.startswith('tierax.')}, new;"
        "from tierax import SamplingParams, EngineConfig, Engine, Runtime, function, gen, user, set_default_backend;"
        "assert not {'jax', 'numpy', 'aiohttp', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, check=True)
