"""A page is the same bytes on every floor: from the device to the host and the disk and back, to the last bit."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import numpy as np
import pytest

from helpers.faulty_run import FaultyRun
from helpers.tiny_engine import TinyDevice, TinyModel
from tierax.cache.disk.record import PAYLOAD_OFFSET
from tierax.cache.radix_tree import DEVICE
from tierax.engine.request import SamplingParams

PAGE = 4
PROMPT = [random.Random(3).randrange(256) for _ in range(41)]
WHOLE = len(PROMPT) // PAGE
OPTIONS = SamplingParams(max_tokens=5, temperature=0.0)


@pytest.fixture(scope="module", params=["f32", "fp8"])
def device(request: pytest.FixtureRequest) -> TinyDevice:
    device = TinyDevice(
        TinyModel(stacked=True), PAGE, tokens_in_pool=256, coarse=True, kv_fp8=request.param == "fp8"
    )
    warm = device.run()
    warm.add(PROMPT, OPTIONS)
    warm.finish()
    return device


def on_device(run: FaultyRun, tokens: list[int]) -> list[bytes]:
    """The bytes of the prompt's pages, as they are in the device pool now."""
    lease = run.cache.open(b"", array("i", tokens), len(tokens))
    pages = np.array(run.device.pool.array)[lease.pages]
    run.cache.release(lease)
    return [page.tobytes() for page in pages]


def on_host(run: FaultyRun, tokens: list[int]) -> list[bytes]:
    hold = run.cache.hold(b"", array("i", tokens), len(tokens))
    rows = run.cache.rows(hold, 0, hold.num_pages)
    run.cache.drop(hold)
    return [run.tiers.host.slab[row].tobytes() for row in rows]


def on_disk(run: FaultyRun, tokens: list[int]) -> list[bytes]:
    assert run.store.local is not None
    files = {path.name.split(".")[0]: path for path in run.store.local.rglob("*.*.*")}
    return [files[key.key.hex()].read_bytes()[PAYLOAD_OFFSET:] for key in run.keys(tokens)]


def overwrite(run: FaultyRun, rng: random.Random) -> None:
    """Other requests' pages take the place of all that was there, on device and host."""
    while run.cache.match(b"", array("i", PROMPT), len(PROMPT)) != (0, 0):
        run.answer([rng.randrange(256) for _ in range(60)], OPTIONS)
    run.finish()


def test_pages_come_back_bit_by_bit(device: TinyDevice, tmp_path: Path) -> None:
    run = FaultyRun(device, tmp_path, pages=40, host_pages=24, prefetch="wait_complete")
    run.answer(PROMPT, OPTIONS)
    run.finish()
    first = on_device(run, PROMPT)
    assert len(set(first)) == WHOLE, "pages that differ"
    assert on_host(run, PROMPT) == on_disk(run, PROMPT) == first

    overwrite(run, random.Random(1))
    again = run.answer(PROMPT, OPTIONS)
    assert again.cached_by_tier == {"device": 0, "host": 0, "disk": WHOLE * PAGE}
    assert on_host(run, PROMPT) == on_device(run, PROMPT) == first

    # From the host alone, to other places of the device.
    run.finish()
    run.cache.clear(DEVICE)
    keep = [run.cache.open(b"", array("i"), 0) for _ in range(3)]
    for lease in keep:
        assert run.cache.grow(lease, PAGE)
    request = run.add(PROMPT, OPTIONS)
    while request.finish_reason is None:
        run.loop.step()
    for lease in keep:
        run.cache.release(lease)
    assert request.cached_by_tier == {"device": 0, "host": WHOLE * PAGE, "disk": 0}
    assert on_device(run, PROMPT) == first

    run.finish()
    run.close()

    after = FaultyRun(device, tmp_path, pages=40, host_pages=24, prefetch="wait_complete")
    assert on_device(after, PROMPT) == on_host(after, PROMPT) == []
    assert after.answer(PROMPT, OPTIONS).cached_by_tier["disk"] == WHOLE * PAGE
    assert on_disk(after, PROMPT) == on_host(after, PROMPT) == on_device(after, PROMPT) == first
    after.finish()
    after.close()
