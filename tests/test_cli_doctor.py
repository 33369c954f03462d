"""`tierax doctor`: what it tells, with the native library and without."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import tierax
from helpers.tiny_text_model import write_tiny_text_model
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
