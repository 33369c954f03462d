"""A process other than 0: its own part of the model and of every page, and commands from process 0 until the end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from ..cache.device_pool import DevicePool, Gathered
from ..cache.host_pool import HostPool
from ..models.source import resolve_model
from .channel import ChannelError, Connection, connect
from .compile_counter import use_compile_cache
from .config import ConfigError, EngineConfig
from .device_side import DeviceSide
from .leader import JOIN_TIMEOUT, LOAD_TIMEOUT, end_process, join_processes, leave_processes
from .placement import place
from .sampler_rows import SamplingRows

logger = logging.getLogger(__name__)

MOST_AHEAD = 4
"""Steps that are dispatched before the first of them has ended."""
NAP = 0.001
"""Seconds between looks for a buffer."""
_PLAIN = frozenset(
    "forward update score add_up reset prepare_forward prepare_take prepare_score prepare_add_up".split()
)
"""Commands of `StepDevice` whose arguments travel as they are."""


def follow(config: EngineConfig) -> int:
    """Runs process `config.process_id` until process 0 ends; returns the exit code.

    Raises `ConfigError` or `ModelError` for what cannot be used. When process 0 is lost, the process ends by itself.
    """
    join_processes(config)
    if (directory := config.compile_cache_path()) is not None:
        use_compile_cache(directory)
    try:
        leader = Connection(connect(*config.channel_address, JOIN_TIMEOUT), "process 0", end_process)
    except ChannelError as error:
        raise ConfigError(f"coordinator_address: {error}") from None
    try:
        leader.send(config.process_id)
        if leader.receive(JOIN_TIMEOUT) == ["dismissed"]:
            logger.info("process 0 has nothing to do")
            leader.receive()
        else:
            _take_part(config, leader)
    except ChannelError as error:
        raise ConfigError(f"num_processes: {error}") from None
    finally:
        leader.close()
    leave_processes()
    return 0


def _take_part(config: EngineConfig, leader: Connection) -> None:
    source = resolve_model(config.model_path)
    placement = place(config.tp_size, source.config)

    def agree(pages: int, settings: dict[str, Any]) -> int:
        leader.send(pages, settings)
        match leader.receive(LOAD_TIMEOUT):
            case ["pages", int(agreed)]:
                return agreed
            case _:
                raise ConfigError("num_processes: process 0 does not go on, and says why")

    device = DeviceSide(config, source, placement, agree=agree)
    logger.info("process %d of %d follows process 0", config.process_id, config.num_processes)
    _Follower(device).run(leader)


class _Follower:
    """Carries out commands. The last results are looked at some steps later, so that a fault here ends the process."""

    def __init__(self, device: DeviceSide) -> None:
        self._steps, self._pool = device.steps, device.pool
        self._host: _HostCopies | None = None
        self._ahead: deque[jax.Array] = deque()

    def run(self, leader: Connection) -> None:
        while True:
            name, *arguments = leader.receive()
            if name == "end":
                self._steps.wait()
                return
            self._obey(name, arguments)

    def _obey(self, name: str, arguments: list[Any]) -> None:
        steps = self._steps
        match name:
            case "sample":
                floats, ints, flags, mask = arguments
                self._watch(steps.sample(SamplingRows(floats, ints, flags), mask).tokens)
            case "prepare_sample":
                steps.prepare_sample(SamplingRows(*arguments))
            case _ if name in _PLAIN:
                getattr(steps, name)(*arguments)
            case "host":
                self._host = _HostCopies(self._pool, *arguments)
                for _ in self._pool.warm_up():
                    pass
            case "save" | "load":
                assert self._host is not None, "copies without a host pool"
                getattr(self._host, name)(*arguments)
            case _:
                raise ChannelError(f"process 0 gives the unknown command {name!r}")

    def _watch(self, result: jax.Array) -> None:
        self._ahead.append(result)
        if len(self._ahead) > MOST_AHEAD:
            jax.block_until_ready(self._ahead.popleft())


class _HostCopies:
    """The host's rows of this process, copied to and from in the order of the commands."""

    def __init__(self, pool: DevicePool, rows: int) -> None:
        self._pool = pool
        self._host = HostPool(rows, pool.page_bytes)
        self._under_way: deque[tuple[Gathered, list[int]]] = deque()

    def save(self, pages: list[int], rows: list[int]) -> None:
        while (gathered := self._pool.gather(pages)) is None:
            self._finish_oldest()
        self._under_way.append((gathered, rows))
        while self._under_way[0][0].is_ready() and len(self._under_way) > 1:
            self._finish_oldest()

    def load(self, rows: list[int], pages: list[int]) -> None:
        # What these rows hold may still be on its way.
        while self._under_way:
            self._finish_oldest()
        staging = _wait_for(self._pool.take_staging)
        self._host.get(rows, staging.rows)
        self._pool.upload(staging, len(rows))
        self._pool.scatter(staging, pages)

    def _finish_oldest(self) -> None:
        gathered, rows = self._under_way.popleft()
        self._host.put(gathered.rows(), rows)
        gathered.release()


def _wait_for(take: Callable[[], Any]) -> Any:
    while (taken := take()) is None:
        time.sleep(NAP)
    return taken
