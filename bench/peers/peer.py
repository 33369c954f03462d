"""What a benchmark asks of a peer, and the answer. A peer runs in a process of its own, in the same invocation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class PeerMissing(Exception):
    """The peer is not installed, or cannot run this model; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class PeerTask:
    """The shapes to measure: the same as ours."""

    model: str
    """A directory of the Hugging Face form, or a GGUF file."""
    decode: list[tuple[int, int]]
    """(running, context) pairs."""
    prefill: list[int]
    """Prompt lengths."""
    steps: int
    """Decode steps per repetition."""
    repeats: int
    threads: int


def run_script(python: str, script: Path, task: PeerTask) -> dict[str, Any]:
    """Runs a peer's script: the task as JSON on its stdin, the answer as JSON on the last line of its stdout.

    Raises `PeerMissing` with the script's last words if it fails.
    """
    return json.loads(run([python, str(script)], json.dumps(asdict(task))).splitlines()[-1])


def run(command: Sequence[str], stdin: str = "") -> str:
    """The stdout of a command. Raises `PeerMissing` when it cannot be started or fails."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerMissing(f"{command[0]} cannot be started: {error.strerror}") from None
    if done.returncode != 0 or not done.stdout.strip():
        words = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise PeerMissing(f"{Path(command[0]).name} failed ({done.returncode}): {words}")
    return done.stdout
