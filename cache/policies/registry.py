"""What an eviction policy is, and where a name on the command line finds one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from ..radix_tree import Node
from .lru import LRU


@runtime_checkable
class EvictionPolicy(Protocol):
    """Chooses among unlocked leaves; it never takes part in hit, insert or evict.

    It keeps what it must remember in `node.rank` (an immutable value; None on a node never touched), which
    both halves of a split node inherit. `node.pages` and `node.end` tell the node's size and depth in pages.
    """

    def touch(self, node: Node, tick: int) -> None:
        """A request that used all of `node`'s pages has ended; `tick` is the same along its path and only grows."""
        ...

    def priority(self, node: Node) -> Any:
        """Least goes first (any values that compare with each other). Asked when `node` becomes evictable."""
        ...


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU}


def load_policy(name: str) -> EvictionPolicy:
    """A policy by its registered name, or a user's own as `module:Class` or `path/to/file.py:Class`.

    A module is imported as usual, or else read from the working directory.
    Raises ValueError with what is wrong with the name.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module_name, colon, class_name = name.rpartition(":")
    if not colon:
        known = ", ".join(sorted(POLICIES))
        raise ValueError(f"unknown eviction policy {name!r}: choose one of {known}, or give module:Class")
    factory = getattr(_load_module(module_name), class_name, None)
    if not callable(factory):
        raise ValueError(f"eviction policy {name!r}: {module_name} has no class {class_name!r}")
    try:
        policy = factory()
    except TypeError as error:
        raise ValueError(f"eviction policy {name!r} cannot be made without arguments: {error}") from error
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(f"eviction policy {name!r} lacks the methods touch(node, tick) and priority(node)")
    return policy


def _load_module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _load_file(Path(name))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only when the named module itself is absent: a missing import inside it is the user's to see.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name!r} is not the name of a module") from error
    return _load_file(Path(*name.split(".")).with_suffix(".py"))


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no module or file {str(path)!r} for the eviction policy")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
