"""tierax as a Ray Serve application: replicas with a server each, and requests go to the one that has their prefix.

    serve run tierax.integrations.ray_serve:app model_path=demo replicas=2

Every route of `tierax serve` is there, streams included: the ingress passes calls on to the server within a replica.
Ray's router asks `PrefixRouter` first, which prefers the replica that has seen the longest beginning of the prompt; one
that is full (`max_ongoing_requests`) leaves its requests to the others.
"""

# The packages are optional.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

from ..engine.config import ConfigError, EngineConfig
from ..serving.app import make_app
from ..serving.batch.offline import engine_thread
from ..serving.config import ServerConfig
from ..serving.server import bind, make_runner
from .affinity import PrefixAffinity
from .prefix_order import prefix_key

try:
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import (
        FIFOMixin,
        PendingRequest,
        ReplicaID,
        RequestRouter,
        RunningReplica,
    )
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
except ImportError as error:
    raise ImportError("this needs Ray Serve: pip install 'tierax[ray]'") from error

_HOP = frozenset(
    "connection content-length content-encoding host keep-alive transfer-encoding upgrade".split()
)
"""Headers of one connection only."""
MOST_ONGOING = 256
"""Requests that a replica has in hand at once."""


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request on its way to a replica."""

    method: str
    path: str
    """With its query."""
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of its answer."""

    status: int
    headers: dict[str, str]


class Replica:
    """An engine and its server, on a port of this machine alone."""

    async def __init__(self, config: EngineConfig, server: ServerConfig) -> None:  # pyright: ignore
        self._thread = engine_thread(config)
        self._runner = make_runner(make_app(self._thread, server))
        await self._runner.setup()
        self._thread.start()
        listener = bind("127.0.0.1", 0)
        await web.SockSite(self._runner, listener).start()
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._session = ClientSession(timeout=ClientTimeout(total=None), auto_decompress=False)

    async def call(self, call: Call) -> AsyncIterator[Head | bytes]:
        """The head of the answer, then its body as it comes."""
        asked = self._session.request(
            call.method, self._url + call.path, headers=call.headers, data=call.body
        )
        async with asked as answer:
            yield Head(answer.status, _passed_on(answer.headers))
            async for chunk in answer.content.iter_any():
                yield chunk

    async def check_health(self) -> None:
        """Ray replaces a replica of which this fails."""
        if not self._thread.alive:
            raise RuntimeError("the engine has stopped; its log says why")

    def __del__(self) -> None:
        # Ray calls this when a replica is to go: what waits for the disk cache is written.
        if hasattr(self, "_thread"):
            self._thread.close()


class PrefixRouter(FIFOMixin, RequestRouter):
    """Chooses a replica by what it has seen of a prompt; Ray's own choice among all where nobody has seen anything."""

    def initialize_state(self, **_: Any) -> None:
        self._affinity = PrefixAffinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        key = _key(pending_request)
        by_id = {str(replica.replica_id): replica for replica in candidate_replicas}
        home = self._affinity.home(key, by_id) if key else None
        if home is None:
            return [candidate_replicas]
        others = [replica for name, replica in by_id.items() if name != home]
        return [[by_id[home]], others] if others else [[by_id[home]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if key := _key(pending_request):
            self._affinity.note(key, str(replica_id))


class Ingress:
    """What clients talk to."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        call = Call(request.method, path, _passed_on(request.headers), await request.body())
        answer = self._replicas.call.remote(call)
        head = await anext(answer)
        return StreamingResponse(answer, head.status, head.headers)


def app(args: Mapping[str, Any]) -> Any:
    """An application for `serve.run`, or for `serve run` with `NAME=VALUE` arguments.

    `replicas` (1), `num_cpus` and `num_gpus` of each (1 and 0), `max_ongoing_requests`; all others are settings of the
    engine, by the names of `LLM`'s keywords. Raises `ConfigError`.
    """
    settings = {name: _value(value) for name, value in args.items()}
    replicas = settings.pop("replicas", 1)
    ongoing = settings.pop("max_ongoing_requests", MOST_ONGOING)
    resources = {"num_cpus": settings.pop("num_cpus", 1), "num_gpus": settings.pop("num_gpus", 0)}
    if not isinstance(replicas, int) or replicas < 1:
        raise ConfigError(f"replicas: {replicas!r} must be a whole number of at least 1")
    config = EngineConfig.create(settings.pop("model_path", "demo"), **settings)
    served = serve.deployment(
        Replica,
        name="tierax",
        num_replicas=replicas,
        max_ongoing_requests=ongoing,
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )
    # Files and batches would be of one replica only.
    ingress = serve.deployment(Ingress, name="tierax-ingress", max_ongoing_requests=4 * ongoing)
    return ingress.bind(served.bind(config, ServerConfig(data_dir="none")))


def _key(request: PendingRequest | None) -> bytes:
    if request is None or not request.args or not isinstance(call := request.args[0], Call):
        return b""
    return prefix_key(call.body)


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def _value(given: Any) -> Any:
    """What a text on a command line means."""
    words = {"true": True, "false": False}
    if not isinstance(given, str):
        return given
    return int(given) if given.isdecimal() else words.get(given, given)
