"""Every knob of the engine, checked when it is made. Pure: no jax, no clock, no file is touched."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ..cache.manager import WRITE_POLICIES
from ..cache.policies.registry import POLICIES, EvictionPolicy, load_policy
from .prefetch_policy import PrefetchPolicy
from .schedule_policy import SCHEDULE_POLICIES

DTYPES = ("auto", "f32", "bf16")
KV_DTYPES = (*DTYPES, "fp8")
QUANTIZATIONS = ("none", "int8", "fp8", "int4")
"""What they come to on a platform, `platform.weight_form` says."""
ATTENTION_BACKENDS = ("auto", "native", "tpu", "mosaic-gpu", "triton", "xla")
"""Names of `pallas_kernels.attention.BACKENDS`, which cannot be asked without loading jax."""

_DTYPE_SPELLINGS = {"float32": "f32", "fp32": "f32", "float": "f32", "bfloat16": "bf16"}
_KV_DTYPE_SPELLINGS = _DTYPE_SPELLINGS | {"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8"}
_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}b": size for unit, size in _UNITS.items() if unit and unit != "b"}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_TIMES = re.compile(r"(\d+(?:\.\d+)?)\s*x")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_CLASS_PATH = re.compile(r"[^:]+:[A-Za-z_]\w*")


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line that says which, and what would do."""


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes of `2GiB`, `512MiB`, `1.5GB`, `4096` … (KiB … TiB are powers of 1024, KB … TB of 1000).

    Raises `ConfigError` naming `name` when the text is no such size.
    """
    if _is_int(text) and text >= 0:
        return text
    match = _SIZE.fullmatch(text.strip().lower()) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{name}: {text!r} is not a size; write bytes or e.g. 2GiB, 512MiB, 1.5GB")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def parse_percent(text: str, name: str = "size") -> float | None:
    """The fraction of `40%`; None when the text is no percentage. Raises `ConfigError` outside (0, 100]."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return None
    fraction = float(match[1]) / 100
    if not 0 < fraction <= 1:
        raise ConfigError(f"{name}: {text!r} must be above 0% and at most 100%")
    return fraction


class _Ratio(NamedTuple):
    times: float
    of_device: bool


def _ratio(text: str, name: str) -> _Ratio | None:
    """Of `2x` (the device cache) or `40%` (of what is available); None for anything else."""
    match = _TIMES.fullmatch(text.strip())
    if match is not None:
        return _Ratio(float(match[1]), of_device=True)
    fraction = parse_percent(text, name)
    return None if fraction is None else _Ratio(fraction, of_device=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to run and how. A bad value raises `ConfigError`; None means "as suits the model and platform"."""

    model_path: str
    """A Hugging Face directory, a GGUF file, an Orbax checkpoint, or `demo`."""
    served_model_name: str | None = None
    """Name in `/v1/models` and in answers; None = `model_name`."""
    dtype: str = "auto"
    """Dtype of weights: auto, f32 or bf16. Activations have it too, but on CPU they are f32."""
    quantization: str = "none"
    """Of the weights' matrices: none, int8, fp8 or int4. On CPUs int8 has a scale per row and 64 columns, and the others are
    refused; elsewhere int8 and fp8 have a scale per row, int4 one per row and 64 columns."""
    kv_cache_dtype: str = "auto"
    """Dtype of stored KV: auto (= that of activations), f32, bf16, or fp8 (e4m3 with a scale per token and head)."""
    attention_backend: str = "auto"
    """Kernels of the step, a name of `ATTENTION_BACKENDS`; auto = the best for platform and model."""
    tp_size: int = 1
    """Devices that the model is split over (tensor parallelism)."""
    dp_size: int = 1
    """Copies of the model in this process, each on `tp_size` devices of its own with a cache of its own above the disk's."""
    coordinator_address: str | None = None
    """`host:port` of process 0, where several processes run one model; the port behind it is used as well."""
    num_processes: int = 1
    """Processes that run the model together, each with as many of its devices."""
    process_id: int = 0
    """Which of them this is; 0 schedules and serves, the others follow it."""
    page_size: int | None = None
    """Tokens per page; None = platform default (16 on CPU)."""
    device_cache_size: int | str = "auto"
    """Memory of the page pool on each device: bytes, `2GiB`, `40%` of what is available once weights are loaded, or auto."""
    max_num_seqs: int | None = None
    """Requests running at once; None = platform default."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step, prefill chunks and decodes together; None = platform default."""
    shared_step_tokens: int | None = None
    """Tokens up to which short prompts share a step, decodes included (a longer one fills it); None = platform default (128 on
    CPU, elsewhere no such bound)."""
    context_length: int | None = None
    """Longest prompt plus output in tokens; None = the model's own."""
    schedule_policy: str = "fcfs"
    """Order of waiting requests: fcfs, or lpm (longest cached prefix first, with an ageing bound)."""
    eviction_policy: str = "lru"
    """Which cached page goes first: a name (lru, lfu, fifo, slru, s3fifo, gdsf, ttl=1h), or your own as `module:Class`
    or `path/to/file.py:Class`."""
    host_eviction_policy: str | None = None
    """The same for host memory; None = `eviction_policy`."""
    disk_eviction_policy: str | None = None
    """The same for the disk; None = `eviction_policy`."""
    host_cache_size: int | str = "auto"
    """Host memory for KV that leaves the device: bytes, `2GiB`, `40%` of what is available, `2x` the device cache, 0 for
    none, or auto. Of all copies of the model together, but for `2x`, which is for each."""
    host_disk_cache_dir: str | None = None
    """Where KV outlives the process: a directory, or a URL of tensorstore's (`s3://`, `gs://`, `file://`, `memory://`);
    None = nowhere."""
    disk_cache_size: int | str = "20GiB"
    """Most bytes that the disk cache takes."""
    disk_free_space: int | str = "1GiB"
    """Bytes of its file system that the disk cache leaves free."""
    disk_cache_read_only: bool = False
    """Read the disk cache, but write nothing to it."""
    disk_cache_refresh: float = 30.0
    """Seconds between looks for what other processes have written to the disk cache; 0 = only at start."""
    disk_cache_shared: bool = False
    """Other servers write to the same disk cache: agree with them on what is deleted, and look there for what they have just
    written."""
    disk_cache_lease: float = 30.0
    """Seconds after which a server that shares the disk cache and is not heard of counts as dead; the same for all. No page
    that was used within it is deleted."""
    write_policy: str = "write_through"
    """When KV goes down to the host: write_through (as it is computed), write_through_selective (once it was used again),
    write_back (when the device evicts it). What enters the host goes on to the disk."""
    prefetch_policy: str = "timeout=300ms"
    """How long a request waits for the disk: best_effort, wait_complete, or timeout=N ms."""
    prefetch_max_wait: float = 10.0
    """Seconds that bound every such wait."""
    disable_prefetch: bool = False
    """Read from the disk only when a request's turn has come, not on its arrival."""
    disable_radix_cache: bool = False
    """Share no KV between requests."""
    seed: int = 0
    """Seed of requests that bring none."""
    skip_warmup: bool = False
    """Compile each program when it is first needed rather than at start."""
    compile_cache_dir: str = "auto"
    """Where compiled programs persist: a directory, auto (below the user's cache directory), or none."""
    trace_out: str | None = None
    """A new file for a recording of the requests: times, lengths and keyed hashes of pages, no text; None = none."""

    def __post_init__(self) -> None:
        if not isinstance(self.model_path, str) or not self.model_path.strip():
            raise ConfigError("model_path: give a directory, a .gguf file, or demo")
        dtype = _one_of("dtype", _DTYPE_SPELLINGS.get(self.dtype, self.dtype), DTYPES)
        kv_dtype = _KV_DTYPE_SPELLINGS.get(self.kv_cache_dtype, self.kv_cache_dtype)
        if kv_dtype in ("fp8_e5m2", "int8"):
            raise ConfigError(
                f"kv_cache_dtype: there is no {kv_dtype} KV; the 8-bit kind is fp8, which is e4m3 with a scale per"
                " token and head"
            )
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "kv_cache_dtype", _one_of("kv_cache_dtype", kv_dtype, KV_DTYPES))
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _one_of("schedule_policy", self.schedule_policy, tuple(SCHEDULE_POLICIES))
        for name in ("eviction_policy", "host_eviction_policy", "disk_eviction_policy"):
            self._check_eviction_policy(name)
        self._check_tiers()
        for name in (
            *("page_size", "max_num_seqs", "max_num_batched_tokens", "shared_step_tokens"),
            "context_length",
        ):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ConfigError(f"{name}: {value!r} must be a whole number of at least 1")
        self._check_processes()
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed: {self.seed!r} must be a whole number from 0 to 2**63 - 1")
        for name in (
            *("disable_radix_cache", "skip_warmup", "disable_prefetch"),
            *("disk_cache_read_only", "disk_cache_shared"),
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: {getattr(self, name)!r} must be true or false")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("served_model_name: must not be empty")
        if not isinstance(self.compile_cache_dir, str) or not self.compile_cache_dir:
            raise ConfigError("compile_cache_dir: must be a directory, auto or none")
        if self.trace_out is not None and not str(self.trace_out).strip():
            raise ConfigError("trace_out: give a file")
        self._check_device_cache_size()

    def _check_device_cache_size(self) -> None:
        size = self.device_cache_size
        if size == "auto" or (isinstance(size, str) and parse_percent(size, "device_cache_size") is not None):
            return
        if parse_size(size, "device_cache_size") == 0:
            raise ConfigError(
                "device_cache_size: the device pool cannot be empty; running requests live in it"
            )

    def _check_processes(self) -> None:
        for name in ("tp_size", "dp_size", "num_processes"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ConfigError(f"{name}: {value!r} must be a whole number of at least 1")
        processes = self.num_processes
        if self.dp_size > 1 and processes > 1:
            raise ConfigError(
                f"dp_size: {self.dp_size} copies of the model are for one process; several processes run one model"
            )
        if self.dp_size > 1 and self.host_disk_cache_dir is not None:
            # To each copy the others are servers that write there.
            object.__setattr__(self, "disk_cache_shared", True)
        if not _is_int(self.process_id) or not 0 <= self.process_id < processes:
            raise ConfigError(
                f"process_id: {self.process_id!r} must be a whole number from 0 to {processes - 1}"
            )
        if self.coordinator_address is None:
            if processes > 1:
                raise ConfigError("coordinator_address: several processes need host:port of process 0")
            return
        self.channel_address  # noqa: B018  (complains of what is no address)
        if processes > 1 and self.tp_size % processes:
            raise ConfigError(
                f"tp_size: {self.tp_size} devices cannot be shared out evenly among {processes} processes"
            )
        if processes > 1 and str(self.host_disk_cache_dir).startswith("memory:"):
            raise ConfigError(
                "host_disk_cache_dir: no process sees another one's memory: give a directory or a bucket that all of them see"
            )

    @property
    def channel_address(self) -> tuple[str, int]:
        """Host, and the port on which process 0 tells the others what to do: the one behind the coordinator's."""
        host, _, port = (self.coordinator_address or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65535:
            raise ConfigError(f"coordinator_address: {self.coordinator_address!r} must be host:port")
        return host.strip("[]"), int(port) + 1

    def _check_eviction_policy(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not _CLASS_PATH.fullmatch(value):
            _one_of(name, value.partition("=")[0], (*POLICIES, "module:Class"))

    def _check_tiers(self) -> None:
        size = self.host_cache_size
        if size != "auto" and not (isinstance(size, str) and _ratio(size, "host_cache_size") is not None):
            parse_size(size, "host_cache_size")
        for name in ("disk_cache_size", "disk_free_space"):
            parse_size(getattr(self, name), name)
        if self.host_disk_cache_dir is not None and not str(self.host_disk_cache_dir).strip():
            raise ConfigError("host_disk_cache_dir: give a directory or a URL")
        _one_of("write_policy", self.write_policy, WRITE_POLICIES)
        try:
            PrefetchPolicy.parse(self.prefetch_policy)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("prefetch_max_wait", "disk_cache_refresh"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}: {value!r} must be seconds, 0 or more")
        lease = self.disk_cache_lease
        if isinstance(lease, bool) or not isinstance(lease, int | float) or not 1 <= lease < math.inf:
            raise ConfigError(f"disk_cache_lease: {lease!r} must be seconds, at least 1")

    @property
    def model_name(self) -> str:
        """Name that clients use: `served_model_name`, or the last part of the path without `.gguf`."""
        if self.served_model_name:
            return self.served_model_name
        name = Path(self.model_path).expanduser().name
        return name.removesuffix(".gguf") or self.model_path

    def device_cache_bytes(self, available: int) -> int | None:
        """Bytes asked for the device pool, given the bytes available; None = auto: the engine decides."""
        size = self.device_cache_size
        if size == "auto":
            return None
        fraction = parse_percent(size) if isinstance(size, str) else None
        return parse_size(size) if fraction is None else math.floor(available * fraction)

    def host_cache_bytes(self, available: int, device_bytes: int) -> int | None:
        """Bytes asked for the host pool (of one copy of the model), given those available and those of the device pool;
        None = auto."""
        size = self.host_cache_size
        if size == "auto":
            return None
        ratio = _ratio(size, "host_cache_size") if isinstance(size, str) else None
        if ratio is None:
            return parse_size(size) // self.dp_size
        if ratio.of_device:
            return math.floor(ratio.times * device_bytes)
        return math.floor(ratio.times * available / self.dp_size)

    def make_eviction_policy(self, tier: str = "device") -> EvictionPolicy:
        """A new policy object for a tier. Raises `ConfigError` when it cannot be loaded or used."""
        field = "eviction_policy" if tier == "device" else f"{tier}_eviction_policy"
        try:
            return load_policy(getattr(self, field) or self.eviction_policy)
        except ValueError as error:
            raise ConfigError(f"{field}: {error}") from error

    def compile_cache_path(self) -> Path | None:
        """Directory of compiled programs (not created here), or None when switched off."""
        if self.compile_cache_dir == "none":
            return None
        if self.compile_cache_dir != "auto":
            return Path(self.compile_cache_dir).expanduser()
        return user_cache_dir() / "compiled"

    @classmethod
    def create(cls, model_path: str, **options: Any) -> EngineConfig:
        """A config from keywords as a caller spells them; an unknown one raises `ConfigError` with a near match."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"{name}: no such setting{hint}")
        return cls(model_path=model_path, **options)


def user_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/tierax`, or `~/.cache/tierax`; not created here."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules ignore a relative path.
    return (Path(base) if base.startswith("/") else Path("~/.cache").expanduser()) / "tierax"


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} must be {_any_of(choices)}")
    return value


def _any_of(choices: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
