"""A page store in which things go wrong on demand; otherwise it is the real one."""

from __future__ import annotations

import enum
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tierax.cache.disk.names import RecordKey, record_name
from tierax.cache.disk.order import WriteOrder
from tierax.cache.disk.readers import copy_into
from tierax.cache.disk.store import Fetched, PageStore
from tierax.cache.moves import Outcome


class Fault(enum.Enum):
    EIO = "an I/O error"
    NO_SPACE = "no space left"
    DENIED = "permission denied"
    VANISHED = "no such record"
    SHORT = "10 bytes are missing at the end"
    FLIPPED = "one bit is not what it was"
    STALLED = "no answer until heal() or release()"


_OUTCOMES = {
    Fault.EIO: Outcome.IO_ERROR,
    Fault.NO_SPACE: Outcome.NO_SPACE,
    Fault.DENIED: Outcome.DENIED,
    Fault.VANISHED: Outcome.MISSING,
}


@dataclass(eq=False)
class Rule:
    """One thing that goes wrong, made by `FaultyStore.inject`."""

    operation: str
    fault: Fault
    keys: frozenset[RecordKey] | None
    times: int | None
    share: float
    hits: int = 0
    """How often it struck."""


class FaultyStore(PageStore):
    """`inject` says what goes wrong, `delay` how slow it is, `heal` ends all that. Chances come from `seed`.

    A fault of a write leaves nothing in the store, but SHORT and FLIPPED store such a record and report success, as a
    failing disk does. Answers come from other threads, as those of the real store do.
    """

    def __init__(self, url: Any, *, seed: int = 0, **options: Any) -> None:
        super().__init__(url, **options)
        self.calls: Counter[str] = Counter()
        """`read`, `write`, `delete`: calls so far."""
        self.free: int | None = None
        """What `free_bytes` answers; None: the truth."""
        self._random = random.Random(seed)
        self._rules: list[Rule] = []
        self._delays: dict[str, tuple[float, float]] = {}
        self._stalled: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._late_order = WriteOrder()
        self._heals = 0

    def inject(
        self,
        operation: str,
        fault: Fault,
        keys: Iterable[RecordKey] | None = None,
        *,
        times: int | None = None,
        share: float = 1.0,
    ) -> Rule:
        """From now on `operation` (`read`, `write` or `delete`) of these keys (None: of all) fails like that, `times`
        times (None: always), each time with the probability `share`. The first rule that strikes counts.
        """
        rule = Rule(operation, fault, None if keys is None else frozenset(keys), times, share)
        with self._lock:
            self._rules.append(rule)
        return rule

    def delay(self, operation: str, least: float, most: float) -> None:
        """Every `operation` starts late by a random time between `least` and `most` seconds."""
        self._delays[operation] = (least, most)

    def release(self) -> int:
        """Lets what has stalled so far go on; returns how many that were."""
        with self._lock:
            stalled, self._stalled = self._stalled, []
        for go in stalled:
            go()
        return len(stalled)

    def heal(self) -> None:
        """Nothing goes wrong any more, and what has stalled goes on."""
        with self._lock:
            self._heals += 1
            self._rules.clear()
            self._delays.clear()
        self.release()

    @property
    def stalled(self) -> int:
        return len(self._stalled)

    def read(self, key: RecordKey, done: Callable[[Outcome, Fetched | None], None]) -> None:
        fault = self._strike("read", key)
        real = super().read

        def answer(outcome: Outcome, record: Fetched | None) -> None:
            done(outcome, record and (lambda: self._damage(fault, record())))

        if fault in _OUTCOMES:
            self._later("read", fault, lambda: done(_OUTCOMES[fault], None))
        else:
            self._later("read", fault, lambda: real(key, answer))

    def read_into(
        self, key: RecordKey, buffers: Sequence[memoryview], done: Callable[[Outcome], None]
    ) -> None:
        fault = self._strike("read", key)
        real = super().read_into

        def answer(outcome: Outcome) -> None:
            if outcome is Outcome.OK and fault is Fault.SHORT:
                outcome = Outcome.CORRUPT
            elif outcome is Outcome.OK and fault is Fault.FLIPPED:
                record = self._damage(fault, b"".join(buffers))
                outcome = copy_into(record, buffers)
            done(outcome)

        if fault in _OUTCOMES:
            self._later("read", fault, lambda: done(_OUTCOMES[fault]))
        else:
            self._later("read", fault, lambda: real(key, buffers, answer))

    def write(self, key: RecordKey, record: bytes, done: Callable[[Outcome], None]) -> None:
        fault = self._strike("write", key)
        real = super().write
        self._in_order("write", key, fault, done, lambda end: real(key, self._damage(fault, record), end))

    def delete(self, key: RecordKey, done: Callable[[Outcome], None]) -> None:
        real = super().delete
        self._in_order("delete", key, self._strike("delete", key), done, lambda end: real(key, end))

    def _in_order(
        self,
        operation: str,
        key: RecordKey,
        fault: Fault | None,
        done: Callable[[Outcome], None],
        real: Callable[[Callable[[Outcome], None]], None],
    ) -> None:
        """What is late or stalled here keeps what comes after it waiting, as it would in the real store."""
        name, deletes = record_name(key), operation == "delete"
        failure = None if fault is None else _OUTCOMES.get(fault)
        heals = self._heals

        def end(outcome: Outcome) -> None:
            self._late_order.finish(name, deletes=deletes)
            done(outcome)

        def start() -> None:
            # What would have stalled need not, if its turn comes after `heal` only.
            now = None if fault is Fault.STALLED and self._heals != heals else fault
            self._later(operation, now, lambda: real(end) if failure is None else end(failure))

        self._late_order.submit(name, start, deletes=deletes)

    def free_bytes(self) -> int | None:
        return super().free_bytes() if self.free is None else self.free

    def _strike(self, operation: str, key: RecordKey) -> Fault | None:
        with self._lock:
            self.calls[operation] += 1
            for rule in self._rules:
                if (
                    rule.operation == operation
                    and (rule.keys is None or key in rule.keys)
                    and (rule.times is None or rule.hits < rule.times)
                    and (rule.share >= 1 or self._random.random() < rule.share)
                ):
                    rule.hits += 1
                    return rule.fault
        return None

    def _later(self, operation: str, fault: Fault | None, go: Callable[[], None]) -> None:
        if fault is Fault.STALLED:
            with self._lock:
                self._stalled.append(go)
            return
        least, most = self._delays.get(operation, (0.0, 0.0))
        with self._lock:
            seconds = self._random.uniform(least, most)
        if fault is None and not most:
            go()
            return
        timer = threading.Timer(seconds, go)
        timer.daemon = True
        timer.start()

    def _damage(self, fault: Fault | None, record: bytes) -> bytes:
        if fault is Fault.SHORT:
            return record[:-10]
        if fault is Fault.FLIPPED:
            with self._lock:
                bit = self._random.randrange(8 * len(record))
            damaged = bytearray(record)
            damaged[bit // 8] ^= 1 << bit % 8
            return bytes(damaged)
        return record
