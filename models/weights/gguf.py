"""A small reader of GGUF files: memory-mapped, with fast string arrays; the `gguf` package only dequantizes."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
_DEFAULT_ALIGNMENT = 32
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in the file. `shape` is `[out, in]`, `kind` the name of its ggml type, e.g. `Q4_1`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, `read` for the values of one tensor.

    Numbers in `metadata` are Python ints, floats and bools, arrays are lists. Raises `ModelError` for a file that is
    missing, truncated, not GGUF, or of a version other than 2 and 3 (little-endian).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        try:
            cursor = _Cursor(self._map)
            num_tensors, num_keys = cursor.header()
            self.metadata: dict[str, Any] = {
                cursor.string(): cursor.value(cursor.u32()) for _ in range(num_keys)
            }
            entries = [cursor.tensor_entry() for _ in range(num_tensors)]
            self.tensors = self._locate(entries, cursor.position)
        except (_Malformed, struct.error, UnicodeDecodeError) as error:
            raise ModelError(f"{self.path}: not a whole GGUF file: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """`[out, in]` of every tensor by name."""
        return {name: info.shape for name, info in self.tensors.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        """Values of a tensor as float32 in its `[out, in]` shape, dequantized if need be; memory of its own.

        Raises `ModelError` for a type that the `gguf` package does not dequantize, and `KeyError` for an unknown name.
        """
        return self._values(name, self._stored(name))

    def read_range(self, name: str, axis: int, start: int, stop: int) -> NDArray[np.float32]:
        """`read(name)` from `start` to `stop` along one axis; of the rest at most some blocks are dequantized."""
        stored, columns = self._stored(name), axis == len(self.tensors[name].shape) - 1
        if not columns:
            return self._values(name, stored[(slice(None),) * axis + (slice(start, stop),)])
        # The values of a row are stored in blocks.
        block, block_bytes = _block(self.tensors[name].kind)
        first = start // block
        part = stored[..., first * block_bytes : -(-stop // block) * block_bytes]
        values = self._values(name, part)
        return values[..., start - first * block : stop - first * block]

    def _stored(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, `[..., bytes of a row]`."""
        info = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        return data.reshape(*info.shape[:-1], -1)

    def _values(self, name: str, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
        kind = self.tensors[name].kind
        stored = np.ascontiguousarray(stored)
        if kind in _PLAIN:
            return stored.view(_PLAIN[kind]).astype(np.float32)

        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return dequantize(stored, GGMLQuantizationType[kind])
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name} has type {kind}, which cannot be dequantized"
            ) from None

    def _locate(self, entries: list[_Entry], end_of_header: int) -> dict[str, TensorInfo]:
        """Turns offsets relative to the data section into absolute ones and checks that all data is there."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _Malformed(f"general.alignment is {alignment!r}")
        start = -(-end_of_header // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            try:
                kind = GGMLQuantizationType(type_id)
            except ValueError:
                raise _Malformed(f"tensor {name} has the unknown type {type_id}") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            count = int(np.prod(shape, dtype=object))
            if shape[-1] % block:
                raise _Malformed(f"tensor {name} has rows of {shape[-1]} values, not a multiple of {block}")
            nbytes = count // block * block_bytes
            if start + offset + nbytes > len(self._map):
                raise _Malformed(
                    f"tensor {name} ends at byte {start + offset + nbytes:,} of {len(self._map):,} (truncated download?)"
                )
            if name in tensors:
                raise _Malformed(f"tensor {name} occurs twice")
            tensors[name] = TensorInfo(name, shape, kind.name, start + offset, nbytes)
        return tensors


def _block(kind: str) -> tuple[int, int]:
    """Values of a block, and its bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


class _Malformed(Exception):
    """What is wrong with the bytes; becomes a `ModelError` with the path."""


_Entry = tuple[str, tuple[int, ...], int, int]


class _Cursor:
    """Reads the header's values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def header(self) -> tuple[int, int]:
        """Checks magic and version; returns the numbers of tensors and of metadata keys."""
        if self._data[:4] != b"GGUF":
            raise _Malformed(f"it starts with {bytes(self._data[:4])!r}")
        self.position = 4
        if (version := self.u32()) not in (2, 3):
            raise _Malformed(f"version {version} is not supported (2 and 3 are, little-endian)")
        return self.u64(), self.u64()

    def u32(self) -> int:
        (value,) = _U32.unpack_from(self._data, self.position)
        self.position += 4
        return value

    def u64(self) -> int:
        (value,) = _U64.unpack_from(self._data, self.position)
        self.position += 8
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.u32(), self.u64()
            return self._strings(count) if kind == _STRING else self._numbers(kind, count)
        return self._numbers(kind, 1)[0]

    def tensor_entry(self) -> _Entry:
        name = self.string()
        num_dims = self.u32()
        if not 1 <= num_dims <= 4:
            raise _Malformed(f"tensor {name} has {num_dims} dimensions")
        # ggml counts dimensions from the innermost.
        shape = tuple(reversed([self.u64() for _ in range(num_dims)]))
        return name, shape, self.u32(), self.u64()

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise _Malformed(f"unknown value type {kind} at byte {self.position:,}")
        dtype = np.dtype(_SCALARS[kind])
        self._require(count * dtype.itemsize)
        values = np.frombuffer(self._data, dtype, count, self.position)
        self.position += values.nbytes
        return values.tolist()

    def _strings(self, count: int) -> list[str]:
        """The hot loop of opening a file: vocabularies have hundreds of thousands of entries."""
        self._require(8 * count)
        data, position, unpack = self._data, self.position, _U64.unpack_from
        strings: list[str] = []
        for _ in range(count):
            (length,) = unpack(data, position)
            begin = position + 8
            position = begin + length
            text = data[begin:position]
            if len(text) != length:
                raise _Malformed(f"a string at byte {begin:,} runs past the end (truncated download?)")
            strings.append(text.decode())
        self.position = position
        return strings

    def _require(self, nbytes: int) -> None:
        if self.position + nbytes > len(self._data):
            raise _Malformed(f"a value at byte {self.position:,} runs past the end (truncated download?)")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a GGUF file: {error}") from error
