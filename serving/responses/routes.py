"""`/v1/responses`: a thin translation between OpenAI's Responses and the core, and what was stored of them."""

from __future__ import annotations

from array import array
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from ..core.blocks import Blocks
from ..core.conversation import make_call
from ..core.keys import NOW, RESPONSES, SERVICE
from ..core.service import Service
from ..http.auth import namespace_of
from ..http.body import read_as
from ..http.errors import bad_request, json_response
from ..http.named_events import respond
from ..openai.bodies import sampling_params
from ..openapi.document import Documented
from ..parsers.choose import make_parser
from .answers import InputItems, ResponseAnswer, ResponseDeleted, ResponseEvent
from .body import ResponsesBody, decode_responses
from .form import ResponseForm
from .items import Item, listed_items, messages_of
from .prompt import ResponsePrompt, response_prompt
from .store import Continuation, Running, Stored


class ItemsQuery(msgspec.Struct):
    """Parameters of `/v1/responses/{response_id}/input_items`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def add_response_routes(router: web.UrlDispatcher) -> None:
    """Adds all routes of this module."""
    router.add_post("/v1/responses", create)
    router.add_get("/v1/responses/{response_id}", retrieve)
    router.add_delete("/v1/responses/{response_id}", delete)
    router.add_post("/v1/responses/{response_id}/cancel", cancel)
    router.add_get("/v1/responses/{response_id}/input_items", input_items)


@Documented(body=ResponsesBody, answer=ResponseAnswer, events=ResponseEvent)
async def create(request: web.Request) -> web.StreamResponse:
    """Answers an input, or goes on from `previous_response_id`."""
    service, store = request.app[SERVICE], request.app[RESPONSES]
    started = service.clock()
    service.check_ready()
    body, body_bytes = await read_as(request, lambda raw: (decode_responses(raw), len(raw)))
    service.check_model(body.model)
    tenant = namespace_of(request)
    previous = None
    if body.previous_response_id is not None:
        previous = store.get(body.previous_response_id, tenant, "previous_response_id").continuation
        # What was apart from others stays apart from them.
        body.cache_salt = body.cache_salt or previous.cache_salt

    def ask() -> tuple[list[Item], ResponsePrompt]:
        items = listed_items(body.input)
        return items, response_prompt(service, body, messages_of(items), previous)

    items, asked = await service.in_worker(ask)
    # The engine clips to what the context leaves.
    max_tokens = body.max_output_tokens or service.engine.context_length
    params = sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    call = make_call(request, body, asked.prompt, params, prefix="resp", param="input", started=started)
    async with service.generate(call) as generation:
        blocks = Blocks(make_parser(asked.prompt.style))
        form = ResponseForm(service.engine, body, generation, blocks, request.app[NOW])

        def keep() -> None:
            if body.store is not False:
                continuation = _continuation(service, body, asked, form)
                store.put(Stored(tenant, form.answer(), items, continuation, body_bytes))

        with store.running(Running(tenant, generation, form)):
            return await respond(request, generation, form, stream=bool(body.stream), done=keep)


@Documented(answer=ResponseAnswer)
async def retrieve(request: web.Request) -> web.Response:
    """A response that is being made, or was stored."""
    if request.query.get("stream", "false") != "false":
        raise bad_request("stream: a stored response cannot be streamed.", "stream", "unsupported_parameter")
    response_id, tenant = request.match_info["response_id"], namespace_of(request)
    store = request.app[RESPONSES]
    if (running := store.get_running(response_id, tenant)) is not None:
        return json_response(running.form.response("in_progress"))
    return json_response(store.get(response_id, tenant).response)


@Documented(answer=ResponseDeleted)
async def delete(request: web.Request) -> web.Response:
    """Forgets a stored response; those that continue it remain."""
    response_id = request.match_info["response_id"]
    request.app[RESPONSES].delete(response_id, namespace_of(request))
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


@Documented(answer=ResponseAnswer)
async def cancel(request: web.Request) -> web.Response:
    """Ends a response that is being made where it is."""
    response_id, tenant = request.match_info["response_id"], namespace_of(request)
    store = request.app[RESPONSES]
    if (running := store.get_running(response_id, tenant)) is None:
        store.get(response_id, tenant)
        raise bad_request("The response has ended already.", "response_id", "response_ended")
    running.generation.cut()
    return json_response(running.form.response("cancelled"))


@Documented(query=ItemsQuery, answer=InputItems)
async def input_items(request: web.Request) -> web.Response:
    """The input of a stored response, a page at a time; that of responses before it is not repeated."""
    query = _query(request)
    stored = request.app[RESPONSES].get(request.match_info["response_id"], namespace_of(request))
    items = stored.input_items if query.order == "asc" else stored.input_items[::-1]
    if query.after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == query.after), None)
        if place is None:
            raise bad_request(f"after: there is no item {query.after[:100]!r}.", "after")
        items = items[place + 1 :]
    page = items[: query.limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


def _query(request: web.Request) -> ItemsQuery:
    given = {name: value for name, value in request.query.items() if name in ItemsQuery.__struct_fields__}
    try:
        return msgspec.convert(given, ItemsQuery, strict=False)
    except msgspec.ValidationError as error:
        raise bad_request(f"Bad query: {error}.") from None


def _continuation(
    service: Service, body: ResponsesBody, asked: ResponsePrompt, form: ResponseForm
) -> Continuation:
    token_ids = form.blocks.token_ids
    ended = form.blocks.finish_reason == "stop" and token_ids[-1] in service.engine.end_ids
    return Continuation(
        messages=asked.messages,
        answer=messages_of(form.answer()["output"]),
        frame=asked.frame,
        # The template writes the end of the answer itself.
        token_ids=array("i", asked.prompt.ids + token_ids[: len(token_ids) - ended]),
        cache_salt=body.cache_salt,
    )
