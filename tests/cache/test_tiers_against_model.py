"""Tree and tiers under random operations, against a model that knows only what every page and row really holds, and
against one that knows only the events that were published.

The model copies contents when the manager orders a copy, and forgets them when a page changes hands. The tree must
never name a page or a row whose contents are not what its path says.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from helpers.tier_mirror import TierMirror, blocks_in, walk
from tierax.cache.leases import Hold, Lease
from tierax.cache.manager import WRITE_POLICIES, CacheManager
from tierax.cache.page_events import PageLog
from tierax.cache.policies.registry import POLICIES, load_policy
from tierax.cache.radix_tree import DEVICE, HOST
from tierax.serving.events.messages import block_hash

Content = tuple[bytes, tuple[int, ...]]
"""Namespace, and all tokens up to the end of the page."""


@dataclass(slots=True)
class User:
    """A request: its tokens are known, some of them have been computed."""

    lease: Lease
    tokens: array[int]
    computed: int


@dataclass(slots=True)
class Reader:
    """Somebody who holds host pages, and may have rows in hand."""

    hold: Hold
    tokens: array[int]
    rows: list[int] = field(default_factory=list)


class Simulation:
    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.page_size = rng.choice([1, 2, 3])
        self.now = 0.0
        policies = ["ttl=20s" if name == "ttl" else name for name in sorted(POLICIES)]
        self.cache = CacheManager(
            rng.randrange(6, 40),
            self.page_size,
            load_policy(rng.choice(policies)),
            host_pages=rng.choice([0, 3, 8, 60]),
            host_policy=load_policy(rng.choice(policies)),
            write_policy=rng.choice(WRITE_POLICIES),
            clock=lambda: self.now,
        )
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.users: list[User] = []
        self.readers: list[Reader] = []
        self.log = PageLog(10**6, told={b""})
        self.mirror = TierMirror()
        self.cache.tiers.listen(self.log)

    def run(self, operations: int) -> None:
        moves = [
            self.arrive,
            self.compute,
            self.compute,
            self.leave,
            self.hold,
            self.read,
            self.place,
            self.drop,
        ]
        moves += [self.arrive, self.compute, self.save, self.rarely]
        for _ in range(operations):
            self.now += self.rng.random()
            self.rng.choice(moves)()
            self.check()
        for user in self.users:
            self.cache.release(user.lease)
        for reader in self.readers:
            self.cache.give_rows(reader.rows)
            self.cache.drop(reader.hold)
        self.users, self.readers = [], []
        self.check()
        assert self.cache.in_use == self.cache.host.in_use == 0
        self.cache.clear()
        self.check()
        assert not self.cache.tiers.tree.roots, "an empty cache keeps no namespace"
        assert not any(self.mirror.blocks.values())

    def tokens(self) -> array[int]:
        stem = self.rng.randrange(3)
        length = self.rng.randrange(1, 20)
        tokens = [stem * 100 + i for i in range(length)]
        return array("i", [*tokens, *(self.rng.randrange(3) for _ in range(self.rng.randrange(5)))])

    def content(self, namespace: bytes, tokens: array[int], page: int) -> Content:
        return namespace, tuple(tokens[: (page + 1) * self.page_size])

    def arrive(self) -> None:
        tokens, namespace = self.tokens(), self.rng.choice([b"", b"t"])
        lease = self.cache.open(namespace, tokens, len(tokens) - 1)
        assert lease.num_shared == self.cache.match(namespace, tokens, len(tokens) - 1).device
        self.users.append(User(lease, tokens, lease.num_shared * self.page_size))

    def compute(self) -> None:
        if not self.users:
            return
        user = self.rng.choice(self.users)
        user.computed = max(user.computed, self.cache.extend(user.lease, user.tokens, len(user.tokens) - 1))
        if self.rng.random() < 0.3:
            user.tokens.append(self.rng.randrange(3))
        until = self.rng.randrange(user.computed, len(user.tokens) + 1)
        if not self.cache.grow(user.lease, until):
            assert -(-until // self.page_size) - len(user.lease.pages) > self.cache.available()
            return
        # What a step may overwrite is saved before it; then the step writes.
        self.order_saves()
        for page in range(user.computed // self.page_size, until // self.page_size):
            if page >= user.lease.num_shared:
                self.device[user.lease.pages[page]] = self.content(user.lease.namespace, user.tokens, page)
        user.computed = max(user.computed, until)
        self.cache.commit(user.lease, user.tokens, user.computed)

    def leave(self) -> None:
        if self.users:
            user = self.users.pop(self.rng.randrange(len(self.users)))
            self.cache.release(user.lease)

    def hold(self) -> None:
        tokens = self.tokens()
        save = self.rng.random() < 0.5
        hold = self.cache.hold(self.rng.choice([b"", b"t"]), tokens, len(tokens), save=save)
        self.order_saves()
        self.readers.append(Reader(hold, tokens))

    def read(self) -> None:
        if self.readers:
            reader = self.rng.choice(self.readers)
            rows = self.cache.take_rows(self.rng.randrange(4))
            self.order_saves()
            for row in rows:
                self.host.pop(row, None)
            reader.rows += rows

    def place(self) -> None:
        if not self.readers:
            return
        reader = self.rng.choice(self.readers)
        self.cache.extend_hold(reader.hold, reader.tokens, len(reader.tokens))
        first = reader.hold.num_pages
        count = min(len(reader.rows), len(reader.tokens) // self.page_size - first)
        rows, reader.rows = reader.rows[:count], reader.rows[count:]
        for page, row in enumerate(rows, first):
            self.host[row] = self.content(reader.hold.namespace, reader.tokens, page)
        self.cache.place(reader.hold, reader.tokens, rows)
        assert reader.hold.num_pages == first + len(rows)
        held = self.cache.rows(reader.hold, 0, reader.hold.num_pages)
        for page, row in enumerate(held):
            assert self.host[row] == self.content(reader.hold.namespace, reader.tokens, page)

    def drop(self) -> None:
        if self.readers:
            reader = self.readers.pop(self.rng.randrange(len(self.readers)))
            self.cache.give_rows(reader.rows)
            self.cache.drop(reader.hold)

    def save(self) -> None:
        tiers = self.cache.tiers
        for node in list(tiers.unsaved):
            if node in tiers.unsaved and tiers.save(node):
                tiers.unsaved.pop(node, None)
        self.order_saves()

    def rarely(self) -> None:
        match self.rng.randrange(12):
            case 0:
                self.cache.clear(self.rng.choice([None, DEVICE, HOST]))
            case 1:
                self.cache.tiers.expire(self.now)
            case 2:
                unfilled = {row for row in self.host if self.rng.random() < 0.1}
                self.order_saves()
                for reader in self.readers:
                    self.cache.give_rows(reader.rows)
                self.users, self.readers = [], []
                self.cache.reset(unfilled)
                self.device.clear()
                for row in unfilled:
                    self.host.pop(row)

    def order_saves(self) -> None:
        for page, row in zip(*self.cache.take_saves(), strict=True):
            self.host[row] = self.device[page]

    def check(self) -> None:
        self.order_saves()
        self.cache.check([user.lease for user in self.users])
        for namespace, root in self.cache.tiers.tree.roots.items():
            stack = [(child, array("i")) for child in root.children.values()]
            while stack:
                node, before = stack.pop()
                tokens = before + array("i", bytes(node.key))
                for run, held in zip(node.runs, (self.device, self.host), strict=True):
                    for at, page in enumerate(run.pages):
                        assert held[page] == self.content(namespace, tokens, node.start + at)
                stack += [(child, tokens) for child in node.children.values()]
        self.check_events()

    def check_events(self) -> None:
        """Whoever heard the events, and nothing else, knows what each tier holds."""
        self.mirror.hear(self.log.take(10**6).events, self.page_size)
        assert self.mirror.blocks == {**blocks_in(self.cache.tiers), "STORAGE": set()}
        for node, namespace in walk(self.cache.tiers):
            for at, key in enumerate(node.page_keys()):
                own = node.key[at * node.page_bytes : (at + 1) * node.page_bytes]
                told = list(array("i", bytes(own))) if namespace == b"" else None
                assert self.mirror.tokens.get(block_hash(key)) == told


@pytest.mark.parametrize("seed", range(25))
def test_every_page_holds_what_its_path_says(seed: int) -> None:
    Simulation(seed).run(400)
