"""The GGUF reader against the `gguf` package, and its answer to damaged files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from helpers.tiny_gguf import write_tiny_gguf
from tierax.models.errors import ModelError
from tierax.models.weights.gguf import GGUFFile

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0")
BYTES_ONLY = (
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ1_M",
    "IQ2_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    writer = GGUFWriter(path, "llama")
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_plain_types_are_read_exactly(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    stored = {kind: (quantize(values, GGMLQuantizationType[kind]), kind) for kind in ("F32", "F16", "BF16")}
    file = GGUFFile(write(tmp_path / "plain.gguf", stored))
    assert file.shapes() == dict.fromkeys(stored, (6, 32))
    np.testing.assert_array_equal(file.read("F32"), values)
    np.testing.assert_array_equal(file.read("F16"), values.astype(np.float16).astype(np.float32))
    np.testing.assert_allclose(file.read("BF16"), values, rtol=2**-8)
    for kind in stored:
        assert file.read(kind).dtype == np.float32


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_types_equal_the_packages_values(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((5, 512)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType[kind])
    file = GGUFFile(write(tmp_path / "q.gguf", {"x": (packed, kind)}))
    assert file.tensors["x"].shape == (5, 512)
    np.testing.assert_array_equal(file.read("x"), dequantize(packed, GGMLQuantizationType[kind]))
    assert np.corrcoef(file.read("x").ravel(), values.ravel())[0, 1] > 0.8 or kind.startswith("TQ")


@pytest.mark.parametrize("kind", BYTES_ONLY)
def test_types_that_are_only_dequantized(kind: str, tmp_path: Path) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    # Bytes below 0x40 keep every float16 and float8 scale inside finite.
    packed = np.random.default_rng(2).integers(0, 0x40, (3, 512 // block * size)).astype(np.uint8)
    file = GGUFFile(write(tmp_path / "q.gguf", {"x": (packed, kind)}))
    assert file.read("x").shape == (3, 512)
    np.testing.assert_array_equal(file.read("x"), dequantize(packed, GGMLQuantizationType[kind]))


def test_a_type_that_is_not_dequantized_is_named(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "i.gguf", {"x": (np.arange(8, dtype=np.int32), "I32")}))
    with pytest.raises(ModelError, match="tensor x has type I32"):
        file.read("x")


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    words = ["", "a", "Ġthe", "你好", "🐙" * 50] * 100
    writer.add_array("words", words)
    writer.add_array("scores", [0.5, -1.5])
    writer.add_array("types", [1, 3, 6])
    writer.add_string("text", "línea\n二")
    writer.add_bool("flag", True)
    writer.add_int64("small", -(2**40))
    writer.add_uint64("large", 2**63 + 1)
    writer.add_float64("ratio", 0.1)
    writer.add_uint8("byte", 255)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    assert metadata == {
        "general.architecture": "llama",
        "words": words,
        "scores": [0.5, -1.5],
        "types": [1, 3, 6],
        "text": "línea\n二",
        "flag": True,
        "small": -(2**40),
        "large": 2**63 + 1,
        "ratio": 0.1,
        "byte": 255,
    }
    assert metadata["flag"] is True


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "whole.gguf", "llama3", "Q8_0", words=["one", "two", "three"])
    whole = (tmp_path / "whole.gguf").read_bytes()
    GGUFFile(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 23, *range(24, len(whole) - 32, 997)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    rng = np.random.default_rng(3)
    for start in (b"", b"GGUF", b"GGUF\x03\0\0\0"):
        for _ in range(20):
            path.write_bytes(start + rng.bytes(5000))
            with pytest.raises(ModelError, match=r"x\.gguf: not a whole GGUF file"):
                GGUFFile(path)
    path.write_bytes(b"GGUF\x01\0\0\0" + bytes(100))
    with pytest.raises(ModelError, match="version 1 is not supported"):
        GGUFFile(path)
    with pytest.raises(ModelError, match="no such file"):
        GGUFFile(tmp_path / "absent.gguf")


def test_values_outlive_the_file_object(tmp_path: Path) -> None:
    """What is read is a copy: the file may change or vanish afterwards."""
    values = np.arange(64, dtype=np.float32)
    path = write(tmp_path / "x.gguf", {"x": (values, "F32")})
    read = GGUFFile(path).read("x")
    with path.open("r+b") as file:
        file.seek(-256, 2)
        file.write(bytes(256))
    np.testing.assert_array_equal(read, values)
    assert read.flags.writeable
