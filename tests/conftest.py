"""`--without-native`: the same tests as where tierax was installed without a compiler."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-native", action="store_true", help="as if the library of native kernels had not been built"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-native"):
        from tierax.pallas_kernels.cpu import library

        library.PATH = library.PATH.with_name("libtierax_cpu.not_built")
