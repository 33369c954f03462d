"""Converted checkpoints: our own config in `tierax.json`, the parameters in an Orbax checkpoint beside it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ..config import ExpertsConfig, ModelConfig, RopeConfig
from ..errors import ModelError
from .loader import Params, load_params, numpy_dtype

if TYPE_CHECKING:
    from ..sharding import Shares
    from ..source import ModelSource

CONFIG_FILE = "tierax.json"
_PARAMS = "params"
_FORMAT = 1
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Record:
    """What `tierax.json` holds."""

    config: ModelConfig
    dtype: str
    eos_token_ids: frozenset[int]
    bos_token_id: int | None


def convert(
    source: ModelSource,
    destination: Path,
    *,
    dtype: str,
    write_tokenizer: Callable[[Path], None] | None = None,
    progress: bool = False,
) -> None:
    """Writes `source` as a converted checkpoint in `dtype` (`"f32"` or `"bf16"`) to the directory `destination`.

    The tokenizer files of a Hugging Face directory are copied as they are. For a GGUF file the caller passes
    `write_tokenizer`, which puts files of that kind into the directory it is given. The destination appears only
    once it is complete. Raises `ModelError` when it exists already or the source is not fit.
    """
    if source.kind == "orbax":
        raise ModelError(f"{source.path} is a converted checkpoint already")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ModelError(f"{destination} exists already and is not an empty directory")
    params = load_params(source, source.config, dtype=dtype, stacked=True, progress=progress)

    partial = destination.resolve().with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_params(partial, params)
        if source.kind == "hf":
            _copy_tokenizer(source.path, partial)
        if write_tokenizer is not None:
            write_tokenizer(partial)
        record = Record(source.config, dtype, source.eos_token_ids, source.bos_token_id)
        (partial / CONFIG_FILE).write_text(json.dumps(_as_json(record), indent=2) + "\n")
        partial.replace(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_params(directory: Path, params: Params) -> None:
    """Writes stacked parameters below `directory`."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.resolve() / _PARAMS, params)
        checkpointer.wait_until_finished()


def restore_params(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: str,
    stacked: bool,
    shardings: Any = None,
    shares: Shares | None = None,
) -> Params:
    """Reads a converted checkpoint; arguments and result as of `loader.load_params`.

    With shardings every process and device reads its own share only; with shares as much as that, from where devices then
    pass on what is another's. Raises `ModelError` for a checkpoint that is
    incomplete or of other shapes than `config` says.
    """
    import orbax.checkpoint as ocp

    weight_files(directory)
    path = directory.resolve() / _PARAMS
    placed = _stack_shardings(shardings) if not stacked else shardings
    targets = _targets(config, dtype, placed if shares is None else _even_shardings(config, shares))
    with ocp.StandardCheckpointer() as checkpointer:
        # Orbax answers with nothing, rather than an error, where its own files are damaged.
        if not (stored := _shapes(checkpointer.metadata(path).item_metadata)):
            raise ModelError(f"{directory}: the Orbax checkpoint cannot be read (incomplete copy?)")
        _check_shapes(stored, _shapes(targets), directory)
        try:
            params = checkpointer.restore(path, targets)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{directory}: the Orbax checkpoint cannot be read: {error}") from error
    if shares is not None:
        _rearrange(params, shares)
    return params if stacked else _unstack(params, config, shardings)


def weight_files(directory: Path) -> list[Path]:
    """All files of the Orbax checkpoint, in order of path."""
    files = sorted(path for path in (directory / _PARAMS).rglob("*") if path.is_file())
    if not files:
        raise ModelError(f"{directory}: no Orbax checkpoint in {_PARAMS}/")
    return files


def parse_record(raw: Mapping[str, Any], path: Path) -> Record:
    """Reads parsed `tierax.json`; `path` is for the message of a `ModelError`."""
    if raw.get("format") != _FORMAT:
        raise ModelError(
            f"{path}: format {raw.get('format')!r} is not supported, {_FORMAT} is; convert again"
        )
    try:
        fields = dict(raw["config"])
        fields["rope"] = RopeConfig(**fields["rope"])
        fields["sliding_windows"] = tuple(fields["sliding_windows"])
        if (experts := fields.get("experts")) is not None:
            dense = tuple(experts["dense_layers"])
            fields["experts"] = ExpertsConfig(**experts | {"dense_layers": dense})
        return Record(
            ModelConfig(**fields), raw["dtype"], frozenset(raw["eos_token_ids"]), raw["bos_token_id"]
        )
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path}: not a complete record of a converted model: {error}") from error


def _as_json(record: Record) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "dtype": record.dtype,
        "config": dataclasses.asdict(record.config),
        "eos_token_ids": sorted(record.eos_token_ids),
        "bos_token_id": record.bos_token_id,
    }


def _copy_tokenizer(source: Path, destination: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def _targets(config: ModelConfig, dtype: str, shardings: Any) -> Params:
    """Shape, type and place of every stacked array."""
    default = SingleDeviceSharding(jax.local_devices()[0])
    placed = shardings or {}

    def target(shape: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, numpy_dtype(dtype), sharding=sharding or default)

    layers = placed.get("layers") or {}
    return {
        **{name: target(shape, placed.get(name)) for name, shape in config.top_shapes().items()},
        "layers": {
            name: target((len(config.layers_with(name)), *shape), layers.get(name))
            for name, shape in config.layer_shapes().items()
        },
    }


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves
    }


def _check_shapes(stored: Mapping[str, Any], expected: Mapping[str, Any], directory: Path) -> None:
    problems = [f"missing {name}" for name in expected if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in expected]
    problems += [
        f"{name} has shape {list(stored[name])}, not {list(expected[name])}"
        for name in expected
        if name in stored and stored[name] != expected[name]
    ]
    if problems:
        raise ModelError(f"{directory}: the checkpoint does not fit its config:\n  " + "\n  ".join(problems))


def _stack_shardings(shardings: Any) -> Any:
    """Shardings of stacked arrays from those of one layer: the layer axis is never split."""
    if shardings is None:
        return None
    layers = {
        name: NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        for of_layer in shardings["layers"]
        for name, sharding in of_layer.items()
        if isinstance(sharding, NamedSharding)
    }
    return {**shardings, "layers": layers}


def _even_shardings(config: ModelConfig, shares: Shares) -> Any:
    """Every stacked array cut into as many pieces as there are devices, along an axis that comes out even."""
    mesh = shares.mesh

    def even(name: str, shape: tuple[int, ...], layers: int) -> NamedSharding:
        preferred = layers + shares.split_axis(name)
        for axis in sorted(range(layers, len(shape)), key=lambda axis: axis != preferred):
            if shape[axis] % mesh.size == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * axis, mesh.axis_names))
        return NamedSharding(mesh, PartitionSpec())

    layers = {
        name: even(name, (len(config.layers_with(name)), *shape), 1)
        for name, shape in config.layer_shapes().items()
    }
    return {name: even(name, shape, 0) for name, shape in config.top_shapes().items()} | {"layers": layers}


def _rearrange(params: Params, shares: Shares) -> None:
    """Gives each device its own share, one array after the other."""

    def place(name: str, leaf: jax.Array) -> jax.Array:
        abstract = jax.eval_shape(partial(shares.rearrange, name), leaf)
        placed = jax.jit(partial(shares.rearrange, name), out_shardings=shares.sharding(name, abstract))
        return placed(leaf)

    for leaves in (params, params["layers"]):
        for name in leaves:
            if name != "layers":
                leaves[name] = jax.block_until_ready(place(name, leaves[name]))


def _unstack(params: Params, config: ModelConfig, shardings: Any) -> Params:
    """Splits layer by layer, and lets go of each stacked array before the next is split."""
    stacked = params.pop("layers")
    layers: list[Params] = [{} for _ in range(config.num_layers)]
    for name in list(stacked):
        array = stacked.pop(name)
        for row, index in enumerate(config.layers_with(name)):
            sharding = shardings["layers"][index][name] if shardings else None
            layers[index][name] = jax.device_put(array[row], sharding)
    return {**params, "layers": tuple(layers)}
