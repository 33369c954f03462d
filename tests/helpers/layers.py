"""Reads who imports whom out of the sources, and judges it by the rules of docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

FOLDERS = ("engine", "models", "pallas_kernels", "cache", "serving", "bench", "lang", "lab", "integrations")
JAX = frozenset({"jax", "jaxlib", "flax", "optax", "orbax", "chex"})
PURE_ENGINE = tuple(
    f"engine.{name}"
    for name in (
        *(
            "request",
            "constraint",
            "json_schema",
            "plan",
            "prefetch",
            "loads",
            "disk_search",
            "router",
            "prefetch_policy",
            "reading",
            "tier_transfers",
            "schedule*",
            "scheduler",
            "loop",
            "stats",
            "config",
            "version",
        ),
        *("validate", "text", "tokenizer*", "chat_template", "template_sandbox"),
    )
)


@dataclass(frozen=True)
class Rule:
    """What the modules that match `module` may import. The first matching rule counts.

    `inside` lists module patterns of this package. `outside` lists the only third-party packages allowed, None
    allowing any but `never`.
    """

    module: str
    inside: tuple[str, ...]
    outside: frozenset[str] | None = None
    never: frozenset[str] = frozenset()


def _under(*packages: str) -> tuple[str, ...]:
    return tuple(pattern for package in packages for pattern in (package, f"{package}.*"))


PURE_CACHE = Rule("cache*", _under("cache"), frozenset({"numpy", "tensorstore", "xxhash"}))
RULES = (
    Rule("pallas_kernels*", _under("pallas_kernels"), frozenset({"jax", "numpy"})),
    Rule("cache.*device_pool", _under("cache", "pallas_kernels"), frozenset({"numpy", "tensorstore", "jax"})),
    PURE_CACHE,
    Rule("models.config", (), frozenset()),
    Rule("models*", _under("models", "pallas_kernels")),
    *(Rule(name, (*_under("cache"), "models.config", *PURE_ENGINE), never=JAX) for name in PURE_ENGINE),
    Rule("engine*", _under("engine", "cache", "models", "pallas_kernels")),
    Rule("serving*", ("", *_under("serving", "engine")), never=JAX),
    # Other people's frameworks around the public names and the server's parts.
    Rule("integrations.ray_data", ("engine.llm", "engine.request"), never=JAX),
    Rule("integrations*", ("engine.config", *_under("integrations", "serving")), never=JAX),
    # A client program: the engine of its own process is loaded only when a program asks for one.
    Rule("lang.local", ("", *_under("lang", "engine")), never=JAX),
    Rule("lang*", _under("lang"), never=JAX),
    # The lab drives the code that serves, with a simulated clock and device.
    Rule("lab*", (*_under("lab", "cache"), "models.config", *PURE_ENGINE), never=JAX),
    # A benchmark of one part drives that part; the others measure what a user sees: the public names, which type
    # checkers find in their homes only (a folder's parent is not the package on disk).
    Rule("bench.radix", ("", *_under("bench", "cache"))),
    Rule("bench.kernels", ("", *_under("bench", "pallas_kernels"))),
    Rule("bench.copies", ("", *_under("bench", "cache"), "pallas_kernels.pages")),
    Rule("bench.bare_step", ("", *_under("bench", "engine", "cache"))),
    Rule("bench.perplexity", ("", *_under("bench", "engine", "models", "pallas_kernels"))),
    Rule("bench.cache_engine", ("", *_under("bench", "engine"), "cache.radix_tree")),
    # Conversations as the lab draws them.
    Rule("bench.talks", (*_under("bench", "lab"),)),
    # The real engine on the lab's traces.
    Rule("bench.replay", ("", "engine.request", *_under("bench", "lab"))),
    Rule("bench.schema_trial", ("", *_under("bench"), "engine.constraint")),
    Rule("bench.structured", ("", *_under("bench"), "engine.llm", "engine.request", "engine.constraint")),
    Rule("bench.peers*", ("", *_under("bench"), "models.source")),
    Rule(
        "bench*",
        (
            "",
            "engine.llm",
            "engine.request",
            "engine.config",
            "engine.version",
            "lab.prices",
            *_under("bench", "serving"),
        ),
    ),
    Rule("cli*", ("*",)),
    Rule("launch_server", _under("cli")),
    Rule("__main__", _under("cli")),
    Rule("", ("*",)),
)
NEVER_JAX = (
    *PURE_ENGINE,
    "models.config",
    "serving.config",
    "cache",
    "cache.*",
    "lang",
    "lang.*",
    "lab",
    "lab.*",
    "integrations",
    "integrations.prefix_order",
)
"""These stay free of jax through everything they import."""
HOLDS_JAX = ("cache.device_pool", "cache.split_device_pool", "lang.local")
"""Of these, the ones that are there to load it."""
LAZY = ("", "cli", "cli.*")
"""These load the rest of the package inside functions only, pure settings excepted."""
LAZY_MAY_LOAD = ("cli", "cli.*", "", "engine.config", "engine.version", "serving.config")


@dataclass(frozen=True)
class Import:
    """One import statement: `target` is a module of this package ("" = its root) or a third-party top name."""

    module: str
    line: int
    target: str
    inside: bool
    deferred: bool
    """Within a function, or for type checkers only."""
    absolute: bool = False
    """Names this package (or one of its folders) other than relatively."""


def read_sources(root: Path) -> dict[str, str]:
    """Module name below `tierax` ("" is its `__init__`, `cache` a sub-package's) -> source."""
    package = root / "src" / "tierax"
    files = [(path, path.relative_to(root)) for name in FOLDERS for path in (root / name).rglob("*.py")]
    files += [
        (path, path.relative_to(package))
        for path in [*package.glob("*.py"), *(package / "cli").rglob("*.py")]
    ]
    sources = {}
    for path, relative in files:
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def imports(sources: Mapping[str, str]) -> Iterator[Import]:
    """Every import of every module, those inside functions and for type checkers included."""
    packages = {name.rpartition(".")[0] for name in sources if name} | {""}
    for module, text in sources.items():
        package = module if module in packages else module.rpartition(".")[0]
        for node, deferred in _walk(ast.parse(text), deferred=False):
            for name, level, asked in _names(node):
                line = getattr(node, "lineno", 0)
                if level:
                    base = ["tierax", *filter(None, package.split("."))][: -level + 1 or None]
                    full = ".".join([*base, *filter(None, [name])]).removeprefix("tierax").lstrip(".")
                    for item in asked or ("",):
                        deeper = ".".join(filter(None, [full, item]))
                        yield Import(module, line, deeper if deeper in sources else full, True, deferred)
                elif name.split(".")[0] in ("tierax", *FOLDERS):
                    target = name.removeprefix("tierax").lstrip(".")
                    yield Import(module, line, target, True, deferred, absolute=True)
                else:
                    yield Import(module, line, name.split(".")[0], False, deferred)


def _walk(node: ast.AST, deferred: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, deferred
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _walk(child, deferred or function or typing)


def _names(node: ast.AST) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """(module, relative level, names asked of it) of an import statement or a call with a constant module name."""
    match node:
        case ast.Import(names=aliases):
            for alias in aliases:
                yield alias.name, 0, ()
        case ast.ImportFrom(module=name, level=level, names=aliases):
            yield name or "", level, tuple(alias.name for alias in aliases)
        case ast.Call(
            func=ast.Name(id="__import__")
            | ast.Name(id="import_module")
            | ast.Attribute(attr="import_module")
        ):
            match node.args[:1]:
                case [ast.Constant(value=str(name))] if name:
                    yield name.lstrip("."), len(name) - len(name.lstrip(".")), ()


def violations(sources: Mapping[str, str], standard_library: frozenset[str]) -> list[str]:
    """One line per broken rule, empty when all is well."""
    found = []
    edges: dict[str, set[str]] = {}
    for entry in imports(sources):
        where = f"{entry.module or '__init__'}:{entry.line}"
        rule = next((rule for rule in RULES if fnmatchcase(entry.module, rule.module)), None)
        if rule is None:
            found.append(f"{where}: no rule covers this module")
        elif entry.absolute:
            found.append(
                f"{where}: imports {entry.target or 'tierax'} by an absolute name; use a relative import"
            )
        elif entry.inside:
            if not _matches(entry.target, rule.inside):
                found.append(f"{where}: must not import {entry.target or 'the package root'}")
            if (
                _matches(entry.module, LAZY)
                and not entry.deferred
                and not _matches(entry.target, LAZY_MAY_LOAD)
            ):
                found.append(f"{where}: must import {entry.target} inside a function")
        elif entry.target not in standard_library:
            if entry.target in rule.never or (rule.outside is not None and entry.target not in rule.outside):
                found.append(f"{where}: must not import {entry.target}")
            if entry.target in ("torch", "transformers") and not entry.module.startswith("bench"):
                found.append(f"{where}: {entry.target} is a peer to measure against, not a dependency")
        # What a call loads later would still be loaded; only the exempt modules may defer it.
        if not (_matches(entry.module, LAZY) and entry.deferred):
            edges.setdefault(entry.module, set()).add(entry.target)
    for module in sources:
        if _matches(module, NEVER_JAX) and module not in HOLDS_JAX and (path := _path_to_jax(module, edges)):
            found.append(f"{module}: reaches jax through {' -> '.join(path)}")
    return found


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _path_to_jax(module: str, edges: Mapping[str, set[str]]) -> list[str] | None:
    queue, seen = [[module]], {module}
    while queue:
        path = queue.pop(0)
        for target in sorted(edges.get(path[-1], ())):
            if target in JAX:
                return [*path, target]
            if target not in seen:
                seen.add(target)
                queue.append([*path, target])
    return None
