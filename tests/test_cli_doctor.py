"""`tierax doctor`: what it tells, with the native library and without."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import tierax
from helpers.tiny_text_model import write_tiny_text_model
from tierax.cli import doctor_checks
from tierax.cli.doctor_checks import (
    Finding,
    check_accelerator,
    check_disk,
    check_memory,
    check_port,
    check_programs,
)
from tierax.cli.main import main
from tierax.pallas_kernels import attention
from tierax.pallas_kernels.cpu import backend
from tierax.pallas_kernels.cpu import library as native
from tierax.pallas_kernels.cpu.library import Library


def _report(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["doctor", *args]) == 0
    return capsys.readouterr().out


def _library_is(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(native, "library", lambda: library)
    monkeypatch.setattr(backend, "library", lambda: library)


def test_with_the_library(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _library_is(monkeypatch, Library("avx2"))
    text = _report(capsys)
    assert f"tierax          {tierax.__version__}, Python 3." in text
    assert f"jax {jax.__version__}" in text
    assert "cpu: " in text
    assert "kernels         native (avx2)," in text
    assert "native: in use" in text
    assert "xla: would serve" in text
    assert "tpu: needs a TPU" in text
    assert f"native library  avx2, {native.PATH}" in text
    assert all(f"{name}: " in text for name in attention.BACKENDS)


def test_without_it_the_reason_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _library_is(monkeypatch, Library("", "no library, and this is why"))
    text = _report(capsys)
    assert "kernels         xla, by" in text
    assert "native: no library, and this is why" in text
    assert "xla: in use" in text
    assert "native library  no library, and this is why" in text


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_text_model(tmp_path / "model")
    assert "kernels         " in _report(capsys, str(tmp_path / "model"))
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "nothing: no such file or directory" in capsys.readouterr().err


def test_a_disk_cache_is_tried_and_what_is_wrong_with_it_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_text_model(tmp_path / "model")
    words = [str(tmp_path / "model"), "--host-disk-cache-dir"]
    assert "GiB free; writes " in _report(capsys, *words, str(tmp_path / "new" / "kv"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    assert main(["doctor", *words, str(tmp_path / "file" / "kv")]) == 1
    told, advice = capsys.readouterr().out.split("to change: ")
    assert f"disk cache      {tmp_path}/file/kv: not a directory" in told
    assert f"disk cache (nothing works without): {tmp_path}/file is a file" in advice


def _clock(seconds: float) -> Callable[[], float]:
    """Every look at it comes so much later."""
    ticks = itertools.count()
    return lambda: next(ticks) * seconds


def _refused(number: int) -> Callable[..., tuple[float, float]]:
    def probe(*_: object) -> tuple[float, float]:
        raise OSError(number, "as the system says")

    return probe


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_disk(str(tmp_path), 1 << 20, _clock(0.064)).advice is None
    fast = check_disk(f"file://{tmp_path}", 1 << 20, _clock(0.064))
    assert "reads 1,049 MB/s, so 1,000 tokens/s come back" in fast.text
    assert "a slow disk" in (check_disk(str(tmp_path), 1, _clock(3.0)).advice or "")
    assert "object store" in check_disk("s3://bucket/kv", 1, _clock(1.0)).text
    monkeypatch.setattr(doctor_checks, "FREE_FLOOR", 1 << 60)
    assert "hardly any room" in (check_disk(str(tmp_path), 1, _clock(0.1)).advice or "")
    for number, advice in (
        (errno.EROFS, "write there"),
        (errno.ENOSPC, "free some space"),
        (errno.EIO, "another"),
    ):
        monkeypatch.setattr(doctor_checks, "_probe", _refused(number))
        found = check_disk(str(tmp_path), 1, _clock(0.1))
        assert found.broken
        assert "as the system says" in found.text
        assert advice in (found.advice or "")


def test_other_checks(tmp_path: Path) -> None:
    gib = 1 << 30
    assert check_memory(24 * gib, 20 * gib, gib).advice is None
    assert check_memory(2 * gib, gib, gib // 2).advice is not None
    assert check_memory(24 * gib, gib, 2 * gib).broken
    assert check_programs(None).advice is None
    assert check_programs(tmp_path / "new").text.endswith("0 MB, the first start compiles")
    (tmp_path / "file").touch()
    assert "XDG_CACHE_HOME" in (check_programs(tmp_path / "file" / "x").advice or "")
    assert check_accelerator("cpu", tmp_path) is None
    (tmp_path / "nvidia0").touch()
    assert "tierax[cuda12]" in (_found(check_accelerator("cpu", tmp_path)).advice or "")
    assert check_accelerator("gpu", tmp_path) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"--port {port + 1}" in (check_port(port).advice or "")
    assert check_port(port).advice is None


def _found(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


def test_without_the_demo_the_report_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tierax.models.source._DEMO_DISTRIBUTION", "no-such-package")
    text = _report(capsys)
    assert "model           none named, and no demo" in text
    assert "the demo model is not installed" in text
    assert "port " in text
