"""Many runs of one trace, described by a TOML file, in processes beside each other.

A sweep is block-level replays (`policies` x `capacity_blocks`, and the optimum), or with a `[simulate]` table runs through
the whole engine in simulated time, over write and prefetch policies too. Order and figures do not depend on how many
processes there are.
"""

from __future__ import annotations

import multiprocessing
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..cache.policies.registry import load_policy
from .errors import LabError
from .oracle import belady, infinite
from .presets import device_of, model_of
from .replay import Hits, replay
from .setup import Setup
from .simulate import simulate
from .traces.read import Options, load_trace
from .traces.trace import Trace

BELADY, INFINITE = "belady", "infinite"
LEAST_WAY = 1e-4
"""Below so small a gap in hit rates its shares mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The `[simulate]` table: one machine, and what varies on it. The device cache holds `capacity_blocks`."""

    model: str = "qwen3-8b"
    device: str = "a100-80g"
    devices: int = 1
    host_times: float = 4.0
    """Host cache as a multiple of the device cache."""
    disk_times: float = 0.0
    write_policies: tuple[str, ...] = ("write_through",)
    prefetch_policies: tuple[str, ...] = ("timeout=300ms",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a TOML file describes. `trace` is relative to that file."""

    trace: str
    capacity_blocks: tuple[int, ...]
    policies: tuple[str, ...]
    """Eviction policies as on the command line."""
    format: str | None = None
    max_requests: int | None = None
    session_rate: float = 0.05
    max_sessions: int | None = None
    seed: int = 0
    optimum: bool = True
    """Whether Belady's choice is computed too: a long trace of long prompts takes many GB for it."""
    simulate: Simulated | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One cell of a sweep."""

    policy: str
    capacity_blocks: int | None
    write_policy: str | None = None
    prefetch_policy: str | None = None


def read_sweep(path: Path) -> Sweep:
    """Raises `LabError`, one line, for a file that describes no sweep."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LabError(f"sweep {path}: {error}") from error
    simulated = found.pop("simulate", None)
    try:
        table = None if simulated is None else _filled(Simulated, simulated, "simulate.")
        sweep = _filled(Sweep, found | {"simulate": table}, "")
        _check(sweep)
    except (ValueError, LabError) as error:
        raise LabError(f"sweep {path}: {error}") from error
    trace = Path(sweep.trace)
    return sweep if trace.is_absolute() else replace(sweep, trace=str(path.parent / trace))


def runs(sweep: Sweep) -> list[Run]:
    """All cells, in the order of the report."""
    if sweep.simulate is None:
        cells = [Run(INFINITE, None)]
        policies = (*sweep.policies, BELADY) if sweep.optimum else sweep.policies
        cells += [Run(policy, capacity) for capacity, policy in product(sweep.capacity_blocks, policies)]
        return cells
    table = sweep.simulate
    axes = product(sweep.capacity_blocks, table.write_policies, table.prefetch_policies, sweep.policies)
    return [Run(policy, capacity, write, prefetch) for capacity, write, prefetch, policy in axes]


def run_sweep(sweep: Sweep, processes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row by row as they are done, each with its place in `runs`. Whoever closes the iterator ends the processes."""
    cells = runs(sweep)
    if processes == 1:
        trace = _trace(sweep)
        for place, cell in enumerate(cells):
            yield place, _row(sweep, trace, cell)
        return
    # Fresh interpreters: the parent may have threads, and a fork of those is not safe.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(cells)), mp_context=context) as pool:
        waiting = {pool.submit(_in_process, sweep, cell): place for place, cell in enumerate(cells)}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def compared(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each beside LRU's in the same place: `hits_over_lru` (of all prompt tokens), `ttft_over_lru` (of LRU's mean),
    and `gap_closed`, the share of the way from LRU to Belady; None where there is no way, absent where there is no LRU.
    """
    rows = list(rows)
    by_cell = {(row["policy"], *_place(row)): row for row in rows}
    for row in rows:
        lru, best = (by_cell.get((name, *_place(row))) for name in ("lru", BELADY))
        if lru is None:
            continue
        row["hits_over_lru"] = _hit_rate(row) - _hit_rate(lru)
        if lru.get("ttft_ms_mean"):
            row["ttft_over_lru"] = row["ttft_ms_mean"] / lru["ttft_ms_mean"] - 1
        if best is not None:
            way = _hit_rate(best) - _hit_rate(lru)
            row["gap_closed"] = row["hits_over_lru"] / way if way > LEAST_WAY else None
    return rows


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """What but for the policy tells a row from others."""
    return row["capacity_blocks"], row.get("write_policy"), row.get("prefetch_policy")


def _hit_rate(row: dict[str, Any]) -> float:
    return row["token_hit_rate"] if "token_hit_rate" in row else row["hit_rate"]


def _in_process(sweep: Sweep, cell: Run) -> dict[str, Any]:
    return _row(sweep, _trace(sweep), cell)


def _trace(sweep: Sweep) -> Trace:
    options = Options(sweep.seed, sweep.session_rate, sweep.max_sessions)
    trace = load_trace(sweep.trace, sweep.format, options)
    return trace if sweep.max_requests is None else trace.head(sweep.max_requests)


def _row(sweep: Sweep, trace: Trace, cell: Run) -> dict[str, Any]:
    row: dict[str, Any] = {
        "trace": trace.name,
        "policy": cell.policy,
        "capacity_blocks": cell.capacity_blocks,
    }
    if cell.write_policy is not None:
        named = {"write_policy": cell.write_policy, "prefetch_policy": cell.prefetch_policy}
        return row | named | simulate(trace, _setup(sweep, trace, cell)).as_json()
    hits = _hits(trace, cell)
    return row | {"token_hit_rate": hits.token_hit_rate, "evicted_blocks": hits.evicted_blocks}


def _hits(trace: Trace, cell: Run) -> Hits:
    if cell.capacity_blocks is None:
        return infinite(trace)
    if cell.policy == BELADY:
        return belady(trace, [cell.capacity_blocks])[cell.capacity_blocks]
    return replay(trace, cell.capacity_blocks, load_policy(cell.policy))


def _setup(sweep: Sweep, trace: Trace, cell: Run) -> Setup:
    table = sweep.simulate
    assert table is not None
    assert cell.capacity_blocks is not None
    assert cell.write_policy is not None
    assert cell.prefetch_policy is not None
    base = Setup(
        model=model_of(table.model),
        device=device_of(table.device),
        devices=table.devices,
        page_tokens=trace.block_tokens,
    )
    device_bytes = cell.capacity_blocks * base.page_bytes
    setup = replace(
        base,
        device_bytes=device_bytes,
        host_bytes=int(table.host_times * device_bytes),
        disk_bytes=int(table.disk_times * device_bytes),
        eviction_policy=cell.policy,
        write_policy=cell.write_policy,
        prefetch_policy=cell.prefetch_policy,
    )
    setup.check()
    return setup


def _check(sweep: Sweep) -> None:
    if not sweep.policies or not sweep.capacity_blocks:
        raise ValueError("policies and capacity_blocks name at least one each")
    if min(sweep.capacity_blocks) < 1:
        raise ValueError("capacity_blocks are whole numbers above 0")
    for name in sweep.policies:
        load_policy(name)
    if sweep.simulate is not None:
        device_of(sweep.simulate.device)
        model_of(sweep.simulate.model)


def _filled(kind: type[Any], found: dict[str, Any], where: str) -> Any:
    """A dataclass out of a table; lists become tuples. Raises ValueError for a field that is unknown, missing or of a
    wrong type.
    """
    known = {field.name: str(field.type) for field in fields(kind)}
    for name, value in found.items():
        if name not in known:
            raise ValueError(f"no setting {where}{name}; there are {', '.join(known)}")
        if not _fits(value, known[name]):
            raise ValueError(f"{where}{name} = {value!r} is not {known[name]}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error).partition(" ")[2]) from error


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("tuple"):
        of = int if "int" in kind else str
        return isinstance(value, list) and all(type(item) is of for item in value)
    if value is None or kind.startswith("Simulated"):
        return "None" in kind
    if kind.startswith("float"):
        return type(value) in (int, float)
    return type(value).__name__ == kind.partition(" ")[0]
