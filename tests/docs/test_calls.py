"""What the documentation sends to a server is answered by one, and its Python programs run: on a tiny model."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierax
from helpers.byte_tokenizer import byte_tokenizer
from helpers.chat_templates import HERMES_TEMPLATE
from helpers.doc_blocks import COMMANDS, Block, blocks, commands
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import Live
from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, EngineConfig
from tierax.engine.engine import Engine
from tierax.serving.config import ServerConfig

HOST = re.compile(r"http://(?:localhost|127\.0\.0\.1):30000")
REFUSED = {"uniqueItems": 400, "ID OF THE FIRST": 404}
"""What a body holds that a page shows to be refused, or that a reader must fill in."""
NO_PROGRAM = {
    "@function\ndef tips": "goes on where the page's first block ends; run with it",
    'llm = LLM("/models/big"': "one of several processes (tests/engine/test_processes.py has all of them)",
}
"""Python blocks that are not run alone, and why."""
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "context_length": 3072,
    "device_cache_size": "16MiB",
    "skip_warmup": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs") / "demo"
    write_tiny_text_model(directory)
    byte_tokenizer(chat_template=HERMES_TEMPLATE).save(directory)
    return directory


@pytest.fixture(scope="module", params=["scripted", pytest.param("real", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, model: Path) -> Iterator[str]:
    """A server in a thread of its own, over the scripted engine or the real one."""
    if request.param == "real":
        engine: Any = Engine(EngineConfig.create(str(model), compile_cache_dir="none", **OPTIONS))
    else:
        engine = FakeEngine(say("On Thursday, as far as is known."), template=HERMES_TEMPLATE)
        engine.model_name = "demo"
    ready, end = threading.Event(), asyncio.Event()
    started: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        # A random model would never come to the end of its reasoning, of which the template speaks.
        live = await Live.start(engine, ServerConfig(reasoning_parser="none"))
        started.append((live.url, asyncio.get_running_loop()))
        ready.set()
        await end.wait()
        await live.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(300)
    yield started[0][0]
    started[0][1].call_soon_threadsafe(end.set)
    thread.join()


def _curls() -> list[tuple[str, list[str]]]:
    found: dict[tuple[str, ...], str] = {}
    for block in blocks():
        if block.language in COMMANDS:
            for words in commands(block):
                if words[0] == "curl":
                    found.setdefault(tuple(words[1:]), str(block))
    return [(place, list(words)) for words, place in found.items()]


@pytest.mark.parametrize(
    ("place", "words"), _curls(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_calls(place: str, words: list[str], url: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-s", "-N", action="store_true")
    parser.add_argument("-X", default=None)
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d", default=None)
    call = parser.parse_args(words)
    target, known = HOST.subn(url, call.url)
    assert known, f"{place}: {call.url} is not the server of the other pages"
    data = None if call.d is None else call.d.encode()
    headers = dict(header.split(": ", 1) for header in call.H)
    if data is not None:
        json.loads(data)
    request = urllib.request.Request(target, data, headers, method=call.X)
    expected = next((status for mark, status in REFUSED.items() if mark in (call.d or "")), 200)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    assert status == expected, f"{place}: {text[:500]}"


def _programs(local: bool) -> list[Block]:
    """Those that make a model of their own, or those that call a server."""
    return [
        block
        for block in blocks()
        if block.language == "python"
        and local is ("LLM(" in block.text)
        and not any(block.text.startswith(start) for start in NO_PROGRAM)
    ]


@pytest.mark.parametrize("block", _programs(local=False), ids=str)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_programs_that_call_a_server(
    block: Block, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a page says of the answer is the demo model's; here the program has to run to its end."""
    names = _run(block, HOST.sub(url, block.text))
    for backend in [value for value in names.values() if isinstance(value, tierax.Runtime)]:
        backend.close()
    tierax.set_default_backend(None)
    # Pages leave closing their clients to the interpreter; here, before the next test.
    names.clear()
    gc.collect()
    assert ("print(" in block.text) == bool(capsys.readouterr().out)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, use_tqdm=False, compile_cache_dir="none", **OPTIONS) as llm:
        yield llm


def _local_programs() -> list[Any]:
    """The first one in the default suite; each compiles some seconds."""
    first, *others = {block.text: block for block in _programs(local=True)}.values()
    return [first, *(pytest.param(block, marks=pytest.mark.slow) for block in others)]


@pytest.mark.parametrize("block", _local_programs(), ids=str)
def test_programs_with_a_model(
    block: Block, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tierax, "LLM", lambda model, **keywords: llm)
    _run(block, block.text)
    assert capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that pages speak of."""
    monkeypatch.chdir(tmp_path)
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    line = {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


def _run(block: Block, source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__page__"}
    exec(compile(source, str(block), "exec"), names)
    return names
