"""Where a name on the command line finds its eviction policy; a policy of one's own imports its base from here."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from .adaptive import Adaptive
from .fifo import FIFO
from .greedy_dual import GDSF, LFU
from .hazard import Hazard
from .lru import LRU
from .policy import Evictable, EvictionPolicy, Use
from .s3fifo import S3FIFO
from .slru import SLRU
from .ttl import TTL

__all__ = ["POLICIES", "Evictable", "EvictionPolicy", "Use", "load_policy"]

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "gdsf": GDSF,
    "ttl": TTL,
    "adaptive": Adaptive,
    "hazard": Hazard,
}


def load_policy(name: str) -> EvictionPolicy:
    """A new policy by its registered name (`lru`), name and option (`ttl=1h`), or a user's own class as
    `module:Class` or `path/to/file.py:Class`.

    A module is imported as usual, or else read from the working directory.
    Raises ValueError with what is wrong with the name.
    """
    registered, equals, option = name.partition("=")
    if registered in POLICIES:
        try:
            return POLICIES[registered].from_option(option if equals else None)
        except ValueError as error:
            raise ValueError(f"eviction policy {name!r}: {error}") from error
    module_name, colon, class_name = name.rpartition(":")
    if not colon:
        known = ", ".join(sorted(POLICIES))
        raise ValueError(f"unknown eviction policy {name!r}: choose one of {known}, or give module:Class")
    return _own_policy(name, getattr(_load_module(module_name), class_name, None), module_name, class_name)


def _own_policy(name: str, found: object, module_name: str, class_name: str) -> EvictionPolicy:
    if not isinstance(found, type):
        raise ValueError(f"eviction policy {name!r}: {module_name} has no class {class_name!r}")
    if not issubclass(found, EvictionPolicy):
        base = f"{__name__}.{EvictionPolicy.__name__}"
        raise ValueError(f"eviction policy {name!r}: {class_name} is no subclass of {base}")
    try:
        return found()
    except TypeError as error:
        raise ValueError(f"eviction policy {name!r} cannot be made without arguments: {error}") from error


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
