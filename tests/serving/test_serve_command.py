"""`tierax serve` as a process with the real engine and a tiny random model: from the ready line to a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_text_model import write_tiny_text_model

SOURCE = Path(__file__).parents[2] / "src"


class Server:
    """A server process and what it said until it was ready."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "tierax", "serve", "--model-path", str(model), "--port", "0", *flags]
        env = os.environ | {"PYTHONPATH": str(SOURCE)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.said: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.match(r"Ready: .* on (http://\S+)/v1", line):
                self.url = found[1]
                return
        raise AssertionError("the server ended before it was ready:\n" + "".join(self.said))

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found is not None, f"no metric {name}"
        return float(found[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    write_tiny_text_model(directory / "model")
    running = Server(
        directory / "model",
        *("--served-model-name", "tiny", "--max-num-seqs", "2", "--max-num-batched-tokens", "32"),
        *("--context-length", "512", "--device-cache-size", "8MiB", "--compile-cache-dir", "none"),
    )
    yield running
    running.process.send_signal(signal.SIGTERM)
    _, rest = running.process.communicate(timeout=30)
    assert running.process.returncode == 0, rest


def test_the_second_turn_finds_the_first_one_in_the_cache(server: Server) -> None:
    messages = [{"role": "user", "content": "Tell me a long story about a river."}]
    options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    status, first = server.post("/v1/chat/completions", messages=messages, return_token_ids=True, **options)
    assert status == 200
    usage = first["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    # Token ids, since what a random model says does not survive the way through text.
    said = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    status, second = server.post("/v1/completions", prompt=[*said, 65, 66, 67], **options)
    assert status == 200
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= usage["total_tokens"] - 16
    assert details["cached_tokens_by_tier"] == {"device": details["cached_tokens"], "host": 0, "disk": 0}


def test_bad_requests_are_refused_and_the_next_one_works(server: Server) -> None:
    assert server.post("/v1/completions", prompt=list(range(1, 100)) * 6)[0] == 400
    assert server.post("/v1/completions", prompt="ab", temperature=-1)[0] == 400
    assert server.post("/v1/completions", prompt="ab", logit_bias={"999999": 5})[0] == 400
    assert server.post("/v1/completions", prompt="ab", model="other")[0] == 404
    status, answer = server.post("/v1/completions", prompt="ab", max_tokens=3, ignore_eos=True)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3


def test_every_option_at_once_and_nothing_compiles(server: Server) -> None:
    compiled = server.metric("tierax_compiles_total")
    options = {"n": 2, "seed": 7, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
    options |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    options |= {"logit_bias": {"70": 3}, "min_tokens": 4, "max_tokens": 12, "logprobs": 3, "stop": ["zzzz"]}
    status, answer = server.post("/v1/completions", prompt=["abc", "abcdefgh" * 30], **options)
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert server.metric("tierax_compiles_total") == compiled


def test_a_client_that_leaves_frees_its_pages(server: Server) -> None:
    body = json.dumps({"prompt": "abcd", "max_tokens": 480, "ignore_eos": True, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url + "/v1/completions", body)) as stream:
        assert stream.readline().startswith(b"data:")
        assert server.metric("tierax_requests_running") == 1
    deadline = time.monotonic() + 5
    while server.metric("tierax_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metric("tierax_requests_running") == 0
    assert server.metric("tierax_requests_aborted_total") >= 1
    assert re.search(r'tierax_pages{state="in_use",tier="device"} 0', server.get("/metrics"))


def test_a_port_in_use_is_one_line_and_exit_code_2(server: Server, tmp_path: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "tierax", "serve", "--model-path", str(tmp_path), "--host", "localhost"]
    done = subprocess.run(
        [*command, "--port", port],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert port in done.stderr
