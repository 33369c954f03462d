"""`tierax serve` as a process with the real engine and a tiny random model: from the ready line to a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_text_model import write_tiny_text_model

SOURCE = Path(__file__).parents[2] / "src"


START_S = 240.0
"""What a start may take on a busy machine, all programs compiled."""


class Server:
    """A server process and what it said until it was ready."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "tierax", "serve", "--model-path", str(model), "--port", "0", *flags]
        env = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONFAULTHANDLER": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        # A server that hangs shows where its threads stand, and the test fails.
        watchdog = threading.Timer(START_S, self.process.send_signal, (signal.SIGABRT,))
        watchdog.daemon = True
        watchdog.start()
        self.said: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.match(r"Ready: .* on (http://\S+)/v1", line):
                self.url = found[1]
                watchdog.cancel()
                return
        watchdog.cancel()
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

    def end(self) -> int:
        """Asks it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        return self.process.returncode

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
    assert any("kernels on cpu: " in line for line in server.said)
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


def test_a_restart_finds_what_the_disk_keeps(tmp_path: Path) -> None:
    write_tiny_text_model(tmp_path / "model")
    system = {"role": "system", "content": "You know everything about rivers, and say it briefly."}
    (tmp_path / "warm.jsonl").write_text(json.dumps({"messages": [system]}) + "\n{}\n")
    flags = (
        *("--served-model-name", "tiny", "--max-num-seqs", "2", "--max-num-batched-tokens", "32"),
        *("--context-length", "512", "--device-cache-size", "8MiB", "--compile-cache-dir", "none"),
        *("--host-cache-size", "8MiB", "--host-disk-cache-dir", str(tmp_path / "kv")),
        *("--prefill-priority", "wait_complete", "--skip-warmup"),
    )
    chat = {"messages": [system, {"role": "user", "content": "Where?"}], "max_tokens": 4, "temperature": 0}

    first = Server(tmp_path / "model", *flags, "--warmup-file", str(tmp_path / "warm.jsonl"))
    assert any("Warm-up file, line 2: nothing is given" in line for line in first.said)
    _, cold = first.post("/v1/chat/completions", **chat)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["device"] >= 48
    assert first.end() == 0

    second = Server(tmp_path / "model", *flags)
    _, warm = second.post("/v1/chat/completions", **chat)
    assert warm["choices"] == cold["choices"]
    found = warm["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert found["disk"] >= 48
    assert (found["device"], found["host"]) == (0, 0)
    assert second.metric("tierax_prefetch_hit_pages_total") == found["disk"] / 16
    assert second.post("/flush_cache?timeout=10")[0] == 200
    assert second.end() == 0
    assert list((tmp_path / "kv").rglob("*.__lock")) == []
