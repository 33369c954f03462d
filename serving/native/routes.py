"""Routes that SGLang's and vLLM's users know beside OpenAI's: tokens, aborting, and what the server says of itself."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NotRequired, TypedDict

import msgspec
from aiohttp import web

from ...engine.version import __version__
from ..core.conversation import Conversation, render
from ..core.keys import CONFIG, SERVICE
from ..core.service import Service
from ..http.auth import check_operator, tenant_of
from ..http.body import read_as
from ..http.errors import bad_request, json_response
from ..openai.bodies import decode, plain_messages
from ..openai.logprobs import token_text
from ..openapi.document import Documented
from .generate import generate

EMBEDDINGS = "mean of the last hidden states over the prompt, scaled to length 1"


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: a text, several, or a conversation."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Whether a model's begin-of-text token is put in front: as for a completion, unless there are messages."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class Tokenized(TypedDict):
    """Token ids and how many there are; lists of these where several texts were given."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`: token ids, or several lists of them."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = False


class Detokenized(TypedDict):
    """The text, under both names that clients read; a list where several were given."""

    prompt: str | list[str]
    text: str | list[str]


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`."""

    rid: str | None = None
    """The `rid` of a `/generate` call, or the id of any answer."""
    abort_all: bool = False


class Aborted(TypedDict):
    """The ids of the calls that were in progress."""

    aborted: list[str]


class ModelInfo(TypedDict):
    """The served model."""

    model: str
    model_path: str
    is_generation: bool
    embeddings: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_cache_dtype: str
    page_size: int
    eos_token_ids: list[int]
    has_chat_template: bool


class TokenizerInfo(TypedDict):
    """What a client needs that writes chat prompts itself."""

    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    chat_template: str | None


class ServerInfo(TypedDict):
    """The server; settings are for operators only, and never hold a secret. Several names are SGLang's, for its router."""

    version: str
    model: str
    served_model_name: str
    model_path: str
    ready: bool
    max_model_len: int
    max_total_tokens: int
    """For which the device has room."""
    max_running_requests: int
    dp_size: int
    load: dict[str, Any]
    engine_config: NotRequired[dict[str, Any]]
    server_config: NotRequired[dict[str, Any]]


class Load(TypedDict):
    """How much there is to do: what a balancer compares."""

    server_load: int
    """Calls in progress."""
    running: int
    waiting: int
    """Requests of the engine: as many as a call has choices."""
    kv_usage: float
    """Share of the device's pages that running requests hold."""


class RankLoad(TypedDict):
    """The same in SGLang's form, of the one replica that there is."""

    dp_rank: int
    num_reqs: int
    """Running and waiting."""
    num_waiting_reqs: int
    num_tokens: int
    """For which running requests hold pages."""


def add_native_routes(router: web.UrlDispatcher) -> None:
    """Adds all routes of this module."""
    router.add_post("/generate", generate)
    router.add_post("/tokenize", tokenize)
    router.add_post("/detokenize", detokenize)
    router.add_post("/abort_request", abort_request)
    for path in ("/model_info", "/get_model_info"):
        router.add_get(path, model_info)
    router.add_get("/tokenizer_info", tokenizer_info)
    for path in ("/server_info", "/get_server_info"):
        router.add_get(path, server_info)
    router.add_get("/load", load)
    router.add_get("/get_load", rank_loads)


@Documented(body=TokenizeBody, answer=Tokenized)
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or of a conversation, as the model would get them."""
    service = request.app[SERVICE]
    body = await read_as(request, partial(decode, kind=TokenizeBody))
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    answer = await service.in_worker(_tokenize, service, body)
    return json_response(answer)


@Documented(body=DetokenizeBody, answer=Detokenized)
async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    service = request.app[SERVICE]
    body = await read_as(request, partial(decode, kind=DetokenizeBody))
    service.check_model(body.model)

    def work() -> str | list[str]:
        lists = [ids for ids in body.tokens if isinstance(ids, list)]
        ids = [token_id for token_id in body.tokens if isinstance(token_id, int)]
        if lists and ids:
            raise bad_request("tokens must be token ids, or a list of lists of them.", "tokens")
        return [_text_of(service, one, body) for one in lists] if lists else _text_of(service, ids, body)

    text = await service.in_worker(work)
    return json_response(Detokenized(prompt=text, text=text))


@Documented(body=AbortBody, answer=Aborted)
async def abort_request(request: web.Request) -> web.Response:
    """Ends calls in progress where they are; their answers say so by the finish reason `abort`.

    A key with a tenant reaches that tenant's calls only, and `abort_all` of everybody's calls is for operators.
    """
    service = request.app[SERVICE]
    body = await read_as(request, partial(decode, kind=AbortBody))
    if not body.rid and not body.abort_all:
        raise bad_request("Give a rid, or abort_all: true.", "rid")
    tenant = tenant_of(request)
    if body.abort_all and tenant is None:
        check_operator(request)
    return json_response(Aborted(aborted=service.abort(None if body.abort_all else body.rid, tenant or b"")))


@Documented(answer=ModelInfo)
async def model_info(request: web.Request) -> web.Response:
    """The served model."""
    engine = request.app[SERVICE].engine
    model = engine.model_config
    info: ModelInfo = {
        "model": engine.model_name,
        "model_path": _shown(engine.config.model_path),
        "is_generation": True,
        "embeddings": EMBEDDINGS,
        "max_model_len": engine.context_length,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "dtype": engine.dtype,
        "kv_cache_dtype": engine.kv_dtype,
        "page_size": engine.cache.page_size,
        "eos_token_ids": sorted(engine.end_ids),
        "has_chat_template": engine.chat_template is not None,
    }
    return json_response(info)


@Documented(answer=TokenizerInfo)
async def tokenizer_info(request: web.Request) -> web.Response:
    """The tokenizer's special tokens and the chat template."""
    engine = request.app[SERVICE].engine
    tokenizer = engine.tokenizer
    info: TokenizerInfo = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "add_bos_token": tokenizer.add_bos,
        "chat_template": tokenizer.chat_template,
    }
    return json_response(info)


@Documented(answer=ServerInfo)
async def server_info(request: web.Request) -> web.Response:
    """The server's version, load and, for operators, settings."""
    service = request.app[SERVICE]
    engine = service.engine
    info: ServerInfo = {
        "version": __version__,
        "model": engine.model_name,
        "served_model_name": engine.model_name,
        "model_path": _shown(engine.config.model_path),
        "ready": service.thread.ready and not service.draining,
        "max_model_len": engine.context_length,
        "max_total_tokens": service.stats.pages_total * engine.cache.page_size,
        "max_running_requests": service.stats.slots,
        "dp_size": engine.config.dp_size,
        "load": dict(_load(service)),
    }
    if tenant_of(request) is None:
        config = request.app[CONFIG]
        info["engine_config"] = {
            name: _shown(getattr(engine.config, name)) for name in engine.config.__dataclass_fields__
        }
        info["server_config"] = {name: getattr(config, name) for name in _SHOWN_SETTINGS}
    return json_response(info)


_SHOWN_SETTINGS = (
    *("host", "port", "log_level", "max_body_size", "max_queued_requests", "request_timeout", "read_timeout"),
    *("write_timeout", "idle_timeout", "shutdown_timeout", "disk_drain_timeout", "pin_quota"),
    *("reasoning_parser", "tool_call_parser", "data_quota", "max_file_size", "batch_concurrency"),
)
"""Named one by one, so that a new setting is not shown until someone has thought about it."""


@Documented(answer=Load)
async def load(request: web.Request) -> web.Response:
    """How much the server has to do."""
    return json_response(_load(request.app[SERVICE]))


@Documented(answer=list[RankLoad])
async def rank_loads(request: web.Request) -> web.Response:
    """How much each copy of the model has to do, as SGLang's router reads it."""
    told: list[RankLoad] = []
    for rank, thread in enumerate(request.app[SERVICE].thread.replicas):
        stats = thread.stats
        told.append(
            {
                "dp_rank": rank,
                "num_reqs": stats.running + stats.waiting,
                "num_waiting_reqs": stats.waiting,
                "num_tokens": stats.pages_in_use * thread.engine.cache.page_size,
            }
        )
    return json_response(told)


def _load(service: Service) -> Load:
    stats = service.stats
    return {
        "server_load": service.open_calls,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.pages_in_use / max(1, stats.pages_total),
    }


def _shown(value: Any) -> Any:
    """A setting; what stands before the host in a URL may be a password."""
    return re.sub(r"://[^/@]*@", "://***@", value) if isinstance(value, str) else value


def _tokenize(service: Service, body: TokenizeBody) -> Tokenized:
    tokenizer = service.engine.tokenizer

    def encode(text: str, param: str, *, special: bool) -> list[int]:
        return service.encode(text, add_bos=tokenizer.add_bos and special, param=param)

    if body.messages is None:
        special = body.add_special_tokens is not False
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        lists = [encode(text, "prompt", special=special) for text in texts]
    else:
        lists = [encode(_rendered(service, body), "messages", special=bool(body.add_special_tokens))]

    def told(parts: list[Any]) -> Any:
        """What there is of each text, or of the only one."""
        return parts if isinstance(body.prompt, list) else parts[0]

    strs = [[token_text(tokenizer, token_id) for token_id in ids] for ids in lists]
    return {
        "count": told([len(ids) for ids in lists]),
        "max_model_len": service.engine.context_length,
        "tokens": told(lists),
        "token_strs": told(strs) if body.return_token_strs else None,
    }


def _rendered(service: Service, body: TokenizeBody) -> str:
    conversation = Conversation(
        messages=plain_messages(body.messages or []),
        tools=body.tools or [],
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    return render(service, conversation)


def _text_of(service: Service, ids: list[int], body: DetokenizeBody) -> str:
    vocab = service.engine.model_config.vocab_size
    for token_id in ids:
        if not 0 <= token_id < vocab:
            message = f"tokens: token id {token_id} is outside the vocabulary of {vocab}"
            raise bad_request(message[:200], "tokens")
    return service.engine.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)
