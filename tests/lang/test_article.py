"""The program that users paste, and what the cache is to be worth for it, on the demo model behind a real server. Minutes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.serve_process import ServeProcess
from tierax import Runtime, function, gen

pytestmark = pytest.mark.slow

PROGRAM = r"""
from sglang import Runtime, assistant, user, gen, set_default_backend
backend = Runtime("http://localhost:30000")
def legal_qa(question: str, history: list = None):
    if history is None:
        history = []
    with assistant():
        for q, a in history:
            user(q)
            gen(name="answer", max_tokens=512)
        user(question)
        gen(name="response", regex=r'\{.*?"answer":\s*".*?",\s*"confidence":\s*\d+\}', max_tokens=256)
    return backend.run()
"""
PATTERN = r'\{.*?"answer":\s*".*?",\s*"confidence":\s*\d+\}'
TEXT = "The tenant pays the rent on the third working day of each month. " * 115


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServeProcess(Path("demo")) as server:
        yield server.url


def test_the_program_runs_after_its_import_line_was_changed(url: str) -> None:
    names: dict[str, Any] = {}
    source = PROGRAM.replace("from sglang import", "from tierax import").replace(
        "http://localhost:30000", url
    )
    exec(source, names)
    history = [(TEXT + "What is this about?", '{"answer": "Rent.", "confidence": 98}')]
    results = [names["legal_qa"](question, history) for question in ("Who pays? As JSON.", "When? As JSON.")]
    names["backend"].close()
    for result in results:
        assert set(result) == {"answer", "response"}
        meta = result.meta("response")
        assert re.fullmatch(PATTERN, result["response"], re.DOTALL) or meta.finish_reason == "length"
    first, second = (result.metas[0] for result in results)
    assert first.prompt_tokens >= 1500
    assert first.cached_tokens == 0
    assert second.cached_tokens >= first.prompt_tokens - 32
    print(f"first tokens after {first.ttft:.2f} s and {second.ttft:.3f} s: {second.ttft / first.ttft:.1%}")
    assert second.ttft < 0.15 * first.ttft


@function
def eight(s, prefix):
    s += prefix
    branches = s.fork(8)
    branches += lambda n: f"Piece of advice number {n}:"
    branches += gen("tip", max_tokens=4, temperature=0)
    branches.join()


def test_eight_branches_compute_their_prefix_once(url: str) -> None:
    prefix = TEXT.replace("tenant", "guest")
    with Runtime(url) as backend:
        usage = eight.run(prefix, backend=backend).usage()
    each = usage.prompt_tokens // 8
    print(f"{usage.computed_tokens} of {usage.prompt_tokens} prompt tokens computed")
    assert each >= 1500
    assert usage.computed_tokens < each + 8 * 32


def test_without_the_cache_they_compute_it_eight_times() -> None:
    with ServeProcess(Path("demo"), "--disable-radix-cache") as server, Runtime(server.url) as backend:
        usage = eight.run(TEXT, backend=backend).usage()
        print(f"{usage.computed_tokens} of {usage.prompt_tokens} prompt tokens computed")
        assert usage.computed_tokens == usage.prompt_tokens
