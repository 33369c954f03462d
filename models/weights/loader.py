"""Loads every parameter of a model exactly once, from any kind of source, into the nested dict the forward reads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..config import ModelConfig
from ..errors import ModelError
from .gguf import GGUFFile
from .host_memory import HostMemory
from .names import Format, Parameter, is_ignored, parameters
from .safetensors import SafetensorsWeights

if TYPE_CHECKING:
    from ..source import ModelSource

Dtype = Literal["f32", "bf16"]
Params = dict[str, Any]
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Weights(Protocol):
    """Stored tensors by their stored names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> NDArray[Any]: ...


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """`"f32"` or `"bf16"` as a NumPy type; `ModelError` for anything else."""
    if dtype not in _NUMPY_DTYPES:
        raise ModelError(f"unknown weight type {dtype!r}; supported: {', '.join(_NUMPY_DTYPES)}")
    return _NUMPY_DTYPES[dtype]


def load_params(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: str = "f32",
    stacked: bool,
    progress: bool = False,
    shardings: Any = None,
) -> Params:
    """The model's parameters as jax arrays of one type (`"f32"` or `"bf16"`).

    Returns `{"embed": [V, D], "final_norm": [D], "lm_head": [V, D] if untied, "layers": …}`, where `layers` is a
    dict of name -> `[L, …]` when `stacked`, else a tuple of L dicts of name -> `[…]`, with the names and shapes of
    `config.layer_shapes()`. `shardings` is a tree of the same form with a `jax.sharding.Sharding` (or None) for each
    array. Every array owns its memory. Host memory peaks at the model plus about its largest array.

    Raises `ModelError` that lists all missing, unexpected and misshapen tensors at once.
    """
    if source.kind == "orbax":
        from .orbax import restore_params

        return restore_params(source.path, config, dtype=dtype, stacked=stacked, shardings=shardings)
    target = numpy_dtype(dtype)
    with _open_weights(source, config) as weights:
        plan = check_weights(weights.shapes(), config, source.kind, where=str(source.path))
        with tqdm(total=len(plan), desc="loading weights", unit="tensor", disable=not progress) as bar:
            build = _Builder(weights, target, bar)
            return _load_stacked(plan, build, shardings) if stacked else _load_layers(plan, build, shardings)


def check_weights(
    stored: Mapping[str, tuple[int, ...]], config: ModelConfig, fmt: Format, *, where: str
) -> list[Parameter]:
    """All parameters of the model, once it is sure that the stored tensors give each of them exactly once.

    `stored` are the shapes by stored name; `where` starts the message of the `ModelError`.
    """
    plan = list(parameters(config, fmt))
    expected = {name: shape for parameter in plan for name, shape in parameter.parts}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in stored]
    for name, shape in stored.items():
        if name not in expected:
            if not is_ignored(name, config, fmt):
                problems.append(f"unexpected {name} {list(shape)}")
        elif shape != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, not {list(expected[name])}")
    if problems:
        listed = "\n  ".join(problems[:40])
        more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
        raise ModelError(
            f"{where}: the weights do not fit the config ({len(problems)} problems):\n  {listed}{more}"
        )
    return plan


class _LlamaGGUF:
    """Llama's GGUF files store q and k with the two halves of each head interleaved; this undoes it."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._file.shapes()

    def read(self, name: str) -> NDArray[Any]:
        values = self._file.read(name)
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return values
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def _open_weights(source: ModelSource, config: ModelConfig) -> AbstractContextManager[Weights]:
    if source.kind == "hf":
        return SafetensorsWeights(source.path)
    file = GGUFFile(source.path)
    return nullcontext(_LlamaGGUF(file, config) if config.family == "llama" else file)


class _Builder:
    """Reads the parts of a parameter, in the target type, into host memory that goes over to jax."""

    def __init__(self, weights: Weights, dtype: np.dtype[Any], bar: tqdm[Any]) -> None:
        self._weights = weights
        self._dtype = dtype
        self._bar = bar
        self._memory = HostMemory()

    def array(self, parameter: Parameter, sharding: Any) -> jax.Array:
        buffer = self._memory.empty(parameter.shape, self._dtype)
        self._fill(buffer, parameter)
        return jax.device_put(buffer, sharding)

    def stack(self, layers: list[Parameter], sharding: Any) -> jax.Array:
        buffer = self._memory.empty((len(layers), *layers[0].shape), self._dtype)
        for row, parameter in zip(buffer, layers, strict=True):
            self._fill(row, parameter)
        return jax.device_put(buffer, sharding)

    def _fill(self, buffer: NDArray[Any], parameter: Parameter) -> None:
        start = 0
        for name, shape in parameter.parts:
            buffer[start : start + shape[0]] = self._weights.read(name)
            start += shape[0]
        self._bar.update()


def _load_stacked(plan: list[Parameter], build: _Builder, shardings: Any) -> Params:
    params: Params = {}
    layers: dict[str, list[Parameter]] = {}
    for parameter in plan:
        if parameter.layer is None:
            params[parameter.name] = build.array(parameter, _pick(shardings, parameter.name))
        else:
            layers.setdefault(parameter.name, []).append(parameter)
    params["layers"] = {
        name: build.stack(same, _pick(shardings, "layers", name)) for name, same in layers.items()
    }
    return params


def _load_layers(plan: list[Parameter], build: _Builder, shardings: Any) -> Params:
    params: Params = {}
    layers: dict[int, Params] = {}
    for parameter in plan:
        if parameter.layer is None:
            params[parameter.name] = build.array(parameter, _pick(shardings, parameter.name))
        else:
            sharding = _pick(shardings, "layers", parameter.layer, parameter.name)
            layers.setdefault(parameter.layer, {})[parameter.name] = build.array(parameter, sharding)
    params["layers"] = tuple(layers[index] for index in sorted(layers))
    return params


def _pick(shardings: Any, *path: str | int) -> Any:
    for key in path:
        if shardings is None:
            return None
        shardings = shardings[key]
    return shardings
