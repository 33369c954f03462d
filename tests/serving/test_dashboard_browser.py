"""The dashboard as a real browser shows it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from helpers.cached_prompts import use
from helpers.chromium import Browser, find_chromium
from helpers.fake_engine import FakeEngine, say
from helpers.live_server import Live
from helpers.tiered_engine import TieredEngine
from tierax.cache.manager import CacheManager

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: chromium)"),
]

PROMPT = "abcdefghijklmnopqrstuvwxyz012345"
"""Eight pages of four tokens."""


@pytest_asyncio.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    async with Browser(CHROMIUM, tmp_path / "profile") as browser:
        await browser.size(1280, 900)
        yield browser


async def enter(browser: Browser, live: Live, key: str) -> None:
    """Opens the page and logs in as a person would."""
    await browser.open(f"{live.url}/dashboard")
    await browser.until("document.querySelector('#key')")
    await browser.value(f"document.querySelector('#key').value = {json.dumps(key)}")
    await browser.value("document.querySelector('form button').click()")


SHOWN = "document.querySelector('#model')?.innerText === 'fake'"


async def test_a_browser_shows_the_whole_of_it(serve, browser):
    live = await serve(engine=TieredEngine(pages=64, host_pages=128), api_key="a+secret/key")
    await enter(browser, live, "wrong")
    await browser.until("document.querySelector('#problem').innerText === 'The API key is wrong.'")
    # The wrong key's 401, and that of the page itself.
    browser.problems.clear()
    await enter(browser, live, "a+secret/key")
    await browser.until(SHOWN)
    browser.problems.clear()
    # Empty.
    assert "Nothing is cached yet" in await browser.text(".stage")
    assert "Nothing is running" in await browser.text("#no-requests")
    # Busy.
    headers = {"Authorization": "Bearer a+secret/key"}
    for tail in ("", "tail one", "and another"):
        body = {"prompt": PROMPT + tail, "max_tokens": 4}
        assert (await live.post("/v1/completions", body, headers=headers))[0] == 200
    body = {"prompt": PROMPT, "max_tokens": 160, "stream": True}
    stream = await live.session.post(live.url + "/v1/completions", json=body, headers=headers)
    await browser.until("/[1-9][0-9]* nodes, /.test(document.querySelector('#tree-note').innerText)")
    await browser.until("document.querySelector('#hit').innerText.endsWith('%')")
    await browser.until("document.querySelector('#ttft').innerText.endsWith('s')")
    shelves = await browser.text("#shelves")
    for text in ("Device", "Host memory", "Disk", "tokens hit here", "under way"):
        assert text in shelves
    await stream.read()
    assert await browser.text("#state") == "ready"
    assert await browser.value("document.documentElement.scrollWidth <= innerWidth")
    # Nothing went wrong in the page, nothing was refused by its policy, nothing came from elsewhere.
    assert browser.problems == []
    assert all(url.startswith(f"{live.url}/dashboard") for url in browser.requested)
    assert all("secret" not in url for url in browser.requested)
    assert (
        await browser.value("document.cookie + JSON.stringify({...localStorage, ...sessionStorage})") == "{}"
    )
    await browser.value("document.querySelector('#logout').click()")
    await browser.until("document.querySelector('#key')")


async def test_the_tree_can_be_explored(serve, browser):
    live = await serve(engine=TieredEngine(pages=64, host_pages=128))
    for tail in ("", "tail one", "and another"):
        await live.complete(PROMPT + tail, max_tokens=4)
    await browser.open(f"{live.url}/dashboard")
    await browser.until("/[1-9][0-9]* nodes, /.test(document.querySelector('#tree-note').innerText)")
    await browser.value("document.querySelector('#tree').scrollIntoView({block: 'center'})")
    box = await browser.value(
        "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('#tree').getBoundingClientRect())"
    )
    x, y = box[0] + 20, box[1] + 5
    await browser.mouse("mouseMoved", x, y)
    await browser.until("!document.querySelector('#tip').hidden")
    assert (await browser.text("#tip")).startswith("tokens 0 to 32\non the device 8 of 8 pages\n")

    async def pixels() -> str:
        return await browser.value("document.querySelector('#tree').toDataURL()")

    whole = await pixels()
    for kind in ("mousePressed", "mouseReleased"):
        await browser.mouse(kind, x, y, button="left", clickCount=1)
    await browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    await asyncio.sleep(0.2)
    closer = await pixels()
    assert closer != whole
    await browser.value("document.querySelector('#fit').click()")
    await asyncio.sleep(0.2)
    assert await pixels() == whole
    for kind, clicks in (
        ("mousePressed", 1),
        ("mouseReleased", 1),
        ("mousePressed", 2),
        ("mouseReleased", 2),
    ):
        await browser.mouse(kind, box[0] + 0.8 * box[2], box[1] + 5, button="left", clickCount=clicks)
    await asyncio.sleep(0.2)
    assert await pixels() not in (whole, closer)
    assert browser.problems == []


async def test_thousands_of_nodes_stay_fluid(serve, browser):
    engine = FakeEngine(say("x"))
    engine.cache = CacheManager(20_000, 16)
    for first in range(3000):
        use(engine.cache, [first % 40] * 16 + [first] * (16 * (1 + first % 3)))
    live = await serve(engine=engine)
    await browser.open(f"{live.url}/dashboard")
    await browser.until("document.querySelector('#tree-note').innerText.startsWith('2,000 nodes')")
    # Zooming by the keyboard; every frame is drawn in full.
    frames = await browser.value(
        """new Promise((done) => {
          const tree = document.querySelector("#tree"), times = [];
          let last = performance.now();
          const frame = (now) => {
            times.push(now - last);
            last = now;
            if (times.length === 30) return done(times.slice(5).sort((a, b) => a - b));
            tree.dispatchEvent(new KeyboardEvent("keydown", { key: times.length % 2 ? "+" : "ArrowDown" }));
            requestAnimationFrame(frame);
          };
          requestAnimationFrame(frame);
        })"""
    )
    # The median of a software renderer on a busy machine; 60 frames a second are 17 ms.
    assert frames[len(frames) // 2] < 150
    assert browser.problems == []


@pytest.mark.slow
async def test_a_lost_server_is_said_and_comes_back(serve, browser):
    live = await serve()
    await browser.open(f"{live.url}/dashboard")
    await browser.until(SHOWN)
    live.thread.kill()
    await browser.until("document.querySelector('#state').innerText === 'The engine has stopped.'")
    await browser.send(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=-1,
        uploadThroughput=-1,
    )
    await browser.until("document.querySelector('#state').innerText === 'no connection'")
    assert "Trying again" in await browser.text("#banner")
    await browser.send(
        "Network.emulateNetworkConditions",
        offline=False,
        latency=0,
        downloadThroughput=-1,
        uploadThroughput=-1,
    )
    await browser.until("document.querySelector('#banner').hidden")
