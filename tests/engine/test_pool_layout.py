"""A pool whose order in memory is stated, as on TPUs: every program takes it and gives it back in that order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from helpers.tiny_engine import TinyModel
from tierax.cache.device_pool import DevicePool
from tierax.engine.compile_counter import CompileCounter
from tierax.engine.jax_executor import JaxExecutor
from tierax.engine.platform import compiler_options
from tierax.engine.stats import EngineStats
from tierax.engine.step import StepFunctions, StepShapes
from tierax.engine.step_device import StepDevice
from tierax.pallas_kernels.kernels import Target
from tierax.pallas_kernels.pages import PoolShape, page_bytes_on_device, pool_format

SHAPE = PoolShape(8, layers=2, page_size=4, kv_heads=3, head_dim=8)


def test_tpus_alone_want_an_order() -> None:
    device = SingleDeviceSharding(jax.local_devices()[0])
    assert pool_format(Target("cpu"), device, SHAPE.array) is None
    assert pool_format(Target("gpu", "9.0"), device, SHAPE.array) is None
    layout = pool_format(Target("tpu", "v6e"), device, SHAPE.array)
    assert layout == Format(Layout((0, 1, 2, 3, 4)), device)


def test_page_bytes_are_those_of_the_device() -> None:
    device = SingleDeviceSharding(jax.local_devices()[0])
    plain = page_bytes_on_device(SHAPE, jnp.dtype(jnp.float32), None)
    assert plain == 2 * 4 * 3 * 16 * 4
    # This device pads nothing, so that what the compiler tells is the same.
    assert (
        page_bytes_on_device(SHAPE, jnp.dtype(jnp.float32), Format(Layout((0, 1, 2, 3, 4)), device)) == plain
    )


def test_only_tpu7x_has_compiler_options() -> None:
    assert compiler_options(Target("tpu", "tpu7x"))
    assert not compiler_options(Target("tpu", "v6e"))
    assert not compiler_options(Target("cpu"))


def test_steps_keep_the_order_and_compile_once() -> None:
    model = TinyModel("llama3")
    config = model.config
    shape = PoolShape(8, config.num_layers, 4, config.num_kv_heads, config.head_dim)
    order = (0, 1, 3, 2, 4)
    layout = Format(Layout(order), SingleDeviceSharding(jax.local_devices()[0]))
    pool = DevicePool(shape, jnp.dtype(jnp.float32), layout=layout)
    shapes = StepShapes(4, 8, table_width=8, page_size=4, num_pages=8)
    shapes.token_buckets, shapes.row_buckets = (8,), (4,)
    functions = StepFunctions(model.decoder, shapes, layout)
    device = StepDevice(model.params, pool, functions, num_slots=4, vocab_size=config.vocab_size)
    executor = JaxExecutor(device, shapes)

    counter = CompileCounter(stats := EngineStats())
    try:
        made = []
        for _ in range(2):
            for _ in executor.warm_up():
                assert _order(pool) == order
            # An engine that ran before in this process may have left its compile cache in use.
            made.append(stats.compiles + stats.loaded_programs)
    finally:
        counter.close()
    assert made[1] == made[0] > 0
    list(pool.warm_up())
    assert _order(pool) == order
    executor.reset()
    assert _order(pool) == order


def _order(pool: DevicePool) -> tuple[int, ...]:
    return pool.array.format.layout.major_to_minor  # pyright: ignore[reportAttributeAccessIssue]


def test_pages_come_back_from_a_pool_in_another_order() -> None:
    layout = Format(Layout((0, 1, 3, 2, 4)), SingleDeviceSharding(jax.local_devices()[0]))
    pool = DevicePool(SHAPE, jnp.dtype(jnp.float32), layout=layout)
    rows = np.random.default_rng(0).integers(0, 256, (2, pool.page_bytes)).astype(np.uint8)
    staging = pool.take_staging()
    assert staging is not None
    staging.rows[:2] = rows
    pool.upload(staging, 2)
    pool.scatter(staging, [5, 1])
    gathered = pool.gather([1, 5])
    assert gathered is not None
    np.testing.assert_array_equal(gathered.rows(), rows[::-1])
    gathered.release()
