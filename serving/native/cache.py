"""`/flush_cache` and `/cache/*`: what operators and tenants may ask of the cache.

What concerns one's own prefixes (warm, pin, unpin, pins) is for everybody with a key; what concerns the whole cache
needs a key without a salt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from ...engine.cache_control import TIERS, Dropped, PinError
from ..core.keys import CONTROL, SERVICE
from ..core.service import Service
from ..core.warming import SaltedItem, encode_item, warm, warm_all
from ..http.auth import check_operator, namespace_of, tenant_of
from ..http.body import read_as
from ..http.errors import ApiError, bad_request, json_response
from ..openai.answers import CacheStat, FlushAnswer, FlushProblem, PinAnswer, PinList, Unpinned, WarmAnswer
from ..openai.bodies import check_salt, decode
from ..openapi.document import Documented

PATIENCE = 1.0
"""Seconds that a flush waits for pages which are on their way between the tiers, unless the caller says otherwise."""
MOST_PATIENCE = 60.0
MOST_ITEMS = 10_000
_LOOK = 0.02
"""Seconds between looks whether what was in use still is."""


class WarmBody(msgspec.Struct, kw_only=True):
    """Body of `/cache/warm`: texts or token ids, conversations, or a list of both kinds."""

    prompts: str | list[str | list[int]] | None = None
    messages: list[dict[str, Any] | list[dict[str, Any]]] | None = None
    """One conversation, or several."""
    items: list[SaltedItem] | None = None
    cache_salt: str | None = None
    """Of all that have none of their own."""


class PinBody(SaltedItem, kw_only=True):
    """Body of `/cache/pin`, and of `/cache/unpin`, which takes the pin's `id` as well."""

    id: str | None = None


class ClearBody(msgspec.Struct, kw_only=True):
    """Body of `/cache/clear`; at least one field is needed."""

    tier: str | None = None
    namespace: str | None = None


class FlushQuery(msgspec.Struct):
    """Parameters of `/flush_cache`."""

    tier: Literal["device", "host", "disk"] | None = None
    timeout: Annotated[float, msgspec.Meta(ge=0, le=MOST_PATIENCE)] = PATIENCE


def add_cache_routes(router: web.UrlDispatcher) -> None:
    """Adds all routes of this module."""
    router.add_post("/flush_cache", flush)
    router.add_get("/cache/stat", stat)
    router.add_post("/cache/clear", clear)
    router.add_post("/cache/warm", warm_prompts)
    router.add_get("/cache/pins", pins)
    router.add_post("/cache/pin", pin)
    router.add_post("/cache/unpin", unpin)


@Documented(query=FlushQuery, answer=FlushAnswer, others={409: FlushProblem})
async def flush(request: web.Request) -> web.Response:
    """Drops what nobody uses, from all tiers or from `?tier=`. 409 with the numbers when something stays."""
    check_operator(request)
    tier, patience = request.query.get("tier"), request.query.get("timeout")
    return await _drop(request, _tiers(tier), None, PATIENCE if patience is None else _seconds(patience))


@Documented(body=ClearBody, answer=FlushAnswer, others={409: FlushProblem})
async def clear(request: web.Request) -> web.Response:
    """The same by tier, by namespace, or by both, from a JSON body."""
    check_operator(request)
    body = await read_as(request, partial(decode, kind=ClearBody))
    if body.tier is None and body.namespace is None:
        raise bad_request("Give a tier, a namespace, or both; /flush_cache drops everything.", "tier")
    return await _drop(request, _tiers(body.tier), body.namespace, PATIENCE)


@Documented(answer=CacheStat)
async def stat(request: web.Request) -> web.Response:
    """Pages, bytes and hits by tier, and the namespaces with what the disk knows of them."""
    check_operator(request)
    service, control = request.app[SERVICE], request.app[CONTROL]
    found = await service.in_engine(control.stat)
    await service.in_worker(_ask_disk, service, found)
    return json_response(found)


@Documented(body=WarmBody, answer=WarmAnswer)
async def warm_prompts(request: web.Request) -> web.Response:
    """Computes prompts for the cache's sake. Items that cannot be are told of in their places; the others go on."""
    service = request.app[SERVICE]
    service.check_ready()
    body = await read_as(request, partial(decode, kind=WarmBody))
    check_salt(body.cache_salt)
    items = [(item, namespace_of(request, item.cache_salt or body.cache_salt)) for item in _items(body)]
    results: list[dict[str, Any]] = [{} for _ in items]
    async for place, result in warm_all(service, items, "items[{}]".format):
        results[place] = result
    good = [result for result in results if "error" not in result]
    return json_response(
        {
            "items": results,
            "computed_tokens": sum(result["computed_tokens"] for result in good),
            "cached_tokens": sum(result["cached_tokens"] for result in good),
            "failed": len(results) - len(good),
        }
    )


@Documented(body=PinBody, answer=PinAnswer)
async def pin(request: web.Request) -> web.Response:
    """Computes a prefix unless it is cached, and keeps its whole pages on the host."""
    service, control = request.app[SERVICE], request.app[CONTROL]
    service.check_ready()
    body, namespace = await _pin_body(request)
    ids = await service.in_worker(encode_item, service, body)
    try:
        # Before the work of computing it.
        await service.in_engine(lambda: control.check_pin(namespace, ids))
        usage = await warm(service, ids, namespace)
        pinned = await service.in_engine(lambda: control.pin(namespace, ids))
    except PinError as error:
        raise ApiError(409, str(error), code=error.code) from None
    return json_response(pinned | {"computed_tokens": usage["computed_tokens"]})


@Documented(body=PinBody, answer=Unpinned)
async def unpin(request: web.Request) -> web.Response:
    """Lets go of a pin, by its id or by its prefix. 404 if there is none."""
    service, control = request.app[SERVICE], request.app[CONTROL]
    body, namespace = await _pin_body(request)
    if body.id is None:
        ids = await service.in_worker(encode_item, service, body)
        pin_id = await service.in_engine(lambda: control.pin_id(namespace, ids))
    else:
        pin_id = body.id
    mine = await service.in_engine(lambda: _visible(request, control.list_pins()))
    if pin_id not in {shown["id"] for shown in mine}:
        raise ApiError(404, f"There is no pin {pin_id[:80]!r}.", param="id", code="pin_not_found")
    try:
        return json_response({"unpinned": await service.in_engine(lambda: control.unpin(pin_id))})
    except KeyError:
        raise ApiError(404, "The pin has gone meanwhile.", param="id", code="pin_not_found") from None


@Documented(answer=PinList)
async def pins(request: web.Request) -> web.Response:
    """What is pinned in the caller's namespaces, and the quota of all."""
    control = request.app[CONTROL]
    found = await request.app[SERVICE].in_engine(control.list_pins)
    answer: dict[str, Any] = {"pins": _visible(request, found)}
    if tenant_of(request) is None:
        pages, quota = control.pinned()
        answer |= {"pages": pages, "quota_pages": quota}
    return json_response(answer)


async def _drop(
    request: web.Request, tiers: Iterable[str], namespace: str | None, patience: float
) -> web.Response:
    service, control = request.app[SERVICE], request.app[CONTROL]
    deadline = service.clock() + patience
    total: dict[str, Dropped] = {}
    while True:
        try:
            found = await service.in_engine(lambda: control.drop(tiers, namespace))
        except KeyError:
            # A second look finds a namespace gone that the first one emptied.
            if not total:
                message = f"No namespace in the cache starts with {str(namespace)[:80]!r}."
                raise ApiError(404, message, param="namespace", code="namespace_not_found") from None
            found = {tier: Dropped(0) for tier in total}
        except ValueError as error:
            raise bad_request(f"{error}.", "namespace") from None
        for tier, dropped in found.items():
            dropped.dropped_pages += total[tier].dropped_pages if tier in total else 0
        total = found
        waits = any(not dropped.complete and dropped.reason is None for dropped in total.values())
        if not waits or service.clock() >= deadline:
            return _told(total)
        await asyncio.sleep(_LOOK)


def _told(total: dict[str, Dropped]) -> web.Response:
    tiers = {
        tier: {key: value for key, value in asdict(dropped).items() if value is not None}
        for tier, dropped in total.items()
    }
    if all(dropped.complete for dropped in total.values()):
        return json_response({"complete": True, "tiers": tiers})
    stays = [
        f"{tier}: {dropped.reason}" if dropped.reason else f"{tier}: {dropped.kept_pages} pages are in use"
        for tier, dropped in total.items()
        if not dropped.complete
    ]
    error = ApiError(409, f"Not everything was dropped ({'; '.join(stays)}).", code="in_use")
    return json_response(error.payload() | {"complete": False, "tiers": tiers}, error.status)


def _tiers(name: str | None) -> tuple[str, ...]:
    if name is None:
        return TIERS
    if name not in TIERS:
        raise bad_request(f"tier: {name[:80]!r} must be device, host or disk.", "tier")
    return (name,)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_PATIENCE:
        raise bad_request(f"timeout must be from 0 to {MOST_PATIENCE:g} seconds.", "timeout")
    return seconds


def _items(body: WarmBody) -> list[SaltedItem]:
    for given in (body.items, body.prompts if isinstance(body.prompts, list) else None, body.messages):
        if given is not None and len(given) > MOST_ITEMS:
            raise bad_request(f"{len(given)} items are more than {MOST_ITEMS} in one call.", "items")
    items = list(body.items or [])
    prompts = [body.prompts] if isinstance(body.prompts, str) else body.prompts or []
    items += [
        SaltedItem(prompt=prompt) if isinstance(prompt, str) else SaltedItem(token_ids=prompt)
        for prompt in prompts
    ]
    if body.messages:
        turns = [part for part in body.messages if isinstance(part, dict)]
        chats = [part for part in body.messages if not isinstance(part, dict)]
        if turns and chats:
            raise bad_request("messages must be one conversation, or a list of conversations.", "messages")
        items += [SaltedItem(messages=chat) for chat in chats or [turns]]
    for item in items:
        check_salt(item.cache_salt)
    if not items:
        raise bad_request("Nothing to warm: give prompts, messages or items.", "items")
    if len(items) > MOST_ITEMS:
        raise bad_request(f"{len(items)} items are more than {MOST_ITEMS} in one call.", "items")
    return items


async def _pin_body(request: web.Request) -> tuple[PinBody, bytes]:
    body = await read_as(request, partial(decode, kind=PinBody))
    check_salt(body.cache_salt)
    return body, namespace_of(request, body.cache_salt)


def _visible(request: web.Request, found: list[tuple[bytes, dict[str, Any]]]) -> list[dict[str, Any]]:
    tenant = tenant_of(request)
    return [shown for namespace, shown in found if tenant is None or namespace.startswith(tenant)]


def _ask_disk(service: Service, found: dict[str, Any]) -> None:
    """Adds what only the disk itself can tell; it may take its time, so this is for workers."""
    tiers = service.engine.tiers
    if tiers is None or tiers.store is None:
        return
    found["tiers"]["disk"]["file_system_free_bytes"] = tiers.store.free_bytes()
    for row in found["namespaces"]:
        if row["disk_pages"]:
            row["description"] = tiers.store.papers.description(bytes.fromhex(row["namespace"]))
