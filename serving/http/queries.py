"""Parameters after the `?` of a URL."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from .errors import bad_request

_Query = TypeVar("_Query", bound=msgspec.Struct)


def query_of(request: web.Request, kind: type[_Query]) -> _Query:
    """The parameters as a struct; unknown ones are ignored. Raises `ApiError` 400, naming the parameter."""
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise bad_request(f"{name}: {text[:1].lower()}{text[1:]}.", name) from None
