"""Random operations on the disk index against a plain model of the store's contents, `check()` after each."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from helpers.disk_pages import NAMESPACE, OTHER_NAMESPACE
from helpers.tier_mirror import STORAGE, TierMirror
from tierax.cache.disk.index import DiskIndex
from tierax.cache.disk.names import Stored
from tierax.cache.page_events import PageLog
from tierax.cache.page_keys import PageKey, chain
from tierax.cache.policies.policy import Use
from tierax.cache.policies.registry import load_policy
from tierax.serving.events.messages import block_hash

OPERATIONS = 2500


def _universe(rng: random.Random) -> list[list[PageKey]]:
    """Paths through a few trees in two namespaces, so that they share heads."""
    paths = []
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        for _ in range(12):
            tokens = [bytes([rng.randrange(2)]) for _ in range(rng.randint(1, 7))]
            keys = chain(namespace, tokens)
            parents = [namespace, *keys]
            paths.append([PageKey(namespace, key, parents[n], n) for n, key in enumerate(keys)])
    return paths


class Machine:
    """The index, and a disk that does what it is told, in order: writes end at random times, well or not."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.capacity = self.rng.choice([60, 150, 400])
        self.index = DiskIndex(self.capacity, load_policy(policy))
        self.paths = _universe(self.rng)
        self.size = {key: self.rng.choice([5, 10, 20]) for path in self.paths for key in path}
        self.files: set[PageKey] = set()
        """What is on the disk, whole or in part."""
        self.writing: list[PageKey] = []
        self.doomed: set[PageKey] = set()
        """Being written, and to be deleted right after."""
        self.locked: list[list[PageKey]] = []
        self.protected: frozenset[PageKey] = frozenset()
        """Locked pages that the next operation must not evict."""
        self.evicted: Counter[str] = Counter()
        """Of the runs before this one."""
        self.tick = 0
        self.listen()

    def listen(self) -> None:
        """Whoever hears the events from here on knows what is stored."""
        self.log, self.mirror = PageLog(10**6, told=()), TierMirror()
        self.index.listener = self.log

    def delete(self, keys: list[PageKey] | None) -> None:
        for key in keys or ():
            if key in self.writing:
                self.doomed.add(key)
            else:
                assert key in self.files, "deleted what was not there"
                self.files.remove(key)

    def step(self) -> None:
        self.tick += self.rng.randint(0, 1)
        path = self.rng.choice(self.paths)
        use = Use(self.tick, float(self.tick))
        kind = self.rng.choices(
            ["write", "end", "touch", "lock", "unlock", "remove", "expire", "clear", "space", "restart"],
            [40, 45, 12, 6, 8, 1, 2, 0.2, 1, 0.3],
        )[0]
        getattr(self, kind)(path, use)
        self.index.check()
        on_disk = sum(self.size[key] for key in self.files)
        assert (
            on_disk + sum(self.size[key] for key in self.writing if key not in self.doomed) <= self.capacity
        )
        # Every page of the index is there, and everything there is in the index: nothing leaks.
        stored = {key for key in self.size if self.index.is_stored(key)}
        assert stored == self.files
        self.mirror.hear(self.log.take(10**6).events, page_size=1)
        assert self.mirror.blocks[STORAGE] == {block_hash(key.key) for key in stored}
        assert {key for key in self.size if key in self.index} - stored == set(self.writing) - self.doomed
        for other in self.paths:
            expected = next((n for n, key in enumerate(other) if key not in self.files), len(other))
            assert self.index.match(other) == expected
        assert self.protected <= self.files, "a locked page was evicted"

    def write(self, path: list[PageKey], use: Use) -> None:
        self.protected = frozenset(key for group in self.locked for key in group if key in self.files)
        for key in path[: self.rng.randint(1, len(path))]:
            if key in self.index:
                continue
            before = (self.index.bytes, set(self.files))
            gone = self.index.reserve(key, self.size[key], use)
            if gone is None:
                assert (self.index.bytes, self.files) == before
                break
            self.delete(gone)
            self.writing.append(key)

    def end(self, path: list[PageKey], use: Use) -> None:
        self.protected = frozenset()
        if not self.writing:
            return
        key = self.writing.pop(self.rng.randrange(len(self.writing)))
        if key in self.doomed:
            self.doomed.remove(key)
            if self.rng.random() < 0.5:
                self.index.stored(key)
            else:
                assert self.index.failed(key) == []
        elif self.rng.random() < 0.85:
            self.files.add(key)
            self.index.stored(key)
        else:
            gone = self.index.failed(key)
            assert gone[-1] == key
            self.delete(gone[:-1])

    def touch(self, path: list[PageKey], use: Use) -> None:
        self.index.touch(path, use)

    def lock(self, path: list[PageKey], use: Use) -> None:
        keys = path[self.rng.randrange(len(path)) : self.index.match(path)]
        self.index.lock(keys)
        self.locked.append(keys)

    def unlock(self, path: list[PageKey], use: Use) -> None:
        if self.locked:
            self.index.unlock(self.locked.pop(self.rng.randrange(len(self.locked))))

    def remove(self, path: list[PageKey], use: Use) -> None:
        self.protected = frozenset()
        key = self.rng.choice(path)
        gone = self.index.remove(key, "corrupt")
        assert (key in gone) == bool(gone)
        self.delete(gone)

    def expire(self, path: list[PageKey], use: Use) -> None:
        self.delete(self.index.expire(use.now))

    def clear(self, path: list[PageKey], use: Use) -> None:
        self.protected = frozenset()
        namespace = self.rng.choice([None, NAMESPACE, OTHER_NAMESPACE])
        self.delete(self.index.clear(namespace))
        assert not any(namespace in (None, key.namespace) for key in self.files)

    def space(self, path: list[PageKey], use: Use) -> None:
        self.protected = frozenset(key for group in self.locked for key in group if key in self.files)
        self.delete(self.index.keep_free(free=self.rng.choice([0, 50, 1000, 1000, 1000]), floor=40))

    def restart(self, path: list[PageKey], use: Use) -> None:
        """What was being written is lost, or whole without anybody knowing; some files vanish."""
        self.protected = frozenset()
        snapshot = self.index.snapshot()
        self.evicted += self.index.stats.evicted_pages
        self.files |= {key for key in self.writing if key not in self.doomed and self.rng.random() < 0.5}
        self.files -= {key for key in list(self.files) if self.rng.random() < 0.1}
        self.writing, self.doomed, self.locked, self.tick = [], set(), [], 0
        self.capacity = self.rng.choice([60, 150, 400])
        self.index = DiskIndex(self.capacity, load_policy(self.policy))
        self.listen()
        if self.rng.random() < 0.7:
            assert self.index.restore(snapshot)
        listed = [
            Stored(key, self.size[key]) for key in sorted(self.files, key=lambda key: self.rng.random())
        ]
        self.delete(self.index.add_listed(listed))


@pytest.mark.parametrize(
    ("seed", "policy"),
    [
        (1, "lru"),
        (2, "lru"),
        (3, "s3fifo"),
        (4, "gdsf"),
        (5, "ttl=40s"),
        (6, "slru"),
        (7, "fifo"),
        (8, "lfu"),
    ],
)
def test_index_agrees_with_the_disk_after_every_operation(seed: int, policy: str) -> None:
    machine = Machine(seed, policy)
    for _ in range(OPERATIONS):
        machine.step()
    evicted = machine.evicted + machine.index.stats.evicted_pages
    assert all(
        evicted[reason] > 0 for reason in ("capacity", "failed", "corrupt", "cleared", "space_floor")
    ), evicted
    assert ("ttl" in policy) == (evicted["ttl"] > 0)
