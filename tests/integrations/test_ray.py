"""Batches on a local Ray cluster, one of whose workers is killed in the middle."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from helpers.tiny_text_model import write_tiny_text_model

SOURCE = Path(__file__).parents[2] / "src"
LINES = 500
STEMS = 20
MARK = "TIERAX_TEST_RUN"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'tierax[ray]'"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_text_model(directory)
    return directory


def batch(directory: Path) -> Path:
    """Requests with common beginnings, in an order that keeps these apart; one of them is bad."""
    rows = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"stem {i % STEMS} " * 8 + str(i), "max_tokens": 4, "temperature": 0},
        }
        for i in range(LINES)
    ]
    rows[123]["body"] = {"prompt": "x", "max_tokens": -1}
    path = directory / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(source: Path, output: Path, model: Path, mark: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tierax", "batch", str(source), str(output), "--model-path", str(model)]
    command += ["--ray", "local", "--ray-workers", "2", "--max-concurrency", "32", "--max-num-seqs", "8"]
    env = os.environ | {"PYTHONPATH": str(SOURCE), MARK: mark}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)


def workers_of(mark: str) -> list[int]:
    """The process ids of the engines of this run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            title, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::BatchWorker") and f"{MARK}={mark}".encode() in environ:
            found.append(int(entry.name))
    return found


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_batch_is_whole_though_a_worker_is_killed(model: Path, tmp_path: Path) -> None:
    mark, output = uuid.uuid4().hex, tmp_path / "out.jsonl"
    run = start(batch(tmp_path), output, model, mark)
    try:
        deadline = time.monotonic() + 240
        while count(output) < 100:
            assert run.poll() is None, run.stderr and run.stderr.read()
            assert time.monotonic() < deadline, "no answers"
            time.sleep(0.02)
        workers = workers_of(mark)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        answered = count(output)
        assert answered < LINES, "killed too late to say anything"
        _, said = run.communicate(timeout=300)
    finally:
        run.kill()
        run.wait()
    # One line is bad and says so; nothing else is lost.
    assert run.returncode == 1, said
    assert f"{LINES} lines answered (0 before), 1 failed" in said
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert Counter(row["custom_id"] for row in rows) == Counter(f"line-{i}" for i in range(LINES))
    failed = [row for row in rows if row["response"]["status_code"] != 200]
    assert [row["custom_id"] for row in failed] == ["line-123"]
    usage = [row["response"]["body"]["usage"] for row in rows if row not in failed]
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    assert cached > 0.5 * sum(one["prompt_tokens"] for one in usage), "common beginnings were computed again"


def test_run_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    source, output = batch(tmp_path), tmp_path / "out.jsonl"
    mark = uuid.uuid4().hex
    first = start(source, output, model, mark)
    deadline = time.monotonic() + 240
    while count(output) < 50 and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    before = count(output)
    assert 50 <= before < LINES
    second = start(source, output, model, mark)
    _, said = second.communicate(timeout=300)
    assert f"{LINES} lines answered ({before} before), 1 failed" in said
    names = Counter(json.loads(line)["custom_id"] for line in output.read_text().splitlines())
    assert names == Counter(f"line-{i}" for i in range(LINES))


def test_settings_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    run = start(batch(tmp_path), tmp_path / "out.jsonl", tmp_path / "no-model", uuid.uuid4().hex)
    _, said = run.communicate(timeout=300)
    assert run.returncode == 2
    assert "no-model" in said
    assert "Traceback" not in said
