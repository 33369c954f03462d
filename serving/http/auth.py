"""API keys: every route needs one, whether it exists or not, except the two probes."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ...engine.config import ConfigError
from ..config import ServerConfig
from .errors import ApiError

OPEN_ROUTES = frozenset({"/health", "/ready"})
PRESENTED: web.RequestKey[str] = web.RequestKey("presented")
"""A key that the client need not send again, since it is logged in to the dashboard."""
METRICS_ROUTE = "/metrics"

Role = Literal["user", "admin", "metrics"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, and what it may."""

    key: str
    salt: str | None = None
    """Name of the tenant, which keeps its requests' KV apart; None = that of all keys without one."""
    max_concurrency: int | None = None
    """Calls that it may have in progress at a time."""
    priority: int | None = None
    """Of its requests that name none, and the most urgent that others may ask for; lower is sooner."""
    role: Role = "user"
    """`user`: everything but what operators keep to themselves; `admin`: everything; `metrics`: /metrics."""


class _Access(NamedTuple):
    key: ApiKey | None
    """The one that a request was let in with; None where none was needed."""
    guarded: bool
    """There is an admin key."""


_ACCESS: web.RequestKey[_Access] = web.RequestKey("access")


class _KeyRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An entry of a key file that is a JSON list."""

    key: Annotated[str, msgspec.Meta(pattern=r"^\S+$")]
    tenant: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """The same as `tenant`."""
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None


def load_keys(config: ServerConfig) -> tuple[ApiKey, ...]:
    """All keys of a server, those of its key file included. Raises `ConfigError` for a file that cannot be used."""
    keys = [ApiKey(key) for key in config.api_keys]
    if config.admin_key is not None:
        keys.append(ApiKey(config.admin_key, role="admin"))
    if config.metrics_key is not None:
        keys.append(ApiKey(config.metrics_key, role="metrics"))
    if config.api_key_file is not None:
        keys += _read_keys(Path(config.api_key_file).expanduser())
    if len({key.key for key in keys}) < len(keys):
        raise ConfigError("api_key_file: a key is given twice; every key has one tenant and one purpose")
    return tuple(keys)


def auth_middleware(keys: tuple[ApiKey, ...], *, locked: bool) -> Middleware:
    """Refuses requests without `Authorization: Bearer KEY` before their body is read.

    Unless the server is `locked`, only routes that have a key of their own need one.
    """
    guarded = any(key.role == "admin" for key in keys)
    metrics_locked = any(key.role == "metrics" for key in keys)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else None
        if route in OPEN_ROUTES:
            return await handler(request)
        given = presented_key(request)
        found = None if given is None else _find(keys, given)
        if found is None and (locked or (metrics_locked and route == METRICS_ROUTE)):
            raise _missing() if given is None else _wrong()
        if found is not None:
            for_metrics = route == METRICS_ROUTE and metrics_locked
            if found.role != "admin" and (found.role == "metrics") != for_metrics:
                raise ApiError(403, "This API key is not for this route.", code="wrong_key")
        request[_ACCESS] = _Access(found, guarded)
        return await handler(request)

    return check


def key_of(request: web.Request) -> ApiKey | None:
    """The key that a request was let in with; None on an open server."""
    access = request.get(_ACCESS)
    return None if access is None else access.key


def _find(keys: tuple[ApiKey, ...], given: str) -> ApiKey | None:
    raw = given.encode("utf-8", "surrogateescape")
    # All are compared, so that the time does not tell which one it was.
    found = [key for key in keys if hmac.compare_digest(raw, key.key.encode())]
    return found[0] if found else None


def _missing() -> ApiError:
    return ApiError(401, "Send the API key as `Authorization: Bearer KEY`.", code="missing_api_key")


def _wrong() -> ApiError:
    return ApiError(401, "The API key is wrong.", code="invalid_api_key")


def presented_key(request: web.Request) -> str | None:
    """The key that a request comes with, right or wrong; None without one."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # The scheme's name is case-insensitive by the HTTP rules, the key is not.
    if scheme.lower() == "bearer" and given.strip():
        return given.strip()
    # What Anthropic's clients send.
    return request.headers.get("X-Api-Key", "").strip() or request.get(PRESENTED)


def priority_of(request: web.Request, wanted: int | None) -> int:
    """The priority that a request gets: what it asks for, within what its key may have."""
    key = key_of(request)
    if key is None or key.priority is None:
        return wanted or 0
    return key.priority if wanted is None else max(wanted, key.priority)


def namespace_of(request: web.Request, cache_salt: str | None = None) -> bytes:
    """Namespace of the KV of a request with this salt of its own."""
    return salted(_tenant(request), cache_salt)


def salted(key_salt: str | None, cache_salt: str | None) -> bytes:
    """Namespace of KV that only requests with the same salts share: of the API key, and of the request itself.

    Every part is typed and length-framed, so that no two different pairs give the same bytes.
    """
    return _frame(b"key", key_salt) + _frame(b"salt", cache_salt)


def tenant_name(request: web.Request) -> str:
    """Whose files and batches a request may see: all keys with one salt are one tenant, those without one another."""
    return _tenant(request) or ""


def act_for(request: web.Request, tenant: str, priority: int) -> None:
    """Puts a request of the server's own making in the place of one of `tenant_name`'s tenants, not before others of
    this priority."""
    request[_ACCESS] = _Access(ApiKey("", tenant or None, priority=priority), guarded=True)


def check_operator(request: web.Request) -> None:
    """Raises `ApiError` 403 (401 without a key) to who may not do what concerns everybody.

    Where there is an admin key, it is that one alone who may; otherwise every key without a tenant.
    """
    key, access = key_of(request), request.get(_ACCESS)
    if access is None or not access.guarded:
        if _tenant(request) is not None:
            message = "This concerns all tenants: it needs an API key without one."
            raise ApiError(403, message, code="operator_only")
        return
    if key is None:
        raise _missing() if presented_key(request) is None else _wrong()
    if key.role != "admin":
        raise ApiError(403, "This concerns everybody: it needs the admin key.", code="operator_only")


def tenant_of(request: web.Request) -> bytes | None:
    """What the namespaces of this key's requests begin with; None for a key without a tenant, which sees all."""
    tenant = _tenant(request)
    return None if tenant is None else _frame(b"key", tenant)


def _tenant(request: web.Request) -> str | None:
    key = key_of(request)
    return None if key is None else key.salt


def _frame(kind: bytes, salt: str | None) -> bytes:
    if salt is None:
        return b""
    raw = salt.encode()
    return kind + b":" + len(raw).to_bytes(4, "big") + raw


def _read_keys(path: Path) -> list[ApiKey]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"api_key_file: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_key_file: {path} is not UTF-8 text: byte {error.start}") from error
    read = {"{": _of_object, "[": _of_list}.get(text.lstrip()[:1], _of_lines)
    keys = read(path, text)
    if not keys:
        raise ConfigError(f"api_key_file: {path} holds no key")
    return keys


def _of_lines(path: Path, text: str) -> list[ApiKey]:
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(f"api_key_file: {path}, line {number}: write KEY, or KEY TENANT")
        keys.append(ApiKey(words[0], words[1] if len(words) == 2 else None))
    return keys


def _of_object(path: Path, text: str) -> list[ApiKey]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"api_key_file: {path} is not valid JSON: {error}") from error
    for key, salt in found.items():
        if not key.strip() or not (salt is None or (isinstance(salt, str) and salt)):
            raise ConfigError(
                f'api_key_file: {path}: write {{"KEY": "TENANT"}}, or null for a key without a tenant'
            )
    return [ApiKey(key, salt) for key, salt in found.items()]


def _of_list(path: Path, text: str) -> list[ApiKey]:
    try:
        rows = msgspec.json.decode(text, type=list[_KeyRow])
    except msgspec.DecodeError as error:
        raise ConfigError(f"api_key_file: {path}: {error}") from error
    for row in rows:
        if row.tenant is not None and row.cache_salt is not None:
            raise ConfigError(f"api_key_file: {path}: tenant and cache_salt mean the same; give one of them")
    return [ApiKey(row.key, row.tenant or row.cache_salt, row.max_concurrency, row.priority) for row in rows]
