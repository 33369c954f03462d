"""The native kernels under sanitizers, driven without Python: reads and writes out of bounds, races, undefined behaviour."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tierax.pallas_kernels.cpu import build as recipe

HERE = Path(__file__).parent
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"),
    "thread": ("-fsanitize=thread", "-g"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("driver", ["linear_driver.cc", "attention_driver.cc", "layers_driver.cc"])
def test_kernels_under(sanitizer: str, driver: str, tmp_path: Path) -> None:
    program = tmp_path / "driver"
    try:
        recipe.build(program, SANITIZERS[sanitizer], driver=HERE / driver)
    except recipe.BuildError as error:
        if any(
            lacking in str(error)
            for lacking in ("no C++ compiler", "cannot find -lasan", "cannot find -ltsan")
        ):
            pytest.skip(str(error).splitlines()[0])
        raise
    options = {"ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([program], capture_output=True, text=True, env=os.environ | options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agree with double" in done.stdout
