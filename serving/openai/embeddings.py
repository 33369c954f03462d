"""`/v1/embeddings`: the mean of the model's last hidden states over a prompt's tokens, scaled to length 1."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from ...engine.reading import MeanHidden
from ...engine.request import SamplingParams
from ..core.generation import Call
from ..core.keys import SERVICE
from ..http.auth import namespace_of, priority_of
from ..http.body import read_as
from ..http.errors import bad_request
from ..openapi.document import Documented
from .bodies import Prompts, check_priority, check_salt, check_truncation, decode, prompts_of
from .completions import encode_all

MAX_INPUTS = 2048


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Body of `/v1/embeddings`."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """The model's own number, if given: nothing is cut off a vector that was not trained for it."""
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


class Embedding(TypedDict):
    """One input's vector: numbers, or base64 of 32-bit floats, lowest byte first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(TypedDict):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@Documented(body=EmbeddingBody, answer=EmbeddingAnswer)
async def embeddings(request: web.Request) -> web.Response:
    """Makes a vector of each input."""
    service = request.app[SERVICE]
    started = service.clock()
    service.check_ready()
    body = await read_as(request, partial(decode, kind=EmbeddingBody))
    service.check_model(body.model)
    check_salt(body.cache_salt)
    check_priority(body.priority)
    check_truncation(body.truncate_prompt_tokens)
    _check_dimensions(body.dimensions, service.engine.model_config.hidden_size)

    def encode() -> list[list[int]]:
        given = prompts_of(body.input, "input")
        if len(given) > MAX_INPUTS:
            raise bad_request(f"{len(given)} inputs are more than {MAX_INPUTS} in one call.", "input")
        keep, special = body.truncate_prompt_tokens, body.add_special_tokens is not False
        return encode_all(service, given, "input", keep=keep, add_special=special)

    call = Call(
        prefix="embd",
        prompts=await service.in_worker(encode),
        params=SamplingParams(max_tokens=0),
        namespace=namespace_of(request, body.cache_salt),
        priority=priority_of(request, body.priority),
        param="input",
        embeds=True,
        started=started,
    )
    async with service.generate(call) as generation:
        async for _ in generation.batches():
            pass
        vectors = [
            one.reading.embedding for one in generation.requests if isinstance(one.reading, MeanHidden)
        ]
        tokens = generation.usage()["prompt_tokens"]
    as_text = body.encoding_format == "base64"
    # Many long vectors are megabytes of JSON.
    told = await service.in_worker(_encoded, vectors, as_text, service.engine.model_name, tokens)
    return web.Response(body=told, content_type="application/json")


def _check_dimensions(dimensions: int | None, size: int) -> None:
    if dimensions not in (None, size):
        message = f"dimensions: this model's embeddings have {size} numbers, and cannot be shortened."
        raise bad_request(message, "dimensions", "unsupported_parameter")


def _encoded(vectors: list[NDArray[np.float32]], as_text: bool, model: str, tokens: int) -> bytes:
    def told(vector: NDArray[np.float32]) -> Any:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()

    data: list[Embedding] = [
        {"object": "embedding", "index": index, "embedding": told(vector)}
        for index, vector in enumerate(vectors)
    ]
    usage: EmbeddingUsage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer: EmbeddingAnswer = {"object": "list", "data": data, "model": model, "usage": usage}
    return msgspec.json.encode(answer)
