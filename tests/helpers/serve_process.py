"""`tierax serve` as a process of its own, which a test may kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


class ServeProcess:
    """A server on a port of its own; to be made in a `with` statement, at whose end it is gone, whatever happened."""

    def __init__(self, model: Path, *flags: str) -> None:
        """Returns when the server is ready. Raises AssertionError with what it said if it ends before."""
        command = [sys.executable, "-m", "tierax", "serve", "--model-path", str(model), "--port", "0", *flags]
        env = os.environ | {"PYTHONPATH": str(SOURCE)}
        self.said: list[str] = []
        """Lines of its stderr so far."""
        self.killed = False
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self._ready = threading.Event()
        self.url = ""
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        self._ready.wait()
        assert self.url, "the server ended before it was ready:\n" + "".join(self.said)

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """kill -9, unless it has ended."""
        self.killed = True
        self._process.kill()
        self._wait(30)

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._wait(timeout)

    def post(self, path: str, timeout: float = 120, **body: Any) -> dict[str, Any]:
        """The JSON of a good answer. Raises OSError (HTTPError among them) or http.client.HTTPException otherwise."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))
        }

    def _wait(self, timeout: float) -> int:
        code = self._process.wait(timeout)
        self._listener.join(timeout)
        return code

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.said.append(line)
                if not self.url and (found := re.match(r"Ready: .* on (http://\S+)/v1", line)):
                    self.url = found[1]
                    self._ready.set()
        self._ready.set()
