"""The lines of a batch answered by engines on a Ray cluster: what `tierax batch --ray` runs."""

# The package is optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from ..engine.config import ConfigError, EngineConfig
from ..serving.batch.lines import Line
from ..serving.batch.offline import Answerer, answer_file, engine_thread, local_answerer
from .spread import WorkerDied

LOCAL = "local"
"""The address that stands for a cluster of this machine alone, made for the run."""
PATIENCE = 10.0
"""Seconds in which a cluster must accept a connection."""
WAIT = 5.0
"""Seconds after which `wait` looks again whether it was interrupted."""


def check_packages() -> None:
    """Raises `ConfigError` when the package is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ConfigError("ray: this needs Ray: pip install 'tierax[ray]'") from None


def check_address(address: str) -> None:
    """Raises `ConfigError` when nobody listens at `HOST:PORT` or `ray://HOST:PORT`: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"ray: {address}: nothing that listens there: {reason}") from None


class BatchWorker:
    """An engine in a process of its own, somewhere on the cluster: to be made an actor of."""

    def __init__(self, config: EngineConfig, max_line: int) -> None:
        self._config = config
        self._max_line = max_line
        self._engine = AsyncExitStack()
        self._started = asyncio.Event()
        self._answer: Answerer | None = None

    async def start(self) -> str | None:
        """Loads the model. Returns what keeps it from that, None if nothing does."""
        try:
            thread = await asyncio.to_thread(engine_thread, self._config)
            self._answer = await self._engine.enter_async_context(local_answerer(thread, self._max_line))
        except Exception as error:
            return str(error) or type(error).__name__
        finally:
            self._started.set()
        return None

    async def answer(self, lines: list[Line]) -> list[bytes]:
        """The output lines, in any order."""
        await self._started.wait()
        if self._answer is None:
            raise RuntimeError("the engine could not be loaded")
        output: list[bytes] = []
        await answer_file(iter(lines), (), self._answer, output.append, concurrency=len(lines))
        return output

    async def stop(self) -> None:
        """Lets writes to a disk cache end."""
        await self._engine.aclose()


class RayWorkers:
    """`spread.Workers` as actors of a cluster that is connected to."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        """`make` makes one more actor of `BatchWorker`. Raises `ConfigError` if their settings do not fit."""
        self.count = count
        self._make = make
        self._actors = [make() for _ in range(count)]
        self._starts = [actor.start.remote() for actor in self._actors]

    def check(self) -> None:
        """Waits for the first engine to be loaded. Raises `ConfigError` if its settings do not fit, `WorkerDied`."""
        import ray

        ready, _ = ray.wait(self._starts, num_returns=1)
        problem = self._get(ready[0])
        if problem is not None:
            raise problem if isinstance(problem, WorkerDied) else ConfigError(problem)

    def submit(self, worker: int, lines: list[Line]) -> Hashable:
        return self._actors[worker].answer.remote(lines)

    def wait(self, pieces: Sequence[Any]) -> list[tuple[Hashable, list[bytes] | WorkerDied]]:
        import ray

        ready: list[Any] = []
        while not ready:
            ready, _ = ray.wait(list(pieces), num_returns=1, timeout=WAIT)
        return [(piece, self._get(piece)) for piece in ready]

    def replace(self, worker: int) -> None:
        import ray

        ray.kill(self._actors[worker])
        self._actors[worker] = self._make()
        self._starts[worker] = self._actors[worker].start.remote()

    def stop(self, timeout: float) -> None:
        """Lets engines end properly within `timeout` seconds, for the sake of their disk caches."""
        import ray

        stops = [actor.stop.remote() for actor in self._actors]
        ray.wait(stops, num_returns=len(stops), timeout=timeout)
        for actor in self._actors:
            ray.kill(actor)

    def _get(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            # An actor that is gone, or an engine that has stopped in it: either way it answers nothing more.
            return WorkerDied(str(error).strip().splitlines()[0][:300])


@contextmanager
def ray_workers(
    config: EngineConfig, address: str, *, count: int | None, cpus: float, max_line: int
) -> Iterator[RayWorkers]:
    """Engines on the cluster at `address` (`auto`, `ray://HOST:10001`, `HOST:6379`, or `local` for one of this machine's
    own), until the end of the `with` statement.

    `count`: None = one per accelerator, else one per machine. `cpus`: what each asks of its machine.
    Raises `ConfigError` for a cluster that is not there, or settings that do not fit.
    """
    check_packages()
    check_address(address)
    import ray

    try:
        where = {"include_dashboard": False} if address == LOCAL else {"address": address}
        ray.init(**where, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, ValueError, TimeoutError) as error:
        raise ConfigError(f"ray: {address}: {str(error).splitlines()[0]}") from None
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        machines = sum(node["Alive"] for node in ray.nodes())
        actor = ray.remote(num_cpus=cpus, num_gpus=1 if gpus else 0)(BatchWorker)
        workers = RayWorkers(lambda: actor.remote(config, max_line), count or gpus or machines)
        try:
            workers.check()
            yield workers
        finally:
            workers.stop(timeout=30.0)
    finally:
        ray.shutdown()
