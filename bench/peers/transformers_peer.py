"""The peer `transformers`: eager float32 with sdpa and a static batch, as most people run a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .peer import PeerMissing, PeerTask, run, run_script


def measure(task: PeerTask, python: str) -> dict[str, Any]:
    """The answer of `transformers_script`. Raises `PeerMissing` when `python` lacks torch or transformers."""
    try:
        run([python, "-c", "import torch, transformers; print('here')"])
    except PeerMissing as error:
        hint = "name an interpreter that has torch and transformers with --peer-python"
        raise PeerMissing(f"not installed for {python} ({error}); {hint}") from None
    return run_script(python, Path(__file__).with_name("transformers_script.py"), task)
