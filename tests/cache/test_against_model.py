"""Random operations, compared after each one with a page-by-page model of the same cache and of the device."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from tierax.cache.leases import Lease
from tierax.cache.manager import CacheManager
from tierax.cache.radix_tree import DEVICE, Node

Prefix = tuple[bytes, tuple[int, ...]]
"""What the KV of a page depends on: the namespace, and all tokens up to the page's end."""


@dataclass(eq=False)
class User:
    """A request: its lease, and what the model says about it."""

    namespace: bytes
    tokens: array[int]
    lease: Lease
    shared: int
    total: int = 0

    def prefix(self, page_size: int, page: int) -> Prefix:
        return self.namespace, tuple(self.tokens[: (page + 1) * page_size])


@dataclass
class Model:
    """The cache as a set of prefixes, each with the tick of its last use; every choice by exhaustive search."""

    num_pages: int
    page_size: int
    used: dict[Prefix, int] = field(default_factory=dict)
    users: list[User] = field(default_factory=list)
    tick: int = 0
    inserted: int = 0
    duplicates: int = 0
    evicted: int = 0

    def match(self, namespace: bytes, tokens: array[int], limit: int) -> int:
        count = 0
        while (count + 1) * self.page_size <= min(limit, len(tokens)):
            if (namespace, tuple(tokens[: (count + 1) * self.page_size])) not in self.used:
                break
            count += 1
        return count

    def locked(self) -> set[Prefix]:
        return {user.prefix(self.page_size, page) for user in self.users for page in range(user.shared)}

    def free(self) -> int:
        return self.num_pages - len(self.used) - sum(user.total - user.shared for user in self.users)

    def evictable(self) -> int:
        return len(self.used.keys() - self.locked())

    def grow(self, user: User, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.page_size) - user.total
        if missing > self.free() + self.evictable():
            return False
        while missing > self.free():
            self.evict_one()
            self.evicted += 1
        user.total += max(missing, 0)
        return True

    def evict_one(self) -> None:
        inner = {(name, tokens[: -self.page_size]) for name, tokens in self.used}
        leaves = self.used.keys() - self.locked() - inner
        del self.used[min(leaves, key=lambda prefix: (self.used[prefix], -len(prefix[1])))]

    def extend(self, user: User, limit: int) -> None:
        user.shared = max(user.shared, self.match(user.namespace, user.tokens, limit))
        user.total = max(user.total, user.shared)

    def commit(self, user: User, num_tokens: int) -> None:
        for page in range(user.shared, num_tokens // self.page_size):
            if user.prefix(self.page_size, page) in self.used:
                self.duplicates += 1
            else:
                self.used[user.prefix(self.page_size, page)] = 0
                self.inserted += 1
            user.shared = page + 1

    def release(self, user: User) -> None:
        self.tick += 1
        for page in range(user.shared):
            self.used[user.prefix(self.page_size, page)] = self.tick
        self.users.remove(user)


class Simulation:
    """Drives cache and model alike; `device` is what the owners of the pages have written to them."""

    def __init__(self, seed: int, num_pages: int, page_size: int) -> None:
        self.rng = random.Random(seed)
        self.cache = CacheManager(num_pages, page_size)
        self.model = Model(num_pages, page_size)
        self.page_size = page_size
        self.device: dict[int, Prefix] = {}
        self.known: list[array[int]] = [array("i")]
        self.hits = self.refusals = 0

    def some_tokens(self) -> array[int]:
        """Most often a continuation of a piece of an earlier sequence."""
        base = self.rng.choice(self.known[-6:])
        tokens = base[: self.rng.choice((len(base), self.rng.randint(0, len(base))))]
        for _ in range(self.rng.randint(1, 4)):
            tokens.extend([self.rng.choice((1, 2))] * self.rng.randint(1, self.page_size))
        self.known.append(tokens[: 12 * self.page_size])
        return self.known[-1][:]

    def write(self, user: User) -> None:
        """The owner computes all its own pages, whole or not."""
        for page in range(user.lease.num_shared, len(user.lease.pages)):
            self.device[user.lease.pages[page]] = user.prefix(self.page_size, page)

    def step(self) -> None:
        users = self.model.users
        actions = ["open", "match", "grow", "commit", "extend", "append", "release"]
        action = self.rng.choices(actions, [6 if len(users) < 6 else 0, 1, 5, 5, 1, 1, 4])[0]
        if self.rng.random() < 0.003:
            self.flush()
        elif action == "open":
            self.open()
        elif action == "match":
            namespace, tokens = self.rng.choice((b"a", b"a", b"b")), self.some_tokens()
            expected = self.model.match(namespace, tokens, len(tokens)) * self.page_size
            assert self.cache.match_length(namespace, tokens) == expected
        elif users:
            getattr(self, action)(self.rng.choice(users))

    def flush(self) -> None:
        if self.rng.random() < 0.5:
            self.cache.clear()
            while self.model.evictable():
                self.model.evict_one()
        else:
            self.cache.reset()
            self.device.clear()
            self.model.users.clear()
            self.model.used.clear()

    def open(self) -> None:
        namespace, tokens = self.rng.choice((b"a", b"a", b"b")), self.some_tokens()
        limit = self.rng.choice((len(tokens) - 1, self.rng.randint(0, len(tokens) + 3)))
        lease = self.cache.open(namespace, tokens, limit)
        matched = self.model.match(namespace, tokens, limit)
        self.hits += matched
        self.model.users.append(User(namespace, tokens, lease, matched, matched))

    def grow(self, user: User) -> None:
        num_tokens = self.rng.choice((len(user.tokens), self.rng.randint(0, len(user.tokens))))
        before = user.lease.pages[:]
        done = self.cache.grow(user.lease, num_tokens)
        assert done == self.model.grow(user, num_tokens)
        assert user.lease.pages[: len(before)] == before
        self.refusals += not done
        self.write(user)

    def commit(self, user: User) -> None:
        self.write(user)
        num_tokens = self.rng.randint(0, min(len(user.tokens), user.total * self.page_size))
        self.cache.commit(user.lease, user.tokens, num_tokens)
        self.model.commit(user, num_tokens)

    def extend(self, user: User) -> None:
        limit = self.rng.randint(0, len(user.tokens))
        shared = self.cache.extend(user.lease, user.tokens, limit)
        self.model.extend(user, limit)
        assert shared == user.shared * self.page_size

    def append(self, user: User) -> None:
        """A generated token; it lands in a page of the request's own, if there is one for it."""
        user.tokens.append(self.rng.choice((1, 2)))
        self.write(user)

    def release(self, user: User) -> None:
        self.model.release(user)
        self.cache.release(user.lease)

    def compare(self) -> None:
        cache, model = self.cache, self.model
        cache.check(user.lease for user in model.users)
        assert (cache.free, cache.evictable) == (model.free(), model.evictable())
        stats = cache.stats
        assert (stats.inserted_pages, stats.duplicate_pages, stats.evicted_pages) == (
            model.inserted,
            model.duplicates,
            model.evicted,
        )
        for user in model.users:
            assert (user.lease.num_shared, len(user.lease.pages)) == (user.shared, user.total)
            for page, number in enumerate(user.lease.pages):
                assert self.device[number] == user.prefix(self.page_size, page), "another's KV"
        tree = self.pages_of_tree()
        assert tree.keys() == model.used.keys()
        assert all(self.device[number] == prefix for prefix, number in tree.items())

    def pages_of_tree(self) -> dict[Prefix, int]:
        found: dict[Prefix, int] = {}
        for root in self.cache.tiers.tree.roots.values():
            stack: list[tuple[Node, tuple[int, ...]]] = [(root, ())]
            while stack:
                node, tokens = stack.pop()
                for child in node.children.values():
                    run = (*tokens, *array("i", bytes(child.key)))
                    start = len(tokens) + self.page_size
                    for number, end in zip(
                        child.runs[DEVICE].pages, range(start, len(run) + 1, self.page_size), strict=True
                    ):
                        found[bytes(root.key), run[:end]] = number
                    stack.append((child, run))
        return found


@pytest.mark.parametrize(
    ("num_pages", "page_size"), [(8, 1), (24, 1), (9, 2), (20, 3), (16, 4), (30, 4), (12, 16), (40, 2)]
)
def test_random_operations_agree_with_the_model(num_pages: int, page_size: int) -> None:
    simulation = Simulation(num_pages * 100 + page_size, num_pages, page_size)
    for _ in range(1_500):
        simulation.step()
        simulation.compare()
    for user in simulation.model.users[:]:
        simulation.release(user)
    simulation.compare()
    simulation.cache.clear()
    assert simulation.cache.free == num_pages
    # The run meant something: every mechanism took part.
    assert min(simulation.hits, simulation.model.inserted, simulation.model.evicted) > 25
    assert min(simulation.refusals, simulation.model.duplicates) > 0
