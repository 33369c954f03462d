"""Several processes that run one model together, each a program of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.split_engine import Place

TESTS = Path(__file__).parents[1]


class Team:
    """Processes with so many devices each that run a tiny model in `directory`; modes are those of `split_engine`."""

    def __init__(self, directory: Path, mode: str, processes: int = 2, each: int = 2) -> None:
        Place(directory, "llama-bias", "f32")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={each} --xla_backend_optimization_level=0",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
        }
        program = [sys.executable, "-m", "helpers.split_engine", "--process", str(directory)]
        self.processes = [
            subprocess.Popen(
                [*program, *map(str, (each * processes, process, processes, port)), mode],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=TESTS,
            )
            for process in range(processes)
        ]

    def answers(self) -> dict[str, Any]:
        """What process 0 prints."""
        stdout = self.processes[0].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(self.processes[0].communicate()[1])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
