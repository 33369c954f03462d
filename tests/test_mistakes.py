"""The likeliest mistakes of a first hour: each is one line that says what to do, and exit code 2."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.fake_engine import FakeEngine
from helpers.tiny_text_model import write_tiny_text_model
from tierax.cli.main import main
from tierax.engine.config import EngineConfig
from tierax.serving.summary import cache_lines


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a good model and files that are none."""
    path = tmp_path_factory.mktemp("mistakes")
    write_tiny_text_model(path / "model")
    (path / "no.gguf").write_text("something else")
    (path / "broken").mkdir()
    (path / "broken" / "config.json").write_text('{"a":')
    (path / "file").write_text("in the way")
    (path / "settings.yaml").write_text("prot: 8080\n")
    return path


MISTAKES: dict[str, tuple[list[str], str]] = {
    "wrong path": (["/nowhere/model"], "/nowhere/model: no such file or directory (give a model directory"),
    "no such model": (["some/model"], "download it with: hf download some/model"),
    "no GGUF": (["{place}/no.gguf"], "not a whole GGUF file"),
    "bad JSON": (["{place}/broken"], "config.json: cannot be read as JSON"),
    "bad settings": (["--config", "{place}/settings.yaml"], "unknown key 'prot'; did you mean 'port'?"),
    "too little memory": (["{place}/model", "--device-cache-size", "900TiB"], "are asked for, but only"),
    "unknown policy": (["{place}/model", "--eviction-policy", "lruu"], "'lruu' must be lru, lfu"),
    "unwritable cache": (
        ["{place}/model", "--host-disk-cache-dir", "{place}/file/kv"],
        "--host-disk-cache-dir: ",
    ),
    "context beyond the model's": (
        ["{place}/model", "--context-length", "100000"],
        "exceeds the model's own 16384",
    ),
    "missing extra": (
        ["{place}/model", "--otlp-endpoint", "http://localhost:1"],
        "pip install 'tierax[otlp]'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_line(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, expected = MISTAKES[name]
    monkeypatch.setenv("HF_HOME", str(place))
    if name == "missing extra":
        monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    line = ["serve", "--port", "0", "--data-dir", "none", *(arg.format(place=place) for arg in args)]
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert err.count("\n") == 1
    assert err.startswith("tierax serve: error: ")


def test_a_port_that_is_taken(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["serve", str(place / "model"), "--port", port]) == 2
    assert (
        capsys.readouterr().err
        == f"tierax serve: port {port} on 127.0.0.1 is in use; choose another with --port\n"
    )


def _engine(**settings: object) -> SimpleNamespace:
    fake = FakeEngine()
    cache = SimpleNamespace(
        num_pages=64, page_size=16, host=SimpleNamespace(num_pages=settings.pop("host", 0))
    )
    config = EngineConfig.create("m", **settings)
    return SimpleNamespace(config=config, cache=cache, page_bytes=fake.page_bytes)


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (lambda: _engine(), ["  device   64 pages, 1,024 tokens, 62.5 KiB"]),
        (
            lambda: _engine(
                host=2048, host_disk_cache_dir="s3://user:secret@bucket/kv", disk_cache_read_only=True
            ),
            [
                "  device   64 pages, 1,024 tokens, 62.5 KiB",
                "  host     2,048 pages, 32,768 tokens, 1.95 MiB",
                "  disk     s3://***@bucket/kv, up to 20 GiB, read only",
            ],
        ),
        (
            lambda: _engine(disable_radix_cache=True),
            ["  device   64 pages, 1,024 tokens, 62.5 KiB, nothing shared between requests"],
        ),
    ],
)
def test_what_a_server_says_of_its_cache(make: Callable[[], object], lines: list[str]) -> None:
    assert cache_lines(make()) == lines
