"""Calls of the command line, and what stands in for what they start."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tierax.cli.main import main


def fake_module(**contents: Any) -> types.ModuleType:
    """A module with these contents, to take the place of a real one."""
    module = types.ModuleType("fake")
    vars(module).update(contents)
    return module


def mistake(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a wrong call prints."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("tierax")
    return err.strip()
