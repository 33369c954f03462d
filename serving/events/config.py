"""Where KV events go, and in which form. Pure: no zmq."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec

from ...engine.config import ConfigError

ENCODINGS = ("array", "map")
_BINDS = ("*", "0.0.0.0", "[::]")
"""Hosts that mean this machine: there the publisher binds; to any other host it connects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """The settings of a publisher, by the names that vLLM and SGLang give them. A bad value raises `ConfigError`."""

    endpoint: str = "tcp://*:5557"
    """Of the PUB socket: bound for `tcp://*:PORT`, `tcp://0.0.0.0:PORT`, `ipc://` and `inproc://`, else connected to."""
    replay_endpoint: str | None = None
    """Of the ROUTER socket that sends again what was missed; always bound. None = there is none."""
    topic: str = ""
    """First frame of every message; `kv@POD@MODEL` for llm-d."""
    buffer_steps: int = 10_000
    """Messages that are kept to be sent again."""
    hwm: int = 100_000
    """Messages that may wait for a subscriber before it misses some."""
    max_queue_size: int = 100_000
    """Events that may wait to be published."""
    encoding: str = "array"
    """Of an event: `array` (its tag and fields in order) or `map` (fields by name, the tag under `type`)."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not _is_endpoint(value):
                raise ConfigError(
                    f"kv_events: {name} {value!r} must be like tcp://*:5557 or ipc:///run/tierax-events"
                )
        if self.replay_endpoint is not None and self.replay_endpoint == self.endpoint:
            raise ConfigError("kv_events: endpoint and replay_endpoint must differ")
        if not isinstance(self.topic, str):
            raise ConfigError(f"kv_events: topic {self.topic!r} must be a text")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"kv_events: {name} {value!r} must be a whole number of at least 1")
        if self.encoding not in ENCODINGS:
            raise ConfigError(f"kv_events: encoding {self.encoding!r} must be one of {', '.join(ENCODINGS)}")

    @property
    def binds(self) -> bool:
        """Whether the PUB socket waits for subscribers; otherwise it goes to one that waits."""
        kind, _, place = self.endpoint.partition("://")
        return kind != "tcp" or place.rpartition(":")[0] in _BINDS

    def of_rank(self, rank: int) -> KvEventsConfig:
        """The settings for one of several copies of the model: ports are counted up from these, other names get a suffix.
        Raises `ConfigError` where there is no such port."""
        if rank == 0:
            return self
        replay = None if self.replay_endpoint is None else _of_rank(self.replay_endpoint, rank)
        return dataclasses.replace(self, endpoint=_of_rank(self.endpoint, rank), replay_endpoint=replay)

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig | None:
        """The settings out of an endpoint alone, or out of a JSON object of them, as other engines take it:
        `{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": …}`. None: it says that nothing is published.

        Raises `ConfigError`.
        """
        if not text.lstrip().startswith("{"):
            return cls(endpoint=text)
        try:
            fields: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"kv_events: not a JSON object: {error}") from None
        publisher, enabled = fields.pop("publisher", "zmq"), fields.pop("enable_kv_cache_events", True)
        if publisher not in ("zmq", "null"):
            raise ConfigError(f"kv_events: publisher {publisher!r} must be zmq or null")
        if not isinstance(enabled, bool):
            raise ConfigError(f"kv_events: enable_kv_cache_events {enabled!r} must be true or false")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ConfigError(f"kv_events: there is no {name!r}; known: {', '.join(known)}")
        config = cls(**fields)
        return config if enabled and publisher == "zmq" else None


def _of_rank(endpoint: str, rank: int) -> str:
    kind, _, place = endpoint.partition("://")
    if kind != "tcp":
        return f"{endpoint}_dp{rank}"
    host, _, port = place.rpartition(":")
    return f"tcp://{host}:{int(port) + rank}"


def _is_endpoint(value: object) -> bool:
    if not isinstance(value, str):
        return False
    kind, _, place = value.partition("://")
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        return bool(host) and port.isdecimal() and 0 < int(port) < 65536
    return kind in ("ipc", "inproc") and bool(place)
