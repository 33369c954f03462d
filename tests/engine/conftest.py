"""The stage for tests of faults: programs are compiled once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fault_stage import PAGE, Stage, Start
from helpers.tiny_engine import TinyDevice, TinyModel


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    device = TinyDevice(TinyModel(stacked=True), PAGE, tokens_in_pool=512, coarse=True)
    return Stage(device, tmp_path_factory.mktemp("stored") / "disk")


@pytest.fixture
def start(stage: Stage, tmp_path: Path) -> Iterator[Start]:
    with stage.runs(tmp_path) as begin:
        yield begin
