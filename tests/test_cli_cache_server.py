"""`tierax cache … URL` against a live server on a fake device."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.live_server import Live
from helpers.tiered_engine import TieredEngine
from tierax.cli.main import main
from tierax.serving.config import ServerConfig


class InThread:
    """A live server with an event loop of its own, so that the command line may block."""

    def __init__(self, **config: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.engine = TieredEngine()
        self.live: Live = self._run(Live.start(self.engine, ServerConfig(**config)))
        self.url = self.live.url

    def close(self) -> None:
        self._run(self.live.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


@pytest.fixture
def server() -> Iterator[InThread]:
    running = InThread(api_key="secret")
    yield running
    running.close()


@pytest.fixture
def ask(server: InThread, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIERAX_API_KEY", "secret")

    def ask(command: str, *args: str, code: int = 0) -> Any:
        assert main(["cache", command, server.url, *args, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return ask


def test_warm_stat_pin_ls_clear(
    server: InThread, ask, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "abcdefghijklmnop"}\n\n{"messages": [{"role": "user", "content": "Hi"}]}\n{"prompt": ""}\n'
    )
    found = ask("warm", "--file", str(prompts), "--prompt", "0123456789", code=1)
    assert [item.get("prompt_tokens", "error" in item) for item in found["items"]][:2] == [10, 16]
    assert found["failed"] == 1
    assert main(["cache", "warm", server.url, "--prompt", "0123456789"]) == 0
    assert capsys.readouterr().out == "1 prompt: 2 tokens computed, 8 cached already, 0 failed\n"

    pin = ask("pin", "--prompt", "abcdefghijklmnop")[0]
    assert (pin["pages"], pin["computed_tokens"]) == (4, 4)
    stat = ask("stat")
    assert stat["tiers"]["host"]["pinned_pages"] == 4
    assert stat["tiers"]["device"]["used_pages"] >= 6
    assert main(["cache", "stat", server.url + "/v1/"]) == 0
    text = capsys.readouterr().out
    assert "4 pinned (of at most 16)" in text
    assert "memory://" in text
    listed = ask("ls")
    assert [row["id"] for row in listed["pins"]] == [pin["id"]]
    assert len(listed["namespaces"]) == 1

    cleared = ask("clear", "--tier", "device")
    assert cleared["tiers"].keys() == {"device"}
    cleared = ask("clear")
    assert cleared["complete"]
    assert cleared["tiers"]["host"] == {
        "dropped_pages": stat["tiers"]["host"]["used_pages"] - 4,
        "kept_pages": 4,
        "pinned_pages": 4,
    }
    assert main(["cache", "unpin", server.url, "--id", pin["id"]]) == 0
    assert capsys.readouterr().out == f"{pin['id']}  4 pages unpinned\n"
    assert main(["cache", "ls", server.url]) == 0
    assert "host 4" in capsys.readouterr().out
    assert (
        ask("clear", "--namespace", listed["namespaces"][0]["namespace"][:8])["tiers"]["host"][
            "dropped_pages"
        ]
        == 4
    )


def test_mistakes(server: InThread, ask, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def complaint(*args: str, code: int = 2) -> str:
        assert main(["cache", *args]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    assert "The API key is wrong." in complaint("stat", server.url, "--api-key", "x", code=1)
    assert "no host cache" not in complaint("pin", server.url, "--prompt", "abc", code=1)
    assert "this is for what was given to --host-disk-cache-dir" in complaint("verify", server.url)
    assert "this is for a running server" in complaint("warm", str(tmp_path), "--prompt", "x")
    assert "--tier is for a running server" in complaint("clear", str(tmp_path), "--tier", "host")
    assert "give --prompt TEXT or --file FILE" in complaint("warm", server.url)
    assert "There is no pin 'x'" in complaint("unpin", server.url, "--id", "x", code=1)
    assert "must be device, host or disk" in complaint("clear", server.url, "--tier", "l1", code=1)
    (tmp_path / "bad").write_text("[1]\n")
    assert "line 1: write" in complaint("pin", server.url, "--file", str(tmp_path / "bad"))
    assert "refused" in complaint("stat", "http://127.0.0.1:9").lower()
