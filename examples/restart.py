"""One question before and after `kill -9`: the second server finds on disk what the first one had computed.

python examples/restart.py [MODEL]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

PROMPT = "The harbour of Aldwater has two moles, a lighthouse, and a ferry that crosses the bay. " * 12
PROMPT += "\nQuestion: What crosses the bay?\nAnswer: The"
WRITTEN_S = 30.0
"""How long the first server may take to write the prompt's pages."""


class Server:
    """`tierax serve` with a disk cache, in a process of its own."""

    def __init__(self, model: str, cache: Path) -> None:
        flags = ["--port", "0", "--host-disk-cache-dir", str(cache), "--prefetch-policy", "wait_complete"]
        command = [
            sys.executable,
            "-m",
            "tierax",
            "serve",
            model,
            "--skip-warmup",
            "--data-dir",
            "none",
            *flags,
        ]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = self._ready()

    def _ready(self) -> str:
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if found := re.match(r"Ready: .* on (http://\S+)/v1", line):
                return found[1]
        sys.exit("".join(said))

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        self._process.kill()
        self._process.communicate()

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def ask(self) -> str:
        """The answer, and where its prompt came from."""
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = self.call("/v1/completions", body)
        usage = answer["usage"]
        tiers = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
        print(
            f"{answer['choices'][0]['text'].strip()!r}\n  of {usage['prompt_tokens']} prompt tokens from the cache: {tiers}"
        )
        return answer["choices"][0]["text"]

    def wait_written(self) -> None:
        """Until the disk has the pages of the prompt, which are written behind the answer."""
        for _ in range(int(WRITTEN_S / 0.1)):
            tiers = self.call("/cache/stat")["tiers"]
            if tiers["disk"]["used_pages"] >= tiers["device"]["used_pages"] > 0:
                return
            time.sleep(0.1)
        sys.exit("the pages were not written in time")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with tempfile.TemporaryDirectory() as folder:
        answers = []
        for name in ("first", "second"):
            print(f"the {name} server:")
            server = Server(model, Path(folder))
            try:
                answers.append(server.ask())
                server.wait_written()
            finally:
                server.kill()
    print("the same answer" if answers[0] == answers[1] else "the answers differ")


if __name__ == "__main__":
    main()
