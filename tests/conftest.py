"""`--without-native`: the same tests as where tierax was installed without a compiler.

Compiled programs of a run are kept in a directory of its own: engines alike compile once, and nothing of a user's is touched.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-native", action="store_true", help="as if the library of native kernels had not been built"
    )


def pytest_configure(config: pytest.Config) -> None:
    directory = tempfile.mkdtemp(prefix="tierax-tests-")
    os.environ["XDG_CACHE_HOME"] = directory
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    if config.getoption("--without-native"):
        from tierax.pallas_kernels.cpu import library

        library.PATH = library.PATH.with_name("libtierax_cpu.not_built")
