"""Scripts and batches in two processes: started alike, process 0 answers, the other follows and ends with it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.split_engine import GREEDY, PROMPTS, Place

TESTS = Path(__file__).parents[1]
SCRIPT = """
import json, sys
from tierax import LLM, SamplingParams
model, port, process, prompts, options = sys.argv[1:]
llm = LLM(model, coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=int(process), **json.loads(options))
outs = llm.generate(json.loads(prompts), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True), use_tqdm=False)
print(json.dumps([out.token_ids for out in outs]))
llm.close()
"""


def both(*arguments: str) -> list[tuple[int, str, str]]:
    """Starts the same program as process 0 and 1, `{port}` and `{process}` filled in: exit codes and what they wrote."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                *(x.replace("{port}", str(port)).replace("{process}", str(p)) for x in arguments),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=TESTS,
        )
        for p in (0, 1)
    ]
    try:
        written = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, written, strict=True)]


def options(place: Place) -> dict[str, Any]:
    """Of a two-process engine, as keywords."""
    names = (
        "page_size context_length max_num_seqs max_num_batched_tokens device_cache_size skip_warmup tp_size"
    )
    config = place.config(2, disk=False)
    return {name: getattr(config, name) for name in (*names.split(), "compile_cache_dir", "kv_cache_dtype")}


@pytest.mark.slow
def test_one_script_in_two_processes(tmp_path: Path) -> None:
    place = Place(tmp_path, "llama-bias", "f32")
    with place.engine(1, disk=False) as llm:
        expected = [out.token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    words = [str(place.model), "{port}", "{process}", json.dumps(PROMPTS), json.dumps(options(place))]
    (code, text, errors), (follower, said, complaints) = both("-c", SCRIPT, *words)
    assert (code, follower) == (0, 0), errors + complaints
    # jax's collectives on CPUs say on stdout that they are connected.
    assert json.loads(text.splitlines()[-1]) == expected
    assert "[[" not in said, "what follows the constructor is process 0's alone"


@pytest.mark.slow
def test_a_batch_in_two_processes_and_again_when_nothing_is_left(tmp_path: Path) -> None:
    place = Place(tmp_path, "llama-bias", "f32")
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True},
        }
        for number, prompt in enumerate(PROMPTS[:3])
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["-m", "tierax", "batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out-{process}.jsonl")]
    words += ["--model-path", str(place.model), "--num-processes", "2", "--process-id", "{process}"]
    words += ["--coordinator-address", "127.0.0.1:{port}"]
    for name, value in options(place).items():
        if not isinstance(value, bool):
            words += [f"--{name.replace('_', '-')}", str(value)]
    for before in (0, 3):
        (code, _, errors), (follower, _, complaints) = both(*words)
        assert (code, follower) == (0, 0), errors + complaints
        assert f"3 lines answered ({before} before), 0 failed" in errors
    answers = [json.loads(line) for line in (tmp_path / "out-0.jsonl").read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {line["custom_id"] for line in lines}
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 5 for answer in answers)
    assert not (tmp_path / "out-1.jsonl").exists(), "files are process 0's business"
