"""A real headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any, Self

from aiohttp import ClientSession, ClientWebSocketResponse

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """The browser's path; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. Use it as `async with`; what pages complain of is in `problems`."""

    def __init__(self, program: str, profile: Path) -> None:
        self._command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._last_id = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        """Errors on the console, exceptions, and refusals by the page's security policy."""
        self.requested: list[str] = []
        """Every URL that the page asked for."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stderr is not None
        address = ""
        while not (found := re.search(r"DevTools listening on ws://([^/]+)", address)):
            line = await asyncio.wait_for(self._process.stderr.readline(), 30)
            assert line, "Chromium ended before it listened"
            address = line.decode()
        self._drain = asyncio.create_task(self._process.stderr.read())
        self._session = ClientSession()
        async with self._session.get(f"http://{found[1]}/json") as response:
            pages = [page for page in await response.json() if page["type"] == "page"]
        self._socket: ClientWebSocketResponse = await self._session.ws_connect(
            pages[0]["webSocketDebuggerUrl"], max_msg_size=0
        )
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()
        await self._reader
        await self._session.close()
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()
        await self._drain

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the protocol; its result."""
        self._last_id += 1
        answer = self._answers[self._last_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._last_id, "method": method, "params": params})
        return await asyncio.wait_for(answer, 20)

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        found = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 10.0) -> None:
        """Waits for a JavaScript expression to be true, which it may fail before; fails itself after `seconds`."""
        tried = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        for _ in range(int(seconds / 0.05)):
            if await self.value(tried):
                return
            await asyncio.sleep(0.05)
        text = await self.value("document.body.innerText")
        raise AssertionError(f"{expression} did not come true; the page says: {text[:2000]}")

    async def text(self, selector: str) -> str:
        return await self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the window's size and the preferred colours."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Writes a PNG of the page."""
        found = await self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                answer = self._answers.pop(event["id"])
                if answer.done():
                    continue
                if "error" in event:
                    answer.set_exception(RuntimeError(event["error"]["message"]))
                else:
                    answer.set_result(event["result"])
                continue
            params = event.get("params", {})
            match event["method"]:
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(params["exceptionDetails"]))
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.problems.append(params["entry"]["text"])
                case "Network.requestWillBeSent":
                    self.requested.append(params["request"]["url"])
