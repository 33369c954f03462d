"""The caches of several copies of a model as one: sums, and commands that go to all of them or to the right one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..cache.mover_stats import KindStats
from .cache_control import CacheControl, Dropped, Level, PinError, Sharing, find_namespace
from .prefetch import PrefetchStats
from .stats import total

if TYPE_CHECKING:
    from .thread import EngineThread

T = TypeVar("T")


class ReplicaControl(CacheControl):
    """A `CacheControl` over those of the copies. What these do in the threads of their engines is waited for, so it is to be
    asked for by none of them.

    The disk is one: its numbers are those of the copy that knows most of it, but for what each has done to it.
    """

    def __init__(self, threads: Sequence[EngineThread], pin_share: float) -> None:
        self._threads = threads
        self._parts = [thread.cache_control(pin_share) for thread in threads]

    # Counters, readable in any thread.

    def levels(self) -> dict[str, Level]:
        found = [part.levels() for part in self._parts]
        return {
            tier: max((one[tier] for one in found), key=lambda level: level.used_pages)
            if tier == "disk"
            else total([one[tier] for one in found])
            for tier in found[0]
        }

    def evictions(self) -> dict[tuple[str, str], int]:
        return _added([part.evictions() for part in self._parts])

    def disk_churn(self) -> tuple[int, int]:
        evicted, pages = zip(*(part.disk_churn() for part in self._parts), strict=True)
        return sum(evicted), max(pages)

    def copies(self) -> dict[str, dict[str, int]]:
        found = [part.copies() for part in self._parts]
        return {kind: _added([one[kind] for one in found]) for kind in found[0]}

    def copy_stats(self) -> dict[str, KindStats]:
        found = [part.copy_stats() for part in self._parts]
        return {kind: total([one[kind] for one in found]) for kind in found[0]}

    def prefetch_stats(self) -> PrefetchStats | None:
        found = [stats for part in self._parts if (stats := part.prefetch_stats()) is not None]
        return total(found) if found else None

    def write_pauses(self) -> int:
        return sum(part.write_pauses() for part in self._parts)

    def sharing(self) -> Sharing:
        """Servers are counted once, of whom each copy is one."""
        found = [part.sharing() for part in self._parts]
        summed = total(found)
        if summed.servers is not None:
            summed.servers = max(one.servers or 0 for one in found)
        return summed

    def pinned(self) -> tuple[int, int]:
        pages, quota = zip(*(part.pinned() for part in self._parts), strict=True)
        return sum(pages), sum(quota)

    # In the engines' threads, each its part.

    def picture(self, limit: int) -> dict[str, Any]:
        """One tree beside the other: each namespace shows once for each copy."""
        most = max(limit // len(self._parts), 1)
        pictures = self._each(lambda part: part.picture(most))
        nodes: list[list[Any]] = []
        roots = 0
        for one in pictures:
            behind = len(nodes)
            for parent, *rest in one["nodes"]:
                # A root stands for itself by a number below 0.
                nodes.append([parent + behind if parent >= 0 else parent - roots, *rest])
            roots += one["namespaces"]
        return {
            "columns": pictures[0]["columns"],
            "nodes": nodes,
            "namespaces": roots,
            "hidden_roots": sum(one["hidden_roots"] for one in pictures),
            "truncated": any(one["truncated"] for one in pictures),
        }

    def stat(self) -> dict[str, Any]:
        found = self._each(lambda part: part.stat())
        first = found[0]
        tiers = {
            tier: _added([one["tiers"][tier] for one in found])
            if tier != "disk"
            else max((one["tiers"][tier] for one in found), key=lambda level: level["used_pages"])
            for tier in first["tiers"]
        }
        return {
            "page_size": first["page_size"],
            "page_bytes": first["page_bytes"],
            "tiers": tiers,
            "tokens": _added([one["tokens"] for one in found]),
            "requests": _added([one["requests"] for one in found]),
            "namespaces": _namespaces([one["namespaces"] for one in found]),
        }

    def drop(self, tiers: Iterable[str], namespace: str | None = None) -> dict[str, Dropped]:
        if namespace is not None:
            known = {row["namespace"] for row in self.stat()["namespaces"]}
            namespace = find_namespace(known, namespace).hex()
        tiers = tuple(tiers)
        found = self._each(lambda part: part.drop_if_there(tiers, namespace))
        return {tier: _dropped(tier, [one[tier] for one in found]) for tier in found[0]}

    def pin(self, namespace: bytes, token_ids: list[int]) -> dict[str, Any]:
        """At the copy that has it pinned already, or else has most of it."""
        return self._at(self._home(namespace, token_ids), lambda part: part.pin(namespace, token_ids))

    def check_pin(self, namespace: bytes, token_ids: list[int]) -> None:
        """Raises `PinError` if it could be pinned at none."""
        refused: PinError | None = None
        for place in range(len(self._parts)):
            try:
                return self._at(place, lambda part: part.check_pin(namespace, token_ids))
            except PinError as error:
                refused = error
        assert refused is not None
        raise refused

    def unpin(self, pin_id: str) -> dict[str, Any]:
        for place, pins in enumerate(self._each(lambda part: part.list_pins())):
            if pin_id in {shown["id"] for _, shown in pins}:
                return self._at(place, lambda part: part.unpin(pin_id))
        raise KeyError(pin_id)

    def pin_id(self, namespace: bytes, token_ids: list[int]) -> str:
        return self._at(0, lambda part: part.pin_id(namespace, token_ids))

    def list_pins(self) -> list[tuple[bytes, dict[str, Any]]]:
        return [pin for pins in self._each(lambda part: part.list_pins()) for pin in pins]

    def _home(self, namespace: bytes, token_ids: list[int]) -> int:
        pin_id, tokens = self.pin_id(namespace, token_ids), array("i", token_ids)

        def standing(part: CacheControl) -> tuple[bool, int]:
            pinned = pin_id in {shown["id"] for _, shown in part.list_pins()}
            return pinned, part.match_length(namespace, tokens)

        standings = self._each(standing)
        return standings.index(max(standings))

    def _each(self, work: Callable[[CacheControl], T]) -> list[T]:
        """What each copy answers, in its own thread and at about the same time."""
        asked = [
            thread.call(lambda part=part: work(part))
            for thread, part in zip(self._threads, self._parts, strict=True)
        ]
        return [answer.result() for answer in asked]

    def _at(self, place: int, work: Callable[[CacheControl], T]) -> T:
        part = self._parts[place]
        return self._threads[place].call(lambda: work(part)).result()


def _added(parts: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """Numbers by name, added up, also one level below; the first one's value of what is no number."""
    found: dict[Any, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                found[name] = _added([found.get(name, {}), value])
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found[name] = found.get(name, 0) + value
            else:
                found.setdefault(name, value)
    return found


def _namespaces(parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for part in parts for row in part):
        known = rows.setdefault(row["namespace"], row)
        if known is row:
            continue
        for name, value in row.items():
            if name.startswith("disk_"):
                known[name] = max(known[name], value)
            elif name != "namespace":
                known[name] += value
    return [rows[name] for name in sorted(rows)]


def _dropped(tier: str, parts: Sequence[Dropped]) -> Dropped:
    """The disk's pages are the same ones for all."""
    numbers = Counter[str]()
    for part in parts:
        for name in ("dropped_pages", "kept_pages", "pinned_pages"):
            value = getattr(part, name)
            numbers[name] = max(numbers[name], value) if tier == "disk" else numbers[name] + value
    return Dropped(**numbers, reason=next((part.reason for part in parts if part.reason), None))
