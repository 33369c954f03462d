"""Prompts that are computed for the cache's sake: what a `/cache/warm` call, a pin or a line of a warm-up file names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...engine.config import ConfigError
from ...engine.request import SamplingParams
from ..http.errors import ApiError, as_api_error, bad_request
from ..openai.bodies import check_salt, decode, plain_messages
from .conversation import Conversation, make_prompt
from .generation import Call
from .service import Service
from .tool_fields import check_tools

AT_ONCE = 32
"""Prompts handed to the engine at a time; more would only be waiting there."""


class Item(msgspec.Struct, kw_only=True):
    """One prompt, as exactly one of `prompt`, `messages` and `token_ids`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    """Goes with `messages`."""
    token_ids: list[int] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class SaltedItem(Item, kw_only=True):
    """A prompt of a tenant."""

    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a warm-up file: an item, or what is wrong with it."""

    number: int
    item: Item | None
    cache_salt: str | None = None
    error: str | None = None


def read_warmup_file(path: str) -> list[Line]:
    """The lines of a warm-up file that are not blank. Raises `ConfigError` when it cannot be read at all."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"warmup_file: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"warmup_file: {path} is not UTF-8 text: byte {error.start}") from error
    return [
        _read_line(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()
    ]


def encode_item(service: Service, item: Item, where: str = "") -> list[int]:
    """Token ids of an item, for workers. A conversation ends where the next message would begin, not in an answer.

    Raises `ApiError` 400, naming the field below `where`, or what templates raise.
    """
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(item, name) is not None]
    if len(given) != 1:
        problem = f"{' and '.join(given)} exclude each other" if given else "nothing is given"
        message = f"{problem}; give prompt, messages or token_ids."
        raise bad_request(f"{where}: {message}" if where else message, where or None)
    if item.tools and item.messages is None:
        tools = f"{where}.tools" if where else "tools"
        raise bad_request(f"{tools} go with messages.", tools)
    param = f"{where}.{given[0]}" if where else given[0]
    engine = service.engine
    if item.token_ids is not None:
        service.check_ids(item.token_ids, param)
        ids = item.token_ids
    elif item.prompt is not None:
        ids = service.encode(item.prompt, add_bos=engine.tokenizer.add_bos, param=param)
    else:
        ids = make_prompt(service, _conversation(item, param, where)).ids
    if not ids:
        raise bad_request(f"{param} must not be empty.", param)
    return ids


async def warm(service: Service, ids: list[int], namespace: bytes) -> dict[str, Any]:
    """Computes a prompt (and one token after it) for the cache; tells how much was there already.

    Raises `ApiError` or `ParameterError`.
    """
    call = Call(
        prefix="warm",
        prompts=[ids],
        params=SamplingParams(max_tokens=1, temperature=0.0),
        namespace=namespace,
        warming=True,
        started=service.clock(),
    )
    async with service.generate(call) as generation:
        async for _ in generation.batches():
            pass
        usage = generation.usage()
    details = usage["prompt_tokens_details"]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "computed_tokens": usage["prompt_tokens"] - details["cached_tokens"],
        **details,
    }


async def warm_all(
    service: Service, items: Sequence[tuple[Item, bytes]], where: Callable[[int], str]
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Computes many, some at a time. Yields (place, result) as they end; a result may be `{"error": {...}}`.

    Items come with their namespaces; `where` names an item by its place, for errors.
    """

    async def one(place: int) -> tuple[int, dict[str, Any]]:
        item, namespace = items[place]
        try:
            ids = await service.in_worker(encode_item, service, item, where(place))
            return place, await warm(service, ids, namespace)
        except Exception as error:
            if isinstance(error, ApiError) and error.status == 503:
                raise
            return place, as_api_error(error).payload()

    places = iter(range(len(items)))
    running: set[asyncio.Task[tuple[int, dict[str, Any]]]] = set()
    try:
        while True:
            while len(running) < AT_ONCE and (place := next(places, None)) is not None:
                running.add(asyncio.create_task(one(place)))
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
                # Not before: when one fails, the others that are done are looked at below.
                running.discard(task)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _conversation(item: Item, param: str, where: str) -> Conversation:
    assert item.messages is not None
    tools = item.tools or []
    check_tools(tools, f"{where}.tools" if where else "tools")
    return Conversation(
        messages=plain_messages(item.messages),
        tools=tools,
        variables=item.chat_template_kwargs or {},
        add_generation_prompt=False,
        param=param,
    )


def _read_line(number: int, line: str) -> Line:
    try:
        found = decode(line.encode(), SaltedItem)
        check_salt(found.cache_salt)
    except ApiError as error:
        return Line(number, None, error=error.message)
    return Line(number, found, found.cache_salt)
