"""API keys: every route needs one, whether it exists or not, except the two probes."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..engine.config import ConfigError
from .config import ServerConfig
from .errors import ApiError

OPEN_ROUTES = frozenset({"/health", "/ready"})
_SALT: web.RequestKey[str | None] = web.RequestKey("salt")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, and the salt that keeps its requests' KV apart; None = that of all keys without one."""

    key: str
    salt: str | None = None


def load_keys(config: ServerConfig) -> tuple[ApiKey, ...]:
    """All keys of a server, those of its key file included. Raises `ConfigError` for a file that cannot be used."""
    keys = [ApiKey(key) for key in config.api_keys]
    if config.api_key_file is not None:
        keys += _read_keys(Path(config.api_key_file).expanduser())
    if len({key.key for key in keys}) < len(keys):
        raise ConfigError("api_key_file: a key is given twice")
    return tuple(keys)


def auth_middleware(keys: tuple[ApiKey, ...]) -> Middleware:
    """Refuses requests without `Authorization: Bearer <one of the keys>` before their body is read."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in OPEN_ROUTES:
            return await handler(request)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # The scheme's name is case-insensitive by the HTTP rules, the key is not.
        if scheme.lower() != "bearer" or not given:
            raise ApiError(401, "Send the API key as `Authorization: Bearer KEY`.", code="missing_api_key")
        raw = given.strip().encode("utf-8", "surrogateescape")
        # All are compared, so that the time does not tell which one it was.
        found = [key for key in keys if hmac.compare_digest(raw, key.key.encode())]
        if not found:
            raise ApiError(401, "The API key is wrong.", code="invalid_api_key")
        request[_SALT] = found[0].salt
        return await handler(request)

    return check


def namespace_of(request: web.Request, cache_salt: str | None = None) -> bytes:
    """Namespace of the KV of a request with this salt of its own."""
    return salted(request.get(_SALT), cache_salt)


def salted(key_salt: str | None, cache_salt: str | None) -> bytes:
    """Namespace of KV that only requests with the same salts share: of the API key, and of the request itself.

    Every part is typed and length-framed, so that no two different pairs give the same bytes.
    """
    return _frame(b"key", key_salt) + _frame(b"salt", cache_salt)


def check_operator(request: web.Request) -> None:
    """Raises `ApiError` 403 for a key with a salt: what concerns everybody's cache is not its business."""
    if request.get(_SALT) is not None:
        message = "This concerns the cache of all tenants: it needs an API key without a salt."
        raise ApiError(403, message, code="operator_only")


def tenant_of(request: web.Request) -> bytes | None:
    """What the namespaces of this key's requests begin with; None for a key without a salt, which sees all."""
    salt = request.get(_SALT)
    return None if salt is None else _frame(b"key", salt)


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
    keys = _of_json(path, text) if text.lstrip().startswith("{") else _of_lines(path, text)
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
            raise ConfigError(f"api_key_file: {path}, line {number}: write KEY, or KEY SALT")
        keys.append(ApiKey(*words))
    return keys


def _of_json(path: Path, text: str) -> list[ApiKey]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"api_key_file: {path} is not valid JSON: {error}") from error
    for key, salt in found.items():
        if not key.strip() or not (salt is None or (isinstance(salt, str) and salt)):
            raise ConfigError(
                f'api_key_file: {path}: write {{"KEY": "SALT"}}, or null for a key without a salt'
            )
    return [ApiKey(key, salt) for key, salt in found.items()]
