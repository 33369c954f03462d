"""The stage for tests of faults, whose programs are compiled once for all of them; a small model for the offline face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fault_stage import PAGE, Stage, Start
from helpers.offline_llm import OPTIONS
from helpers.tiny_engine import TinyDevice, TinyModel
from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    device = TinyDevice(TinyModel(stacked=True), PAGE, tokens_in_pool=512, coarse=True)
    return Stage(device, tmp_path_factory.mktemp("stored") / "disk")


@pytest.fixture
def start(stage: Stage, tmp_path: Path) -> Iterator[Start]:
    with stage.runs(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_text_model(directory)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **OPTIONS) as llm:
        yield llm
        assert llm.engine.loop.idle
