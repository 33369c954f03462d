"""The size of a pool that was left to the engine."""

from __future__ import annotations

import pytest

from tierax.engine import platform
from tierax.engine.config import QUANTIZATIONS, ConfigError
from tierax.engine.platform import device_memory, pool_pages, weight_form

GIB = 1 << 30


def test_memory_is_known() -> None:
    steady, available = device_memory()
    assert 0 < available <= steady
    assert device_memory()[0] == steady


def test_a_pool_with_room_has_the_size_that_is_wanted() -> None:
    assert pool_pages(3 * GIB, 20 * GIB, 1 << 20) == 3 * 1024


@pytest.mark.parametrize("available", [2.0, 2.1, 2.19, 1.2])
def test_a_pool_short_of_room_does_not_follow_every_free_byte(available: float) -> None:
    # Else each start would have programs of its own to compile.
    assert pool_pages(3 * GIB, int(available * GIB), 1 << 20) == 1024


def test_no_room_gives_next_to_nothing() -> None:
    assert pool_pages(3 * GIB, 1000, 1 << 20) == 1


def test_quantised_weights_have_the_form_that_suits_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [weight_form(name, "tpu") for name in QUANTIZATIONS] == ["none", "int8-rows", "fp8", "int4"]
    assert [weight_form(name, "cpu") for name in ("none", "int8")] == ["none", "int8"]
    for name in ("fp8", "int4"):
        with pytest.raises(ConfigError, match=f"quantization: {name} is for TPUs and GPUs.*use int8"):
            weight_form(name, "cpu")
    monkeypatch.setattr(platform, "find_spec", lambda name: None)
    assert weight_form("int8", "gpu") == "int8"  # without qwix
