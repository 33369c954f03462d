"""Settings are checked when they are made, with one line that names the setting."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tierax.cache.policies.lru import LRU
from tierax.engine.config import ConfigError, EngineConfig, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("512B", 512),
        ("1k", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        (" 2 gib ", 2 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("0.5TiB", 2**39),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", -1, "2 apples", "1e9", "2GiBs", "nan", True])
def test_no_sizes(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"^host_cache_size: .* is not a size"):
        parse_size(text, "host_cache_size")


def test_defaults_leave_the_choice_to_the_engine() -> None:
    config = EngineConfig(model_path="demo")
    assert (config.page_size, config.max_num_seqs, config.max_num_batched_tokens) == (None, None, None)
    assert (config.dtype, config.kv_cache_dtype, config.schedule_policy) == ("auto", "auto", "fcfs")
    assert config.device_cache_bytes(available=10**9) is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_spellings_are_normalised() -> None:
    config = EngineConfig(model_path="demo", dtype="bfloat16", kv_cache_dtype="float32")
    assert (config.dtype, config.kv_cache_dtype) == ("bf16", "f32")
    for spelling in ("fp8", "fp8_e4m3", "fp8_e4m3fn"):
        assert EngineConfig(model_path="demo", kv_cache_dtype=spelling).kv_cache_dtype == "fp8"


@pytest.mark.parametrize(
    ("size", "expected"), [("2GiB", 2**31), (12345, 12345), ("40%", 400), ("12.5 %", 125), ("100%", 1000)]
)
def test_device_cache_bytes(size: int | str, expected: int) -> None:
    assert (
        EngineConfig(model_path="demo", device_cache_size=size).device_cache_bytes(available=1000) == expected
    )


@pytest.mark.parametrize(
    ("setting", "value", "complaint"),
    [
        ("model_path", " ", "give a directory"),
        ("dtype", "float16", "must be auto, f32 or bf16"),
        ("dtype", None, "must be auto, f32 or bf16"),
        ("dtype", "fp8", "must be auto, f32 or bf16"),
        ("kv_cache_dtype", "fp8_e5m2", "there is no fp8_e5m2 KV; the 8-bit kind is fp8, which is e4m3"),
        ("kv_cache_dtype", "int8", "there is no int8 KV"),
        ("quantization", "int2", "must be none, int8, fp8 or int4"),
        ("kv_cache_dtype", "q4", "must be auto, f32, bf16 or fp8"),
        ("page_size", 0, "at least 1"),
        ("page_size", 1.5, "at least 1"),
        ("max_num_seqs", -1, "at least 1"),
        ("max_num_seqs", True, "at least 1"),
        ("max_num_batched_tokens", "12", "at least 1"),
        ("context_length", 0, "at least 1"),
        ("schedule_policy", "random", "must be fcfs or lpm"),
        (
            "eviction_policy",
            "lfru",
            "must be lru, lfu, fifo, slru, s3fifo, gdsf, ttl, adaptive, hazard or module:Class",
        ),
        (
            "eviction_policy",
            "mod:",
            "must be lru, lfu, fifo, slru, s3fifo, gdsf, ttl, adaptive, hazard or module:Class",
        ),
        ("device_cache_size", "0", "cannot be empty"),
        ("device_cache_size", "0%", "above 0%"),
        ("device_cache_size", "101%", "at most 100%"),
        ("device_cache_size", "lots", "is not a size"),
        ("device_cache_size", 1.5, "is not a size"),
        ("seed", -1, "from 0 to"),
        ("seed", 2**63, "from 0 to"),
        ("skip_warmup", "yes", "true or false"),
        ("disable_radix_cache", 1, "true or false"),
        ("served_model_name", "", "must not be empty"),
        ("compile_cache_dir", None, "a directory, auto or none"),
    ],
)
def test_bad_values_are_named(setting: str, value: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.create(**{"model_path": "demo", setting: value})  # pyright: ignore[reportArgumentType]
    message = str(caught.value)
    assert message.startswith(f"{setting}: ")
    assert complaint in message
    assert "\n" not in message


def test_eviction_policies(tmp_path: Path) -> None:
    def make(name: str) -> object:
        return EngineConfig(model_path="demo", eviction_policy=name).make_eviction_policy()

    assert isinstance(make("lru"), LRU)
    assert isinstance(make("tierax.cache.policies.lru:LRU"), LRU)
    file = tmp_path / "mine.py"
    file.write_text(
        "from tierax.cache.policies.registry import EvictionPolicy\n\n\nclass Mine(EvictionPolicy):\n"
        "    def touch(self, item, use): ...\n    def priority(self, item): return 0\n"
    )
    assert type(make(f"{file}:Mine")).__name__ == "Mine"
    with pytest.raises(ConfigError, match=r"^eviction_policy: .*Other"):
        make(f"{file}:Other")
    config = EngineConfig(model_path="demo", host_eviction_policy="fifo", disk_eviction_policy="ttl=1h")
    tiers = [type(config.make_eviction_policy(tier)).__name__ for tier in ("device", "host", "disk")]
    assert tiers == ["LRU", "FIFO", "TTL"]


def test_unknown_settings_get_a_near_match() -> None:
    with pytest.raises(ConfigError, match=r"^max_num_seq: no such setting; did you mean max_num_seqs\?$"):
        EngineConfig.create("demo", max_num_seq=4)
    with pytest.raises(ConfigError, match=r"^zzz: no such setting; known: .*page_size"):
        EngineConfig.create("demo", zzz=4)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("demo", "demo"),
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/models/Qwen3-8B/", "Qwen3-8B"),
        ("~/m/tiny.Q4_1.gguf", "tiny.Q4_1"),
        ("/", "/"),
    ],
)
def test_model_name(path: str, name: str) -> None:
    assert EngineConfig(model_path=path).model_name == name
    assert EngineConfig(model_path=path, served_model_name="x").model_name == "x"


def test_compile_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def path_of(setting: str) -> Path | None:
        return EngineConfig(model_path="demo", compile_cache_dir=setting).compile_cache_path()

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert path_of("auto") == tmp_path / "xdg" / "tierax" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert path_of("auto") == tmp_path / ".cache" / "tierax" / "compiled"
    assert path_of("~/programs") == tmp_path / "programs"
    assert path_of("none") is None
    assert list(tmp_path.iterdir()) == []
