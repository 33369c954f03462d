"""`/openapi.json`: the server's own description, read off its router and off what stands beside each handler.

A route cannot be missing: methods, paths and parameters come from the router, summaries from the handlers' docstrings.
What a handler takes and gives is said by `@Documented` above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NewType, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ...engine.version import __version__
from ..core.keys import CONFIG, SERVICE
from ..http.auth import OPEN_ROUTES
from ..http.errors import json_response
from ..openai.answers import ErrorAnswer
from .fields import refine

JSON, EVENTS = "application/json", "text/event-stream"
Html = NewType("Html", str)

_MEDIA: dict[Any, str] = {str: "text/plain", Html: "text/html", bytes: "application/octet-stream"}

_ATTRIBUTE = "documented"
_REF = "#/components/schemas/{name}"
_H = TypeVar("_H", bound=Handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """A decorator that says what a handler takes and gives, as types that msgspec makes schemas of."""

    body: Any = None
    """Type of the body; None = it takes none."""
    body_media: str = JSON
    query: type[msgspec.Struct] | None = None
    """A struct with a field for each parameter after the `?`."""
    answer: Any = dict[str, Any]
    """Type of the good answer, from which its media type follows: text, `Html`, bytes, or else JSON. None = no content."""
    status: int = 200
    """Status of the good answer."""
    events: Any = None
    """Type of each event's data where the answer may be streamed."""
    error: Any = ErrorAnswer
    """Type of the answers from 400 on."""
    others: Mapping[int, Any] = field(default_factory=dict)
    """Types of the answers with further statuses."""

    @property
    def media(self) -> str:
        """Media type of the good answer."""
        return media_of(self.answer)

    def __call__(self, handler: _H) -> _H:
        setattr(handler, _ATTRIBUTE, self)
        return handler

    def answers(self) -> list[Any]:
        """Types of all that may be answered."""
        found = [self.answer, self.events, self.error, *self.others.values()]
        return [kind for kind in found if kind is not None]


def media_of(kind: Any) -> str:
    """Media type of an answer of this type."""
    return _MEDIA.get(kind, JSON)


def entry_of(handler: Any) -> Documented | None:
    """What was said of a handler; None if nothing was."""
    return getattr(handler, _ATTRIBUTE, None)


@Documented()
async def openapi(request: web.Request) -> web.Response:
    """This document."""
    return json_response(document(request.app))


def document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of an application."""
    routes = list(documented_routes(app.router))
    entries = [entry_of(route.handler) or Documented() for route in routes]
    schemas, components = _schemas(kind for entry in entries for kind in entry.answers())
    bodies, parts = _schemas(entry.body for entry in entries if entry.body is not None)
    for part in parts.values():
        refine(part, app[SERVICE].engine.model_name)
    schemas, components = schemas | bodies, components | parts
    paths: dict[str, dict[str, Any]] = {}
    for route, entry in zip(routes, entries, strict=True):
        path = _path(route)
        operation = _operation(route.method, path, route.handler, entry, schemas)
        if app[CONFIG].locked and path not in OPEN_ROUTES:
            operation["security"] = [{"bearer": []}]
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tierax",
            "version": __version__,
            "description": "LLM inference with a KV cache in tiers. Fields that a body does not list are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def documented_routes(router: web.UrlDispatcher) -> Iterator[web.AbstractRoute]:
    """The routes that the document tells of: all but HEAD, which answers as GET does, and CORS' OPTIONS."""
    return (route for route in router.routes() if route.method not in ("HEAD", "OPTIONS"))


def _schemas(kinds: Iterable[Any]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """The schema of each type, and the named ones that they refer to."""
    found = list(dict.fromkeys(kinds))
    made, components = msgspec.json.schema_components(found, ref_template=_REF)
    return dict(zip(found, made, strict=True)), components


def _path(route: web.AbstractRoute) -> str:
    assert route.resource is not None
    return route.resource.canonical


def _operation(
    method: str,
    path: str,
    handler: Any,
    entry: Documented,
    schemas: dict[Any, dict[str, Any]],
) -> dict[str, Any]:
    summary, _, description = (handler.__doc__ or path).strip().partition("\n")
    operation: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {path}")),
        "summary": summary,
        "description": re.sub(r"\s*\n\s*", " ", description.strip()),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if entry.query is not None:
        parameters += _query_parameters(entry.query)
    if parameters:
        operation["parameters"] = parameters
    if entry.body is not None:
        content = {entry.body_media: {"schema": schemas[entry.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    good = _content(entry.answer, schemas)
    if entry.events is not None:
        good[EVENTS] = {"schema": _event(schemas[entry.events])}
    bad = _content(entry.error, schemas)
    operation["responses"] = {
        str(entry.status): {"description": "Done.", "content": good},
        "4XX": {
            "description": "The request cannot be served as it is; the message says why.",
            "content": bad,
        },
        "5XX": {"description": "The server cannot serve it now, or failed at it.", "content": bad},
    }
    for status, kind in entry.others.items():
        description = HTTPStatus(status).phrase.capitalize() + "."
        operation["responses"][str(status)] = {
            "description": description,
            "content": _content(kind, schemas),
        }
    return operation


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream; those of OpenAI's older protocols have no name, and end with one whose data is `[DONE]`."""
    text = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    either = {"anyOf": [{"const": "[DONE]"}, text]}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": either},
        "required": ["data"],
    }


def _content(kind: Any, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    return {} if kind is None else {media_of(kind): {"schema": {} if kind is bytes else schemas[kind]}}


def _query_parameters(query: type[msgspec.Struct]) -> Iterator[dict[str, Any]]:
    schema = msgspec.json.schema(query)["$defs"][query.__name__]
    for name, kind in schema["properties"].items():
        yield {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": kind}
