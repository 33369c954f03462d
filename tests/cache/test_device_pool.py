"""Pages out of a real device pool and into it, and through all three tiers: every bit, in place, compiled once."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tierax.cache.device_pool import DevicePool
from tierax.cache.disk.page_records import PageRecords
from tierax.cache.disk.record import PageLayout
from tierax.cache.disk.share import Share
from tierax.cache.disk.store import PageStore
from tierax.cache.host_pool import HostPool
from tierax.cache.mover import TierMover
from tierax.cache.moves import Move, Outcome
from tierax.cache.page_keys import PageKey
from tierax.engine.compile_counter import CompileCounter
from tierax.engine.stats import EngineStats
from tierax.pallas_kernels.pages import PoolShape

PAGES = 12


def fill(pool: DevicePool, seed: int) -> np.ndarray:
    """Random bits in every page, NaNs of all kinds among them; returns u8 `[pages, page_bytes]`."""
    data = np.random.default_rng(seed).integers(0, 256, (PAGES + 1, pool.page_bytes), np.uint8)
    pool.array = jax.device_put(data.view(pool.dtype).reshape(pool.shape.array))
    return data[:PAGES]


def contents(pool: DevicePool) -> np.ndarray:
    return np.array(pool.array).reshape(PAGES + 1, -1).view(np.uint8)[:PAGES]


def wait(mover: TierMover, move: Move) -> None:
    end = time.monotonic() + 20
    while not move.done:
        mover.poll(0.0)
        assert time.monotonic() < end, f"{move.kind} does not end"
        time.sleep(0.0005)
    assert move.outcomes == [Outcome.OK] * move.pages


def keys(count: int) -> list[PageKey]:
    return [PageKey(b"n" * 16, bytes([i]) * 16, b"p" * 16, i) for i in range(count)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_bytes_survive_all_tiers(tmp_path: Path, dtype: str, kv_heads: int, page_size: int) -> None:
    shape = PoolShape(PAGES, 2, page_size, kv_heads, 8, quantized=dtype == "uint8")
    pool = DevicePool(shape, jnp.dtype(dtype))
    host = HostPool(PAGES, pool.page_bytes)
    layout = PageLayout(pool.array.shape[1:], dtype)
    store = PageStore(tmp_path / "pages")
    mover = TierMover(pool, host, clock=time.monotonic, records=PageRecords(store, Share.whole(layout)))
    original = fill(pool, seed=1)
    order = np.random.default_rng(2).permutation(PAGES).tolist()

    wait(mover, mover.save(order, range(PAGES)))
    wait(mover, mover.write(keys(PAGES), range(PAGES)))
    host.slab[:] = 0
    # A step later the device's pages are others.
    fill(pool, seed=3)
    rows = order[::-1]
    wait(mover, mover.read(keys(PAGES), rows))
    wait(mover, mover.load(rows, order))

    np.testing.assert_array_equal(contents(pool), original)
    assert mover.close()
    assert store.close()


def test_a_gather_sees_the_pool_as_it_was() -> None:
    pool = DevicePool(PoolShape(PAGES, 2, 4, 3, 8), jnp.dtype(jnp.float32))
    original = fill(pool, seed=1)
    gathered = pool.gather([5, 0, 7])
    pool.array = jax.jit(lambda x: x * 0, donate_argnums=0)(pool.array)
    assert gathered is not None
    np.testing.assert_array_equal(gathered.rows(), original[[5, 0, 7]])
    gathered.release()


def test_a_scatter_leaves_other_pages_alone() -> None:
    pool = DevicePool(PoolShape(PAGES, 2, 4, 3, 8), jnp.dtype(jnp.float32))
    expected = fill(pool, seed=1).copy()
    staging = pool.take_staging()
    assert staging is not None
    staging.rows[:] = 7
    pool.upload(staging, 3)
    pool.scatter(staging, [2, 11, 4])
    expected[[2, 11, 4]] = 7
    np.testing.assert_array_equal(contents(pool), expected)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_copies_need_no_memory_that_grows_with_the_pool(dtype: str) -> None:
    temp = {}
    for pages in (40, 160):
        shape = PoolShape(pages, 4, 16, 3, 32, quantized=dtype == "uint8")
        pool = DevicePool(shape, jnp.dtype(dtype))
        programs = pool.compiled()
        for name, program in programs.items():
            memory = program.memory_analysis()
            assert memory is not None
            temp[name, pages] = memory.temp_size_in_bytes
            donated = pool.batch_bytes if name.startswith("gather") else pool.array.nbytes
            assert memory.alias_size_in_bytes >= donated, f"{name} is not in place"
    assert temp
    for (name, pages), size in temp.items():
        assert size == temp[name, 40] < 64 << 10, f"{name} takes {size} bytes with {pages} pages"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_compiles_after_warm_up(dtype: str) -> None:
    pool = DevicePool(PoolShape(PAGES, 2, 4, 3, 8), jnp.dtype(dtype))
    assert len(list(pool.warm_up())) == pool.num_programs
    host = HostPool(PAGES, pool.page_bytes)
    mover = TierMover(pool, host, clock=time.monotonic)
    stats = EngineStats()
    counter = CompileCounter(stats)
    try:
        for count in (1, 2, 3, 5, PAGES):
            wait(mover, mover.save(range(count), range(count)))
            wait(mover, mover.load(range(count), range(count)))
        pool.reset()
        mover.reset()
        wait(mover, mover.save([1], [1]))
        wait(mover, mover.load([1], [2]))
    finally:
        counter.close()
    assert (stats.compiles, stats.loaded_programs) == (0, 0)
    assert mover.close()


@pytest.fixture
def small_ring() -> Iterator[tuple[DevicePool, TierMover, HostPool]]:
    shape = PoolShape(PAGES, 16, 16, 8, 128)
    page_bytes = shape.page_elements * 4
    assert page_bytes == 2 << 20
    pool = DevicePool(shape, jnp.dtype(jnp.float32), staging_bytes=20 * page_bytes)
    host = HostPool(PAGES, page_bytes)
    mover = TierMover(pool, host, clock=time.monotonic)
    yield pool, mover, host
    assert mover.close()


def test_staging_stays_within_its_bound(small_ring: tuple[DevicePool, TierMover, HostPool]) -> None:
    pool, mover, _ = small_ring
    limit = 2 * 8 * pool.page_bytes
    assert (pool.batch_pages, pool.staging_limit) == (8, limit)
    original = fill(pool, seed=1).copy()
    order = list(range(PAGES))
    saves = [mover.save(order[:7], order[:7]), mover.save(order[7:], order[7:])]
    assert mover.bytes_held() <= limit
    for move in saves:
        wait(mover, move)
    pool.reset()
    assert (pool.bytes_held, mover.reset()) == (0, set())
    loads = [mover.load(order[:7], order[:7]), mover.load(order[7:], order[7:])]
    while not all(load.done for load in loads):
        mover.poll(0.0)
        time.sleep(0.0005)
        assert mover.bytes_held() <= limit
    np.testing.assert_array_equal(contents(pool), original)
    assert pool.bytes_held <= limit


def test_a_fault_of_the_device_costs_its_pages_only() -> None:
    """The pool's array is lost in the middle; after both resets everything works as before."""
    pool = DevicePool(PoolShape(PAGES, 2, 4, 3, 8), jnp.dtype(jnp.float32))
    host = HostPool(PAGES, pool.page_bytes)
    mover = TierMover(pool, host, clock=time.monotonic)
    original = fill(pool, seed=1)
    wait(mover, mover.save([0, 1], [0, 1]))
    pool.array.delete()
    lost = mover.save([2], [2])
    load = mover.load([0], [5])
    pool.reset()
    assert mover.reset() == {2}
    end = time.monotonic() + 10
    while not (lost.done and load.done) and time.monotonic() < end:
        mover.poll(0.0)
    assert lost.outcomes[0] in (Outcome.IO_ERROR, Outcome.CANCELLED)
    assert load.outcomes == [Outcome.CANCELLED]
    wait(mover, mover.load([0, 1], [8, 9]))
    np.testing.assert_array_equal(contents(pool)[8:10], original[:2])
    assert not contents(pool)[:8].any()
    assert mover.close()


def test_host_rows_are_aligned_and_not_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = HostPool(10_000, 100_001)
    assert pool.nbytes == 10_000 * 100_032
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB, of a GB"
    assert all(pool.slab[row].ctypes.data % 64 == 0 for row in (0, 1, 1000))
    assert HostPool(0, 8).nbytes == 0
    with pytest.raises(ValueError, match="-1 rows"):
        HostPool(-1, 8)


def test_host_rows_in_any_order() -> None:
    pool = HostPool(8, 5)
    pages = np.arange(20, dtype=np.uint8).reshape(4, 5)
    pool.put(pages, [2, 3, 7, 1])
    back = np.zeros((4, 5), np.uint8)
    pool.get([3, 2, 1, 7], back)
    np.testing.assert_array_equal(back, pages[[1, 0, 3, 2]])
