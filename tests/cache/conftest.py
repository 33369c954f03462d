from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.mover_bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.device.fault = None
    bench.device.steps_done.set()
    bench.host.open.set()
    bench.store.held = False
    bench.store.answer()
    assert bench.mover.close(5)
