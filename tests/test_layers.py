"""Who may import whom: the rules of docs/architecture.md, held against the sources and against a running interpreter."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.layers import FOLDERS, NEVER_JAX, read_sources, violations

ROOT = Path(__file__).resolve().parents[1]
LINKS = ROOT / "src" / "tierax"
STDLIB = frozenset(sys.stdlib_module_names)


def test_sources_keep_the_rules() -> None:
    assert violations(read_sources(ROOT), STDLIB) == []


def test_every_folder_is_read() -> None:
    sources = read_sources(ROOT)
    assert {"", "__main__", "launch_server", "cli.main", *FOLDERS} <= set(sources)
    assert len(sources) > 20


CLEAN: dict[str, str] = dict.fromkeys(
    ("", *FOLDERS, "models.config", "cache.radix", "engine.request", "engine.loop", "engine.step"), ""
)
BAD = [
    ("cache.radix", "import jax", "cache.radix:1: must not import jax"),
    ("cache.radix", "import jax.numpy as jnp", "must not import jax"),
    ("cache.radix", "from ..engine import request", "must not import engine.request"),
    ("cache.radix", "from ..engine.request import Request", "must not import engine.request"),
    ("cache.radix", "def f():\n    from jax import numpy", "cache.radix:2: must not import jax"),
    ("cache.radix", "import importlib\nimportlib.import_module('jax')", "must not import jax"),
    ("cache.radix", "import msgspec", "must not import msgspec"),
    ("models.config", "import numpy", "must not import numpy"),
    ("models", "from ..cache.radix import Tree", "must not import cache.radix"),
    ("pallas_kernels", "from ..models.config import ModelConfig", "must not import models.config"),
    ("pallas_kernels", "import flax", "must not import flax"),
    ("engine.loop", "from jax import jit", "must not import jax"),
    ("engine.loop", "from . import step", "must not import engine.step"),
    ("engine.loop", "from .. import models", "must not import models"),
    ("engine.loop", "def f():\n    from .step import run", "must not import engine.step"),
    ("engine.step", "from ..serving import app", "must not import serving"),
    ("engine.step", "import torch", "torch is a peer"),
    ("serving", "from ..cache.radix import Tree", "must not import cache.radix"),
    ("serving", "import jax", "must not import jax"),
    ("bench", "from ..engine.step import run", "must not import engine.step"),
    ("engine.step", "from tierax.cache import radix", "by an absolute name"),
    ("engine.step", "import cache.radix", "by an absolute name"),
    ("cli.main", "from ..engine.step import run", "must import engine.step inside a function"),
    ("", "from .engine.step import run", "must import engine.step inside a function"),
    ("lonely", "import os", "no rule covers this module"),
]


@pytest.mark.parametrize(("module", "source", "complaint"), BAD)
def test_checker_finds(module: str, source: str, complaint: str) -> None:
    assert violations(CLEAN, STDLIB) == []
    found = violations({**CLEAN, module: source}, STDLIB)
    assert any(complaint in line for line in found), found


def test_checker_follows_chains_to_jax() -> None:
    sources = {**CLEAN, "cache.device_pool": "import jax", "engine.loop": "from ..cache.radix import Tree"}
    assert violations(sources, STDLIB) == []
    found = violations({**sources, "cache.radix": "from .device_pool import Pool"}, STDLIB)
    assert "engine.loop: reaches jax through engine.loop -> cache.radix -> cache.device_pool -> jax" in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.loop", "import time\nfrom .request import Request\nfrom ..cache.radix import Tree"),
        ("engine.step", "import jax\nfrom ..models.config import ModelConfig"),
        ("cli.main", "def f():\n    from ..engine.step import run"),
        ("", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .engine.step import run"),
        ("bench", "import torch\nfrom .. import LLM\nfrom ..serving import app"),
    ],
)
def test_checker_accepts(module: str, source: str) -> None:
    assert violations({**CLEAN, module: source}, STDLIB) == []


def _modules_loaded_by(*names: str) -> set[str]:
    code = f"import sys, json, importlib\nfor n in {names!r}: importlib.import_module(n)\nprint(json.dumps(list(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT / "src", capture_output=True, check=True
    )
    return set(json.loads(done.stdout))


def test_pure_modules_load_no_jax_and_no_bare_names() -> None:
    from fnmatch import fnmatchcase

    pure = [
        f"tierax.{name}"
        for name in read_sources(ROOT)
        if not name.endswith("device_pool") and any(fnmatchcase(name, pattern) for pattern in NEVER_JAX)
    ]
    assert {"tierax.cache", "tierax.engine.request", "tierax.models.config"} <= set(pure)
    loaded = _modules_loaded_by("tierax", "tierax.cli.main", "tierax.cli.serve", "tierax.cli.generate", *pure)
    assert "tierax.cache.manager" in loaded
    assert not loaded & {"jax", "jaxlib", "flax", "torch", "transformers", *FOLDERS}


def test_help_loads_next_to_nothing() -> None:
    loaded = _modules_loaded_by("tierax", "tierax.cli.main")
    assert not loaded & {"jax", "numpy", "aiohttp", "tierax.engine.config", "argparse"}


def test_tests_use_full_names() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not [name for name in names if name.split(".")[0] in FOLDERS], (
                f"{path}: import tierax.… instead"
            )


def test_links_and_tool_settings_agree() -> None:
    links = {path.name: os.readlink(path) for path in LINKS.iterdir() if path.is_symlink()}
    assert links == {name: f"../../{name}" for name in FOLDERS}
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    linked = {f"src/tierax/{name}" for name in FOLDERS}
    assert linked <= set(tools["basedpyright"]["exclude"])
    assert linked <= set(tools["ruff"]["extend-exclude"])
    assert set(FOLDERS) <= set(tools["basedpyright"]["include"])


def test_subpackage_inits_are_empty() -> None:
    inits = [path for name in FOLDERS for path in (ROOT / name).rglob("__init__.py")] + [
        LINKS / "cli" / "__init__.py"
    ]
    assert [str(path) for path in inits if path.read_text(encoding="utf-8").strip()] == []
