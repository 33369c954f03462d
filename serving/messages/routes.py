"""`/v1/messages`: a thin translation between Anthropic's Messages and the core."""

from __future__ import annotations

from aiohttp import web

from ..core.blocks import Blocks
from ..core.conversation import Prompt, make_call, make_prompt
from ..core.keys import SERVICE
from ..core.service import Service
from ..http.body import read_as
from ..http.errors import json_response
from ..http.named_events import respond
from ..openai.bodies import sampling_params
from ..openapi.document import Documented
from ..parsers.choose import make_parser
from .answers import MessageAnswer, MessageError, MessageEvent, TokenCount
from .body import CountBody, MessagesBody, conversation_of, decode_count, decode_messages
from .form import MessageForm


def add_message_routes(router: web.UrlDispatcher) -> None:
    """Adds all routes of this module."""
    router.add_post("/v1/messages", create)
    router.add_post("/v1/messages/count_tokens", count_tokens)


@Documented(body=MessagesBody, answer=MessageAnswer, events=MessageEvent, error=MessageError)
async def create(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    service = request.app[SERVICE]
    started = service.clock()
    service.check_ready()
    body = await read_as(request, decode_messages)
    service.check_model(body.model)
    prompt = await service.in_worker(_prompt, service, body)
    params = sampling_params(body, max_tokens=body.max_tokens, logprobs=None)
    call = make_call(request, body, prompt, params, prefix="msg", param="messages", started=started)
    async with service.generate(call) as generation:
        form = MessageForm(service.engine, generation, Blocks(make_parser(prompt.style)))
        return await respond(request, generation, form, stream=bool(body.stream))


@Documented(body=CountBody, answer=TokenCount, error=MessageError)
async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of a message has; nothing is generated."""
    service = request.app[SERVICE]
    body = await read_as(request, decode_count)
    service.check_model(body.model)
    prompt = await service.in_worker(_prompt, service, body)
    return json_response({"input_tokens": len(prompt.ids)})


def _prompt(service: Service, body: CountBody) -> Prompt:
    """The prompt that a body makes, for workers."""
    return make_prompt(service, conversation_of(body))
