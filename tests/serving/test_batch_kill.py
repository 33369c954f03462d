"""kill -9 of a server in the middle of a batch, several times: every line is answered once, and rightly."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helpers.batch_client import jsonl, line
from helpers.serve_process import ServeProcess
from helpers.tiny_text_model import write_tiny_text_model

LINES = 150
TOKENS = 24


def ask(server: ServeProcess, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    request = urllib.request.Request(server.url + path, body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def upload(server: ServeProcess, content: bytes) -> str:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        + content
        + b"\r\n--b--\r\n"
    )
    return json.loads(ask(server, "/v1/files", form, "multipart/form-data; boundary=b"))["id"]


def texts(server: ServeProcess, file_id: str) -> list[tuple[str, str]]:
    lines = ask(server, f"/v1/files/{file_id}/content").splitlines()
    answers = [json.loads(raw) for raw in lines]
    return [(x["custom_id"], x["response"]["body"]["choices"][0]["text"]) for x in answers]


@pytest.mark.slow
def test_a_batch_survives_kills(tmp_path: Path) -> None:
    rng = random.Random(7)
    model = tmp_path / "model"
    write_tiny_text_model(model)
    flags = [
        *("--data-dir", str(tmp_path / "data"), "--skip-warmup", "--batch-concurrency", "4"),
        *("--context-length", "256", "--max-num-seqs", "4", "--device-cache-size", "2MiB"),
    ]
    lines = [line(f"q{i}", temperature=0, ignore_eos=True, max_tokens=TOKENS) for i in range(LINES)]
    batch: dict[str, Any] = {}
    done, kills = 0, 0
    while True:
        with ServeProcess(model, *flags) as server:
            if not batch:
                body = {
                    "input_file_id": upload(server, jsonl(lines)),
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                }
                batch = json.loads(ask(server, "/v1/batches", json.dumps(body).encode()))
            goal = done + rng.randrange(10, 40)
            while batch["status"] != "completed":
                batch = json.loads(ask(server, f"/v1/batches/{batch['id']}"))
                assert batch["status"] in ("validating", "in_progress", "finalizing", "completed"), batch
                counts = batch["request_counts"]
                assert counts["failed"] == 0
                if counts["completed"] >= goal and kills < 4:
                    break
                time.sleep(rng.random() * 0.02)
            if batch["status"] != "completed":
                # What was told to be answered must still be so afterwards.
                completed = batch["request_counts"]["completed"]
                assert completed >= done
                done, kills = completed, kills + 1
                server.kill()
                continue
            answers = texts(server, batch["output_file_id"])
            assert batch["error_file_id"] is None
            assert sorted(name for name, _ in answers) == sorted(f"q{i}" for i in range(LINES))
            for name, text in rng.sample(answers, 10):
                body = next(x["body"] for x in lines if x["custom_id"] == name)
                assert server.post("/v1/completions", **body)["choices"][0]["text"] == text
            assert server.stop() == 0
            break
    assert kills == 4
