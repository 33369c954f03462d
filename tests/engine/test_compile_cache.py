"""A second start loads what the first one compiled (DEFECTS A-i5)."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.tiny_text_model import write_tiny_text_model

START = """
import json, sys
from tierax import LLM
model, cache, *options = sys.argv[1:]
llm = LLM(model, compile_cache_dir=cache, max_num_seqs=2, max_num_batched_tokens=4, context_length=64,
          device_cache_size="4MiB", **dict(option.split("=") for option in options))
out = llm.generate(["ab"], use_tqdm=False)[0]
stats = llm.engine.stats
print(json.dumps({"compiled": stats.compiles, "loaded": stats.loaded_programs, "ids": out.token_ids}))
llm.close()
"""


def start(model: Path, cache: Path, *options: str) -> dict:
    command = [sys.executable, "-c", START, str(model), str(cache), *options]
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(source), "PATH": ""}
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_start_compiles_next_to_nothing(tmp_path: Path) -> None:
    write_tiny_text_model(tmp_path / "model")
    first = start(tmp_path / "model", tmp_path / "compiled")
    second = start(tmp_path / "model", tmp_path / "compiled")
    assert first["compiled"] >= 7
    assert second["compiled"] <= first["compiled"] * 0.1
    assert second["loaded"] >= first["compiled"] * 0.9
    assert second["ids"] == first["ids"]

    other = start(tmp_path / "model", tmp_path / "compiled", "kv_cache_dtype=bf16")
    assert other["compiled"] >= 4, "programs of another setting must not be taken"
