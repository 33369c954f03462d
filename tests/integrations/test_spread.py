"""Lines of a batch spread over workers that die: each is written once, and common beginnings meet."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

from tierax.engine.config import ConfigError
from tierax.integrations.prefix_order import KEY_BYTES, cut, prefix_key
from tierax.integrations.ray_batch import check_address
from tierax.integrations.spread import DEATHS_IN_A_ROW, PIECE, WorkerDied, spread
from tierax.serving.batch.lines import Line, Problem, Tally, answer_line


class FakeWorkers:
    """Answers pieces in random order; workers die with a probability, and always of poisoned lines."""

    def __init__(
        self, count: int, rng: random.Random, *, mortality: float = 0.0, poison: frozenset[str] = frozenset()
    ) -> None:
        self.count = count
        self.rng = rng
        self.mortality = mortality
        self.poison = poison
        self.replaced = 0
        self.answered_by: dict[str, int] = {}
        self.most_in_hand = 0
        self._in_hand: dict[int, tuple[int, list[Line]]] = {}
        self._dead: set[int] = set()
        self._names = iter(range(10**6))

    def submit(self, worker: int, lines: list[Line]) -> Hashable:
        assert worker not in self._dead
        name = next(self._names)
        self._in_hand[name] = (worker, lines)
        own = sum(len(held) for owner, held in self._in_hand.values() if owner == worker)
        self.most_in_hand = max(self.most_in_hand, own)
        return name

    def wait(self, pieces: Sequence[Hashable]) -> list[tuple[Hashable, list[bytes] | WorkerDied]]:
        name = self.rng.choice(list(pieces))
        assert isinstance(name, int)
        worker, lines = self._in_hand[name]
        if self.rng.random() < self.mortality or any(line.custom_id in self.poison for line in lines):
            self._dead.add(worker)
            lost = [n for n, (owner, _) in self._in_hand.items() if owner == worker]
            for one in lost:
                del self._in_hand[one]
            # Ray tells of each call by itself, and not all at once.
            return [(one, WorkerDied("killed")) for one in lost[: self.rng.randint(1, len(lost))]]
        del self._in_hand[name]
        for line in lines:
            assert line.custom_id is not None
            self.answered_by[line.custom_id] = worker
        return [(name, [answer_line(line, 200, b'{"usage": {"prompt_tokens": 1}}') for line in lines])]

    def replace(self, worker: int) -> None:
        assert worker in self._dead
        self._dead.discard(worker)
        self.replaced += 1


def lines_of(count: int, stems: int, rng: random.Random) -> list[Line]:
    """Requests of which many begin alike, in no order."""
    order = list(range(count))
    rng.shuffle(order)
    return [
        Line(
            number,
            f"id-{at}",
            "/v1/completions",
            json.dumps({"prompt": f"stem {at % stems:03} " * 20 + str(at)}).encode(),
        )
        for number, at in enumerate(order, start=1)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_each_line_is_written_once_whoever_dies(seed: int) -> None:
    rng = random.Random(seed)
    lines = lines_of(rng.randrange(1, 400), rng.randrange(1, 9), rng)
    bad = Line(1000, "bad", problem=Problem("invalid_json_line", "no JSON"))
    workers = FakeWorkers(rng.randrange(1, 5), rng, mortality=rng.choice([0.0, 0.1, 0.3]))
    tally, written = Tally(), Counter[str | int]()

    def put(raw: bytes) -> None:
        tally.add(raw)
        written[json.loads(raw)["custom_id"]] += 1

    spread([*lines, bad], workers, put, concurrency=64)
    assert written == Counter([line.custom_id for line in lines] + ["bad"])
    assert tally.failed == 1 or workers.replaced > 3, "only lines that outlived several workers may fail"
    assert workers.most_in_hand <= 64


def test_common_beginnings_meet_on_one_worker() -> None:
    rng = random.Random(7)
    workers = FakeWorkers(4, rng)
    lines = lines_of(512, 16, rng)
    spread(lines, workers, lambda raw: None, concurrency=32)
    homes: dict[str, set[int]] = {}
    for line in lines:
        stem = json.loads(line.body)["prompt"][:8]
        assert line.custom_id is not None
        homes.setdefault(stem, set()).add(workers.answered_by[line.custom_id])
    # Whoever is through helps the others, so some stems get a second home at the end.
    assert sum(len(workers) == 1 for workers in homes.values()) >= 12
    assert max(Counter(workers.answered_by.values()).values()) < 0.4 * len(lines), "and the work is shared"


def test_line_that_kills_its_workers_fails_alone() -> None:
    rng = random.Random(3)
    lines = lines_of(100, 4, rng)
    workers = FakeWorkers(2, rng, poison=frozenset({"id-42"}))
    written: dict[str, dict] = {}
    spread(
        lines,
        workers,
        lambda raw: written.update({json.loads(raw)["custom_id"]: json.loads(raw)}),
        concurrency=32,
    )
    assert len(written) == 100
    failed = {name for name, line in written.items() if line["error"] is not None}
    assert failed == {"id-42"}
    assert written["id-42"]["error"]["code"] == "worker_died"


def test_workers_that_only_die_end_the_run() -> None:
    rng = random.Random(1)
    workers = FakeWorkers(2, rng, mortality=1.0)
    with pytest.raises(WorkerDied, match="killed"):
        spread(lines_of(200, 4, rng), workers, lambda raw: None, concurrency=PIECE)
    assert workers.replaced == 2 * DEATHS_IN_A_ROW - 1


def test_key_goes_by_what_becomes_the_first_tokens() -> None:
    chat = b'{"temperature": 1, "messages": [{"role": "system", "content": "S"}], "tools": [{"a": 1}]}'
    assert prefix_key(chat) == b'[{"a": 1}]\n[{"role": "system", "content": "S"}]'
    assert prefix_key(b'{"max_tokens": 5, "prompt": "P"}') == b'"P"'
    assert prefix_key(b"[]") == prefix_key(b"no JSON") == b""
    assert len(prefix_key(json.dumps({"prompt": "x" * 10**5}).encode())) == KEY_BYTES


def test_cuts_lie_where_neighbours_differ_most() -> None:
    keys = [b"aaaa1", b"aaaa2", b"aaaa3", b"aaaa4", b"aaaa5", b"bbbb1", b"bbbb2", b"bbbb3"]
    assert [list(run) for run in cut(keys, keys, 2)] == [keys[:5], keys[5:]]
    assert cut([], [], 3) == []
    assert [len(run) for run in cut([1, 2], [b"a", b"b"], 5)] == [1, 1]
    same = [b"x"] * 100
    assert [len(run) for run in cut(same, same, 4)] == [25] * 4


def test_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            with pytest.raises(
                ConfigError, match=f"{address}: nothing that listens there: Connection refused"
            ):
                check_address(address)
        free.listen()
        check_address(f"127.0.0.1:{port}")
    check_address("auto")
    check_address("local")
