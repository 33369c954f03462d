"""Batches on a local Ray cluster, one of whose workers is killed in the middle."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
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
PATIENCE_S = 900.0
"""What a run may take on a machine that has other work."""

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


def wait_for(answers: int, output: Path, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while count(output) < answers:
        assert run.poll() is None, run.stderr and run.stderr.read()
        assert time.monotonic() < deadline, f"{count(output)} answers of {answers}"
        time.sleep(0.005)


def test_batch_is_whole_though_a_worker_is_killed(model: Path, tmp_path: Path) -> None:
    mark, output = uuid.uuid4().hex, tmp_path / "out.jsonl"
    run = start(batch(tmp_path), output, model, mark)
    try:
        wait_for(100, output, run)
        workers = workers_of(mark)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        answered = count(output)
        assert answered < LINES, "killed too late to say anything"
        _, said = run.communicate(timeout=PATIENCE_S)
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
    try:
        # At once: on a busy machine many more are answered before the signal is heard.
        wait_for(1, output, first)
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=PATIENCE_S)
    finally:
        first.kill()
        first.wait()
    before = count(output)
    assert 0 < before < LINES, "interrupted too late to say anything"
    second = start(source, output, model, mark)
    _, said = second.communicate(timeout=PATIENCE_S)
    assert f"{LINES} lines answered ({before} before), 1 failed" in said
    names = Counter(json.loads(line)["custom_id"] for line in output.read_text().splitlines())
    assert names == Counter(f"line-{i}" for i in range(LINES))


def test_settings_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    run = start(batch(tmp_path), tmp_path / "out.jsonl", tmp_path / "no-model", uuid.uuid4().hex)
    _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 2
    assert "no-model" in said
    assert "Traceback" not in said


def in_a_process(script: str, tmp_path: Path, *arguments: str) -> str:
    """What a script with a local cluster of its own says."""
    path = tmp_path / "script.py"
    path.write_text(script)
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, str(path), *arguments], env=env, text=True, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


DATA = """
import sys, ray
from tierax.integrations.ray_data import Predictor, by_prefix
ray.init(include_dashboard=False, num_cpus=4)
rows = ray.data.from_items([{"prompt": f"stem {i % 5} " * 8 + str(i), "id": i} for i in range(60)] + [{"prompt": "x" * 9000, "id": 60}])
rows = by_prefix(rows).map_batches(
    Predictor,
    fn_constructor_kwargs={
        "model": sys.argv[1], "sampling": {"max_tokens": 4, "temperature": 0.0}, "engine": {"skip_warmup": True, "max_num_seqs": 4, "context_length": 1024}
    },
    batch_size=16,
    concurrency=2,
)
rows = sorted(rows.take_all(), key=lambda row: row["id"])
assert [row["id"] for row in rows] == list(range(61))
assert all(row["output_tokens"] == 4 or row["finish_reason"] == "stop" for row in rows[:60]), rows[:3]
assert not any(row["error"] for row in rows[:60])
assert "1024" in rows[60]["error"], rows[60]
assert sum(row["cached_tokens"] for row in rows[:60]) > 0.4 * sum(row["prompt_tokens"] for row in rows[:60])
print("good")
"""


def test_predictor_in_a_pipeline(model: Path, tmp_path: Path) -> None:
    assert "good" in in_a_process(DATA, tmp_path, str(model))


SERVE = """
import json, ray, sys, threading, time, urllib.error, urllib.request
from ray import serve
from tierax.integrations.ray_serve import app
ray.init(include_dashboard=False, num_cpus=4)
serve.start(http_options={"port": int(sys.argv[2])})
url = f"http://127.0.0.1:{sys.argv[2]}"
serve.run(app({"model_path": sys.argv[1], "replicas": "2", "skip_warmup": "true", "max_num_seqs": "4"}))

def post(**body):
    call = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=120) as answer:
        return answer.read()

def ready():
    try:
        return urllib.request.urlopen(url + "/ready", timeout=9).status == 200
    except OSError:
        return False

until = time.monotonic() + 200
while not ready():
    assert time.monotonic() < until
    time.sleep(0.2)
usage = [json.loads(post(prompt=f"stem {i % 12:02} " * 40 + str(i), max_tokens=4))["usage"] for i in range(24)]
# A stem is computed where it is seen first, and found from then on; chance would find half of them. (A replica that is slow
# to say how much it has to do is passed over.)
found = [one["prompt_tokens_details"]["cached_tokens"] > 200 for one in usage]
assert not any(found[:12]) and sum(found[12:]) >= 10, usage
assert post(prompt="a stream", max_tokens=4, stream=True).endswith(b"data: [DONE]\\n\\n")
try:
    post(prompt="x", max_tokens=-1)
except urllib.error.HTTPError as error:
    assert error.code == 400 and "max_tokens" in json.load(error)["error"]["message"]
print("good")
serve.shutdown()
"""


def test_application_sends_a_prompt_to_where_its_prefix_is(model: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "good" in in_a_process(SERVE, tmp_path, str(model), str(port))
