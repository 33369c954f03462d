"""Loads every parameter of a model exactly once, from any kind of source, into the nested dict the forward reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ...pallas_kernels.linear import Weight
from ...pallas_kernels.linear import quantize as quantize_groups
from ..config import ModelConfig
from ..errors import ModelError
from ..quantized import TYPES, load_qwix, quantize
from .gguf import GGUFFile
from .host_memory import HostMemory
from .names import Format, Parameter, is_ignored, is_matrix, parameters
from .safetensors import SafetensorsWeights
from .split import read_split

if TYPE_CHECKING:
    from ..sharding import Shares
    from ..source import ModelSource

Dtype = Literal["f32", "bf16"]
QUANTIZATIONS = ("none", "int8", *TYPES)
"""`int8` has a scale per row and `GROUP` columns, as native CPU kernels read it; for the others see `models.quantized`."""
_WHOLE_ONLY = {
    "int8": "the native CPU kernels' scales would be cut (without quantization they can)",
    "int4": "compiled programs take no such arrays in jax 0.10 (int8 and fp8 can)",
}
"""Forms of which each device must have all, and why."""
Params = dict[str, Any]
Quantize = Callable[[Any], Any]
"""Of a matrix `[..., O, I]`: a tree of arrays, with the axes before the two kept in front of each."""
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Weights(Protocol):
    """Stored tensors by their stored names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> NDArray[Any]: ...

    def read_range(self, name: str, axis: int, start: int, stop: int) -> NDArray[Any]:
        """`read(name)` from `start` to `stop` along one axis, without the rest being read."""
        ...


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
    quantization: str = "none",
    stacked: bool,
    progress: bool = False,
    shardings: Any = None,
    shares: Shares | None = None,
) -> Params:
    """The model's parameters as jax arrays of one type (`"f32"` or `"bf16"`); with a quantization, matrices are
    `QuantizedMatrix` or qwix's arrays instead, made one by one as they are read.

    Returns `{"embed": [V, D], "final_norm": [D], "lm_head": [V, D] if untied, "layers": …}`, where `layers` is a
    dict of name -> `[L, …]` when `stacked`, else a tuple of L dicts of name -> `[…]`, with the names and shapes of
    `config.layer_shapes()`; what not all layers have is stacked over those that do. `shardings` is a tree of the same form
    with a `jax.sharding.Sharding` (or None) for each array; a quantised matrix cannot have one. With `shares` instead,
    parameters are rearranged and split as these say, and each device's part is all that is read for it. Every array owns its
    memory. Host memory peaks at the model plus about its largest array.

    Raises `ModelError` that lists all missing, unexpected and misshapen tensors at once.
    """
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"unknown quantization {quantization!r}; supported: {', '.join(QUANTIZATIONS)}")
    quantized = _quantizer(quantization)
    if shardings is not None and quantized is not None:
        raise ModelError("quantised weights cannot have shardings of their own: give shares")
    if shares is not None and quantization in _WHOLE_ONLY:
        raise ModelError(f"{quantization} weights cannot be split over devices: {_WHOLE_ONLY[quantization]}")
    if source.kind == "orbax":
        from .orbax import restore_params

        params = restore_params(
            source.path, config, dtype=dtype, stacked=stacked, shardings=shardings, shares=shares
        )
        return params if quantized is None else quantize_params(params, quantized, shares)
    target = numpy_dtype(dtype)
    with _open_weights(source, config) as weights:
        plan = check_weights(weights.shapes(), config, source.kind, where=str(source.path))
        with tqdm(total=len(plan), desc="loading weights", unit="tensor", disable=not progress) as bar:
            build = _Builder(weights, target, quantized, bar, shares)
            return _load_stacked(plan, build, shardings) if stacked else _load_layers(plan, build, shardings)


def _quantizer(quantization: str) -> Quantize | None:
    match quantization:
        case "none":
            return None
        case "int8":
            return _quantize_int8
    load_qwix(quantization)
    return partial(_quantize, kind=quantization)


def quantize_params(params: Params, quantize: Quantize, shares: Shares | None = None) -> Params:
    """Parameters as `load_params` gives them, split as `shares` says, with their matrices quantised; takes them out of
    `params` one by one, so that no more than one is there twice."""

    def quantized(name: str, leaf: jax.Array) -> Weight:
        done = quantize(leaf)
        return done if shares is None else jax.device_put(done, shares.sharding(name, done))

    def each(leaves: Params, stacked: int = 0) -> Params:
        taken = ((name, leaves.pop(name)) for name in list(leaves))
        return {
            name: quantized(name, leaf) if is_matrix(name, leaf.ndim - stacked) else leaf
            for name, leaf in taken
        }

    layers = params.pop("layers")
    done = tuple(map(each, layers)) if isinstance(layers, tuple) else each(layers, 1)
    return each(params) | {"layers": done}


def check_weights(
    stored: Mapping[str, tuple[int, ...]], config: ModelConfig, fmt: Format, *, where: str
) -> list[Parameter]:
    """All parameters of the model, once it is sure that the stored tensors give each of them exactly once.

    `stored` are the shapes by stored name; `where` starts the message of the `ModelError`.
    """
    plan = list(parameters(config, fmt))
    expected = {part.name: part.shape for parameter in plan for part in parameter.parts}
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
        return _halves(values, len(values) // heads)

    def read_range(self, name: str, axis: int, start: int, stop: int) -> NDArray[Any]:
        heads = self._heads.get(name.split(".")[-2])
        if heads is None or axis != 0:
            return self._file.read_range(name, axis, start, stop)
        # Whole heads are read, whatever is wanted of them.
        head_dim = self._file.shapes()[name][0] // heads
        first = start // head_dim * head_dim
        values = self._file.read_range(name, 0, first, -(-stop // head_dim) * head_dim)
        return _halves(values, head_dim)[start - first : stop - first]


def _halves(values: NDArray[Any], head_dim: int) -> NDArray[Any]:
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _open_weights(source: ModelSource, config: ModelConfig) -> AbstractContextManager[Weights]:
    if source.kind == "hf":
        return SafetensorsWeights(source.path)
    file = GGUFFile(source.path)
    return nullcontext(_LlamaGGUF(file, config) if config.family in ("llama", "mixtral") else file)


_quantize_int8 = jax.jit(quantize_groups)
_quantize = jax.jit(quantize, static_argnames="kind")


class _Builder:
    """Reads the parts of a parameter, in the target type, into host memory that goes over to jax."""

    def __init__(
        self,
        weights: Weights,
        dtype: np.dtype[Any],
        quantize: Quantize | None,
        bar: tqdm[Any],
        shares: Shares | None = None,
    ) -> None:
        self._weights = weights
        self._shares = shares
        self._dtype = dtype
        self._quantize = quantize
        self._bar = bar
        self._memory = HostMemory()

    def array(self, parameter: Parameter, sharding: Any) -> Weight:
        return self._build([parameter], (), sharding)

    def stack(self, layers: list[Parameter], sharding: Any) -> Weight:
        return self._build(layers, (len(layers),), sharding)

    def _build(self, parameters: list[Parameter], before: tuple[int, ...], sharding: Any) -> Weight:
        """Parameters of one shape, side by side along the axes `before`."""
        shape = parameters[0].shape
        if self._quantize is not None and is_matrix(parameters[0].name, len(shape)):
            return self._build_quantized(self._quantize, parameters, before)
        if self._shares is not None:
            empty = partial(self._memory.empty, dtype=self._dtype)
            array = read_split(self._weights, parameters, before, self._shares, empty)
            self._bar.update(len(parameters))
            return array
        buffer = self._memory.empty((*before, *shape), self._dtype)
        for row, parameter in zip(buffer.reshape(-1, *shape), parameters, strict=True):
            self._fill(row, parameter)
        return jax.device_put(buffer, sharding)

    def _build_quantized(
        self, quantize: Quantize, parameters: list[Parameter], before: tuple[int, ...]
    ) -> Weight:
        """Quantised one by one: of no more than one all numbers are there."""
        shape = parameters[0].shape
        abstract = jax.eval_shape(quantize, jax.ShapeDtypeStruct(shape, np.float32))
        arrays = jax.tree.map(lambda leaf: self._memory.empty((*before, *leaf.shape), leaf.dtype), abstract)
        for row, parameter in enumerate(parameters):
            whole = np.empty(shape, np.float32)
            self._fill(whole, parameter)
            for array, part in zip(*map(jax.tree.leaves, (arrays, quantize(whole))), strict=True):
                array.reshape(-1, *part.shape)[row] = part
        if self._shares is None:
            return jax.tree.map(jax.device_put, arrays)
        # Quantised as a whole: how many devices there are is not to change a weight.
        name = parameters[0].name
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            rearranged = self._shares.rearrange(name, arrays)
        return jax.device_put(rearranged, self._shares.sharding(name, rearranged))

    def _fill(self, buffer: NDArray[Any], parameter: Parameter) -> None:
        for part in parameter.parts:
            buffer[part.at] = self._weights.read(part.name)
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
