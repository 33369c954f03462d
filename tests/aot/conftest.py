"""These tests need a compiler for devices that are not here: they run when they are asked for by name, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot.results import FOLDER, Report, update

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = any("aot" in argument for argument in config.args)
    inside = collection_path.is_relative_to(HERE) and collection_path.parent != HERE
    return True if inside and not named else None


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Report:
    """Puts an outcome into the results of the test's module."""
    name = f"{request.path.parent.name}_{request.path.stem.removeprefix('test_')}.jsonl"
    return lambda record: update(FOLDER / name, [record])
