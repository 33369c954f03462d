"""A tiny random model that comes with the byte tokenizer and its chat template: a whole model directory."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import save_file

from helpers.byte_tokenizer import BOS, EOS, VOCAB_SIZE, byte_tokenizer
from helpers.tiny_models import tiny_config, tiny_tensors


def write_tiny_text_model(directory: Path, family: str = "llama3", *, chat_template: bool = True) -> None:
    """Writes config, float32 weights and tokenizer of one of `TINY_MODELS` into a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family) | {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS, "eos_token_id": EOS}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tiny_tensors(config), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = byte_tokenizer() if chat_template else byte_tokenizer(chat_template=None)
    tokenizer.save(directory)
