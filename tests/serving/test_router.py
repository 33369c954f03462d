"""Two replicas behind SGLang's router, as it comes: it finds out about them, and its cache-aware policy pays."""

from __future__ import annotations

import importlib.util
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.serve_process import ServeProcess
from helpers.tiny_text_model import write_tiny_text_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None,
        reason="SGLang's router is not installed: pip install sglang-router",
    ),
]
CONVERSATIONS, TURNS, SYSTEMS = 12, 4, 4


@contextmanager
def router(policy: str, replicas: list[ServeProcess]) -> Iterator[str]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", policy, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--prometheus-port", str(metrics), "--worker-urls"]
    process = subprocess.Popen(
        [*command, *(replica.url for replica in replicas)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not healthy_workers(url):
            assert process.poll() is None, "the router has ended"
            assert time.monotonic() < deadline, "the router does not take the replicas"
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def healthy_workers(url: str) -> bool:
    try:
        workers = get(url + "/workers")["workers"]
    except OSError:
        return False
    return len(workers) == 2 and all(worker["is_healthy"] for worker in workers)


def talk(url: str, rng: random.Random) -> float:
    """The cached share of the prompts of some conversations, whose turns come in random order."""
    talks = [[{"role": "system", "content": f"system {i % SYSTEMS} " * 30}] for i in range(CONVERSATIONS)]
    turns = [i for i in range(CONVERSATIONS) for _ in range(TURNS)]
    rng.shuffle(turns)
    prompt = cached = 0
    for number, i in enumerate(turns):
        talks[i].append({"role": "user", "content": f"question {number} " * 6})
        body = {"model": "tiny", "messages": talks[i], "max_tokens": 4, "temperature": 0}
        call = urllib.request.Request(
            url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=120) as answer:
            found = json.load(answer)
        talks[i].append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        prompt += found["usage"]["prompt_tokens"]
        cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached / prompt


def test_cache_aware_routing_raises_the_hit_rate(tmp_path: Path) -> None:
    write_tiny_text_model(tmp_path / "tiny")
    flags = ("--skip-warmup", "--max-num-seqs", "4", "--data-dir", "none", "--page-size", "16")
    with ServeProcess(tmp_path / "tiny", *flags) as one, ServeProcess(tmp_path / "tiny", *flags) as other:
        shares = {}
        for policy in ("round_robin", "cache_aware"):
            with router(policy, [one, other]) as url:
                workers = get(url + "/workers")["workers"]
                assert {worker["model_id"] for worker in workers} == {"tiny"}, "it has read the model's name"
                assert {load["load"] for load in get(url + "/get_loads")["workers"]} == {0}, "and the load"
                shares[policy] = talk(url, random.Random(5))
            for replica in (one, other):
                replica.post("/flush_cache")
        assert not [line for line in (*one.said, *other.said) if "Traceback" in line]
    assert shares["cache_aware"] > shares["round_robin"] + 0.05, shares
