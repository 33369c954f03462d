"""That freed memory is kept is seen by page faults, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COUNT = """
import resource
from tierax.cache.malloc import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        bytes(bytearray(1 << 20))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = keep_freed_memory()
faults()
print(kept, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc's")
def test_freed_memory_is_used_again() -> None:
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, env=environment
    )
    kept, faults = done.stdout.split()
    if kept == "False":
        pytest.skip("the C library has no such setting")
    assert int(faults) < 1000, "50 MiB twice are 25,600 pages"
