"""The peer `llama.cpp`: its own `llama-bench` (and `llama-batched-bench` for several running), else `llama_cpp`.

It runs the GGUF file as it is, so a quantised file is read in fewer bytes than our f32 weights take; or a copy of the file
in F16 or F32, which its own tool makes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from .peer import PeerMissing, PeerTask, run, run_script

_FILE_TYPES = {"F32": 0, "F16": 1}
"""llama.cpp's numbers for the weights of a file (`llama_ftype`)."""

_CONVERT = """
import ctypes, sys, llama_cpp
before, after, file_type = sys.argv[1:]
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.allow_requantize = int(file_type), True
print(llama_cpp.llama_model_quantize(before.encode(), after.encode(), ctypes.byref(options)))
"""


def measure(task: PeerTask, python: str, weights: str | None = None) -> dict[str, Any]:
    """The answer of whichever form is installed, on the file as it is or with its weights as F16 or F32.

    Raises `PeerMissing`.
    """
    if not task.model.endswith(".gguf"):
        raise PeerMissing("it runs GGUF files only")
    bench = shutil.which("llama-bench")
    if bench is None:
        try:
            run([python, "-c", "import llama_cpp; print('here')"])
        except PeerMissing:
            raise PeerMissing(
                f"not installed: no llama-bench on the PATH, and no llama_cpp for {python} (see --peer-python)"
            ) from None
    with tempfile.TemporaryDirectory() as directory:
        if weights is not None:
            converted = Path(directory) / f"{weights}.gguf"
            _convert(task.model, converted, weights, python)
            task = replace(task, model=str(converted))
        if bench is not None:
            return _llama_bench(bench, shutil.which("llama-batched-bench"), task)
        answer = run_script(python, Path(__file__).with_name("llama_script.py"), task)
        return answer | {"weights": weights or answer["weights"]}


def _convert(model: str, converted: Path, weights: str, python: str) -> None:
    program = shutil.which("llama-quantize")
    if program is not None:
        run([program, "--allow-requantize", model, str(converted), weights])
    else:
        run([python, "-c", _CONVERT, model, str(converted), str(_FILE_TYPES[weights])])
    if not converted.exists():
        raise PeerMissing(f"llama.cpp cannot make a file of {weights} weights out of {model}")


def _llama_bench(bench: str, batched: str | None, task: PeerTask) -> dict[str, Any]:
    common = [bench, "-m", task.model, "-t", str(task.threads), "-r", str(task.repeats), "-o", "json"]
    prefills = json.loads(run([*common, "-n", "0", "-p", ",".join(map(str, task.prefill))]))
    singles = [context for batch, context in task.decode if batch == 1]
    depths = ",".join(map(str, singles))
    decodes = json.loads(run([*common, "-p", "0", "-n", str(task.steps), "-d", depths])) if singles else []
    several = [(batch, context) for batch, context in task.decode if batch > 1]
    first = [*prefills, *decodes][0]
    return {
        "decode": [
            *({"batch": 1, "context": row["n_depth"], **_spread(row)} for row in decodes),
            *(_batched(batched, task, batch, context) for batch, context in several if batched is not None),
        ],
        "prefill": [{"tokens": row["n_prompt"], **_spread(row)} for row in prefills],
        "versions": f"llama.cpp {first.get('build_commit', '')}",
        "weights": str(first.get("model_type", "as in the file")),
        "threads": task.threads,
    }


def _spread(row: dict[str, Any]) -> dict[str, float]:
    samples = row.get("samples_ts") or [row["avg_ts"]]
    return {"tok_s": sorted(samples)[len(samples) // 2], "tok_s_min": min(samples), "tok_s_max": max(samples)}


def _batched(program: str, task: PeerTask, batch: int, context: int) -> dict[str, Any]:
    prompt = max(1, context - task.steps // 2)
    sizes = {"-c": batch * (context + task.steps), "-npp": prompt, "-ntg": task.steps, "-npl": batch}
    options = [word for flag, value in sizes.items() for word in (flag, str(value))]
    out = run([program, "-m", task.model, "-t", str(task.threads), "--output-format", "jsonl", *options])
    row = json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))
    return {"batch": batch, "context": context, "tok_s": row["speed_tg"]}
