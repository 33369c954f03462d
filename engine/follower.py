"""A process other than 0: its own part of the model and of every page, and commands from process 0 until the end."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import jax

from ..models.source import resolve_model
from .channel import ChannelError, Connection, connect
from .compile_counter import use_compile_cache
from .config import ConfigError, EngineConfig
from .device_side import DeviceSide
from .disk_tier import open_disk_as_told
from .follower_copies import COPIES, FollowerCopies, MemberDisk
from .leader import JOIN_TIMEOUT, LOAD_TIMEOUT, end_process, join_processes, leave_processes
from .page_share import page_share
from .placement import place
from .sampler_rows import SamplingRows

logger = logging.getLogger(__name__)

MOST_AHEAD = 4
"""Steps that are dispatched before the first of them has ended."""
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
    follower = _Follower(config, device, leader)
    try:
        follower.run()
    finally:
        follower.close()


class _Follower:
    """Carries out commands. The last results are looked at some steps later, so that a fault here ends the process."""

    def __init__(self, config: EngineConfig, device: DeviceSide, leader: Connection) -> None:
        self._config, self._device, self._leader = config, device, leader
        self._steps, self._pool = device.steps, device.pool
        self._copies: FollowerCopies | None = None
        self._disk: MemberDisk | None = None
        self._ahead: deque[jax.Array] = deque()

    def run(self) -> None:
        while True:
            name, *arguments = self._leader.receive()
            if name == "end":
                self._steps.wait()
                return
            self._obey(name, arguments)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()

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
                (rows,) = arguments
                self._copies = FollowerCopies(self._pool, rows, self._disk, self._leader)
                for _ in self._pool.warm_up():
                    pass
            case "disk":
                self._open_disk(*arguments)
            case "meet":
                self._leader.send("met")
            case _ if name in COPIES:
                assert self._copies is not None, "copies without a host pool"
                getattr(self._copies, name)(*arguments)
            case _:
                raise ChannelError(f"process 0 gives the unknown command {name!r}")

    def _open_disk(self, mark: str) -> None:
        """Before `host`: its rows will go to the disk, and come from there."""
        store, problem = open_disk_as_told(self._config, mark)
        if store is not None:
            share = page_share(self._pool, self._device.placement, self._config.process_id)
            self._disk = MemberDisk(store, share)
        self._leader.send(problem)

    def _watch(self, result: jax.Array) -> None:
        self._ahead.append(result)
        if len(self._ahead) > MOST_AHEAD:
            jax.block_until_ready(self._ahead.popleft())
