"""Process 0 of several: it schedules and serves, and tells the others of every command to the devices before its own.

jax runs one program over the devices of all processes when each process dispatches it, all in the same order. So the
others (`follower`) need no scheduler: they carry out the stream of commands, and leave the results to process 0.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .channel import ChannelError, Connection, accept, listen
from .config import ConfigError, EngineConfig

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = 300.0
"""Seconds in which all processes must have started."""
LOAD_TIMEOUT = 3600.0
"""Seconds in which they must have loaded their parts of the model."""
LOST_EXIT_CODE = 3
"""Of a process that has lost another one."""


def join_processes(config: EngineConfig) -> None:
    """Makes the devices of all processes jax's, where there are several. Before anything asks jax for a device.

    Raises `ConfigError` when the processes do not find each other.
    """
    if config.num_processes == 1 or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            config.coordinator_address,
            config.num_processes,
            config.process_id,
            initialization_timeout=int(JOIN_TIMEOUT),
            # Our own channel is quicker to notice a loss; this is for what it cannot see.
            heartbeat_timeout_seconds=25,
            shutdown_timeout_seconds=20,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"coordinator_address: {config.coordinator_address}: {error}") from error


def leave_processes() -> None:
    """The opposite of `join_processes`, to be called by all at about the same time."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def dismiss(config: EngineConfig) -> None:
    """Lets the other processes end, where there is nothing to do for them. Raises `ConfigError` when they do not come."""
    join_processes(config)
    Leader(config, first="dismissed").close()


def end_process(reason: str) -> None:
    """Ends this process at once: a device may wait for the lost one's for ever, and no thread could stop that."""
    sys.stderr.write(f"tierax: {reason}; the model cannot run without it, so this process ends too\n")
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    logging.shutdown()
    os._exit(LOST_EXIT_CODE)


class Leader:
    """The connections to all followers. `close` lets them end."""

    def __init__(self, config: EngineConfig, first: str = "begin") -> None:
        """Waits for the others, and tells them the first command. Raises `ConfigError` when they do not come."""
        self._followers: list[Connection] = []
        self._listeners: list[threading.Thread] = []
        self._met = threading.Semaphore(0)
        # A script that does not close its engine must not leave the others waiting.
        atexit.register(self.close)
        host, port = config.channel_address
        try:
            with listen(host, port) as listener:
                while len(self._followers) < config.num_processes - 1:
                    sock = accept(listener, JOIN_TIMEOUT)
                    self._followers.append(Connection(sock, "another process", end_process))
            for follower in self._followers:
                process = follower.receive(JOIN_TIMEOUT)[0]
                follower.peer = f"process {process} of {config.num_processes}"
            self.announce(first)
        except ChannelError as error:
            self.close()
            raise ConfigError(f"coordinator_address: {error}") from None

    @property
    def others(self) -> int:
        return len(self._followers)

    def agree(self, pages: int, settings: Mapping[str, Any]) -> int:
        """Pages that fit in every process, told to all. Raises `ConfigError` when one was started with other settings."""
        try:
            answers = [follower.receive(LOAD_TIMEOUT) for follower in self._followers]
        except ChannelError as error:
            raise ConfigError(f"num_processes: {error}") from None
        for follower, (_, theirs) in zip(self._followers, answers, strict=True):
            other = [name for name in settings if theirs.get(name) != settings[name]]
            if other:
                listed = "; ".join(
                    f"{name} is {theirs.get(name)!r}, here {settings[name]!r}" for name in other
                )
                self.close()
                raise ConfigError(f"num_processes: {follower.peer} was started otherwise: {listed}")
        pages = min(pages, *(there for there, _ in answers))
        self.announce("pages", pages)
        return pages

    def announce(self, command: str, *arguments: Any) -> None:
        """Tells all followers of a command that is carried out here as well."""
        for follower in self._followers:
            follower.send(command, *arguments)

    def ask(self, command: str, *arguments: Any) -> None:
        """Gives a command whose answer is a problem, or none. Raises `ConfigError` with the problem of a process."""
        self.announce(command, *arguments)
        for follower in self._followers:
            try:
                (problem,) = follower.receive(LOAD_TIMEOUT)
            except ChannelError as error:
                raise ConfigError(f"num_processes: {error}") from None
            if problem:
                self.close()
                raise ConfigError(f"{problem} ({follower.peer})")

    def listen(self, hear: Callable[..., None]) -> None:
        """From now on whatever the others say, but for what `meet` waits for, is handed to `hear`, in a thread for each of them."""

        def run(follower: Connection) -> None:
            with contextlib.suppress(ChannelError):
                while True:
                    message = follower.receive()
                    if message == ["met"]:
                        self._met.release()
                    else:
                        hear(*message)

        for follower in self._followers:
            thread = threading.Thread(
                target=run, args=(follower,), name=f"hears {follower.peer}", daemon=True
            )
            self._listeners.append(thread)
            thread.start()

    def meet(self) -> None:
        """Waits until the others have carried out all commands so far."""
        if not self._listeners:
            self.listen(lambda *message: None)
        self.announce("meet")
        # No timeout: who is lost ends this process.
        for _ in self._followers:
            self._met.acquire()

    def close(self) -> None:
        """Lets the followers end. A second time it does nothing."""
        atexit.unregister(self.close)
        for follower in self._followers:
            follower.finish("end")
        for thread in self._listeners:
            thread.join()
        leave_processes()
