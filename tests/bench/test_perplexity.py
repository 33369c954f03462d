"""Perplexity by dtype of weights and of KV: against the plain model, through the page pool in chunks, and the command's table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.plain_forward import plain_logprobs
from helpers.tiny_text_model import write_tiny_text_model
from tierax.bench.perplexity import CHUNK, FORMATS, PAGE_SIZE, QUANTIZED, Format, main, measure
from tierax.engine.engine import load_tokenizer
from tierax.models.source import resolve_model
from tierax.models.weights.loader import load_params

TEXT = "The ferry to the island left at six, and the quay was full by half past five. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_text_model(directory)
    return directory


def test_f32_is_the_plain_model_and_eight_bits_differ_a_little(model: Path) -> None:
    formats = [Format("f32", "f32"), Format("f32", "fp8"), Format("bf16", "f32"), Format("int8", "f32")]
    predicted, (f32, fp8, bf16, int8) = measure(str(model), TEXT, formats)
    source = resolve_model(str(model))
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode(TEXT, add_bos=tokenizer.add_bos)
    assert predicted == len(ids) - 1 > CHUNK, "more than a chunk, and not whole pages"
    assert len(ids) % PAGE_SIZE

    params = load_params(source, source.config, stacked=True)
    plain = plain_logprobs(params, source.config, ids, range(predicted)).astype(np.float64)
    expected = plain[np.arange(predicted), ids[1:]]
    np.testing.assert_allclose(f32.perplexity, np.exp(-expected.mean()), rtol=1e-4)
    assert (f32.change, f32.mean_difference, f32.agreement) == (0, 0, 1)
    for fewer_bits in (fp8, bf16, int8):
        assert 1e-6 < fewer_bits.mean_difference < 0.15
        assert abs(fewer_bits.change) < 0.02
        assert 0.9 < fewer_bits.agreement <= 1
    # A head of f32 takes 4 bytes a value; 8-bit KV one byte, and two scales of two bytes.
    config = source.config
    assert f32.kv_bytes_per_token == config.kv_bytes_per_token(4)
    assert (
        fp8.kv_bytes_per_token == config.kv_bytes_per_token(1) + 4 * config.num_layers * config.num_kv_heads
    )


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["--model", str(model), "--tokens", "30", "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["tokens"] == 29
    assert [(row["weights"], row["kv"]) for row in found["rows"]] == [*FORMATS, *QUANTIZED]
    with pytest.raises(SystemExit, match="1"):
        main(["--model", str(model), "--text", str(tmp_path / "no such file")])
    with pytest.raises(SystemExit, match="1"):
        main(["--model", str(tmp_path / "nothing")])
    assert "no such file" in capsys.readouterr().err
