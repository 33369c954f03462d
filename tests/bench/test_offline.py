"""`tierax bench offline` on a tiny model: the promised names, honest peers, and an exit code that tells."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import fake_llama_cpp
from helpers.tiny_text_model import write_tiny_text_model
from tierax.bench import offline
from tierax.bench.bounds import Machine
from tierax.bench.peers.peer import PeerMissing, PeerTask, run_script
from tierax.cli.main import main

TASK = PeerTask("m.gguf", decode=[(1, 128), (8, 200)], prefill=[512], steps=8, repeats=2, threads=2)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A quick run on a tiny model."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_text_model(directory)
    options = (
        "--max-num-seqs 2 --max-num-batched-tokens 64 --device-cache-size 16MiB --compile-cache-dir none"
    )
    return ["bench", "offline", "--model", str(directory), "--quick", "--repeats", "1", *options.split()]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and a bound that take no time."""
    shapes = offline.Shapes(((1, 40), (2, 60), (8, 200)), (100, 99_999), (16, 60), 80, 1, 4, 1 << 20)
    monkeypatch.setattr(offline, "QUICK", shapes)
    machine = Machine(read_bytes_s=1e12, read_method="fake", flop_s=1e15, read_buffer_bytes=1)
    monkeypatch.setattr(offline, "measure_machine", lambda *_, **__: machine)


@pytest.mark.usefixtures("small")
def test_json_has_the_promised_names(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs = {
        "decode": [{"batch": 1, "context": 40, "tok_s": 5.0}],
        "prefill": [{"tokens": 100, "tok_s": 7.0}],
    }
    tasks: list[PeerTask] = []

    def peer(task: PeerTask, python: str) -> dict[str, Any]:
        tasks.append(task)
        return theirs

    monkeypatch.setitem(offline.PEERS, "transformers", peer)
    outputs = ["--json", "-", "--plot", str(tmp_path / "decode.svg")]
    assert main([*command, "--vs", "transformers", "--vs", "llama.cpp", *outputs]) == 0
    picture = (tmp_path / "decode.svg").read_text()
    assert "Decode at a context of 40" in picture
    assert "Decode at a context of 60" in picture
    report = json.loads(capsys.readouterr().out)
    # 8 running and 99,999 tokens are more than this engine takes.
    assert [(row["batch"], row["context"]) for row in report["decode"]] == [(1, 40), (2, 60)]
    assert [row["tokens"] for row in report["prefill"]] == [100]
    for row in report["decode"] + report["prefill"]:
        assert 0 < row["tok_s"] < row["bound_tok_s"]
        assert row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
    assert report["peers"] == {"transformers": theirs}
    assert report["missing"] == {"llama.cpp": "it runs GGUF files only"}
    assert (tasks[0].decode, tasks[0].prefill, tasks[0].steps) == ([(1, 40), (2, 60)], [100], 4)
    assert Path(tasks[0].model).is_dir()
    assert report["bare_step"]["ratio"] == report["bare_step"]["tok_s"] / report["bare_step"]["bare_tok_s"]
    assert report["first_token"]["cached_tokens"] == 64
    assert report["start"]["step_programs"] == 9
    assert report["start"]["compiled_after_warm_up"] == 0
    assert report["errors"] == []

    print(offline.table(*offline._rows(report)))
    lines = capsys.readouterr().out.splitlines()
    assert len({line.index(" bound") for line in lines if " bound" in line}) == 1, (
        "one table, columns in line"
    )
    first = report["decode"][0]["tok_s"]
    (line,) = [line for line in lines if line.startswith("decode, 1 running, context 40")]
    assert line.endswith(f"{first / 5:.2f}x")


def _report(tok_s: float) -> dict[str, Any]:
    row = {"tok_s": tok_s, "tok_s_min": tok_s, "tok_s_max": tok_s, "bound_tok_s": 100.0}
    errors = [offline.impossible("decode 1 x 128", tok_s, 100.0)]
    return {
        "decode": [{"batch": 1, "context": 128, **row}],
        "prefill": [],
        "errors": [error for error in errors if error is not None],
        "bare_step": {"batch": 1, "context": 128, **row, "bare_tok_s": 100.0, "ratio": 1.0},
        "first_token": {"tokens": 9, "cold_ms": 10.0, "again_ms": 1.0, "ratio": 0.1, "cached_tokens": 8},
        "start": {
            "load_s": 1.0,
            "warm_up_s": 2.0,
            "step_programs": 3,
            "compiled": 3,
            "compiled_after_warm_up": 0,
        },
        "model": {"path": "demo"},
        "machine": {"read_gb_s": 30.0, "read_method": "numpy max", "matmul_gflop_s": 170.0},
        "steps": 1,
        "repeats": 1,
    }


@pytest.mark.parametrize(("tok_s", "code"), [(104.0, 0), (106.0, 1)])
def test_beating_the_bound_is_an_error(
    tok_s: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline, "measure", lambda *_: _report(tok_s))
    assert offline.main([]) == code
    out, err = capsys.readouterr()
    assert "decode, 1 running, context 128" in out
    assert ("1.06 times its bound" in err) == (code == 1)


def test_a_peer_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline, "measure", lambda *_: _report(50.0))
    monkeypatch.setattr(offline, "model_file", lambda path: Path("m.gguf"))
    monkeypatch.setenv("PATH", "")
    arguments = ["--vs", "transformers", "--vs", "llama.cpp", "--peer-python", "/no/such/python"]
    assert offline.main(arguments) == 0
    out = capsys.readouterr().out
    assert "transformers: not installed for /no/such/python" in out
    assert "llama.cpp: not installed: no llama-bench on the PATH" in out


def test_llama_bench_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs that print what llama.cpp's print, and check what they are asked."""
    _program(
        tmp_path / "llama-bench",
        "import json, sys\n"
        "a = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert a['-m'] == 'm.gguf' and a['-o'] == 'json' and a['-t'] == '2' and a['-r'] == '2'\n"
        "row = lambda p, d, t: {'n_prompt': p, 'n_depth': d, 'avg_ts': t, 'samples_ts': [t - 1, t, t + 1],"
        " 'model_type': 'llama Q4_1', 'build_commit': 'abc'}\n"
        "print(json.dumps([row(512, 0, 300.0)] if a['-n'] == '0' else [row(0, int(a['-d']), 50.0)]))\n",
    )
    _program(
        tmp_path / "llama-batched-bench",
        "import sys\nassert sys.argv[sys.argv.index('-npl') + 1] == '8'\n"
        'print("main: loading")\nprint(\'{"pl": 8, "speed_tg": 120.5}\')\n',
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = offline.PEERS["llama.cpp"](TASK, sys.executable)
    assert answer["prefill"] == [{"tokens": 512, "tok_s": 300.0, "tok_s_min": 299.0, "tok_s_max": 301.0}]
    assert answer["decode"] == [
        {"batch": 1, "context": 128, "tok_s": 50.0, "tok_s_min": 49.0, "tok_s_max": 51.0},
        {"batch": 8, "context": 200, "tok_s": 120.5},
    ]
    assert answer["weights"] == "llama Q4_1"


@pytest.fixture
def llama_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No programs of llama.cpp, but its package, or what looks like it; the file tells what was decoded."""
    (tmp_path / "llama_cpp.py").write_text(Path(fake_llama_cpp.__file__).read_text())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_llama_cpp_decodes_several_sequences_at_once(llama_log: Path) -> None:
    task = replace(TASK, decode=[(1, 128), (8, 200), (16, 40)])
    answer = offline.PEERS["llama.cpp"](task, sys.executable)
    shapes = [(row["batch"], row["context"]) for row in answer["decode"]]
    assert shapes == task.decode
    # The stand-in is slower with one cache for all; a single sequence has no choice.
    assert [row["cache"] for row in answer["decode"]] == ["unified", "one per sequence", "one per sequence"]
    for row in answer["decode"] + answer["prefill"]:
        assert 0 < row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
    assert answer["decode"][1]["tok_s"] < 8 * 1000
    assert answer["versions"] == "llama_cpp 0.0-fake"

    decoded = [json.loads(line) for line in llama_log.read_text().splitlines()]
    for batch, context in task.decode:
        steps = [places for count, _, places in decoded if count == batch and len(places) == batch]
        # 3 settling and 8 measured steps, once to warm up and twice to count, in both kinds of cache.
        assert len(steps) == 11 * 3 * (1 if batch == 1 else 2)
        assert all(len(set(places)) == 1 for places in steps), "all sequences are equally long"
        measured = [places[0] for places in steps][3:11]
        assert measured == list(range(context - 4, context + 4))
    assert [len(places) for count, _, places in decoded if len(places) == 512] == [512] * 3


def test_what_llama_cpp_refuses_is_said(llama_log: Path) -> None:
    with pytest.raises(PeerMissing, match=r"llama\.cpp cannot load other\.gguf"):
        offline.PEERS["llama.cpp"](replace(TASK, model="other.gguf"), sys.executable)
    assert not llama_log.exists()


def test_a_script_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise MemoryError('too small a machine')\n")
    with pytest.raises(PeerMissing, match="too small a machine"):
        run_script(sys.executable, script, TASK)


def _program(path: Path, code: str) -> None:
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
