"""Tokenizers from Hugging Face directories: which file says what (DEFECTS f1, f4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from tierax.engine.tokenizer import Tokenizer, TokenizerError
from tierax.engine.tokenizer_gguf import BYTE_OF_CHAR


def hf_dir(
    path: Path, *, config: dict[str, Any] | None = None, bos_processor: bool = False, **files: Any
) -> Path:
    """A directory with the byte vocabulary and three added tokens: <s> 256, </s> 257, <eot> 258."""
    backend = tokenizers.Tokenizer(models.BPE(dict(BYTE_OF_CHAR), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>", "<eot>")])
    if bos_processor:
        backend.post_processor = processors.TemplateProcessing(
            single=["<s>", "$A"], special_tokens=[("<s>", 256)]
        )
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}} | (config or {})
    for name, value in {"tokenizer_config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return path


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_dir(hf_dir(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (
        256,
        257,
        {257},
        259,
    )
    assert tokenizer.chat_template is None
    # Truncation and padding of the training set-up do not apply.
    assert tokenizer.encode("abcdef", add_bos=False) == list(b"abcdef")
    assert tokenizer.encode("a", add_bos=False) == [97]


def test_end_tokens_are_the_union_of_three_files(tmp_path: Path) -> None:
    hf_dir(tmp_path, config={"eos_token": "<eot>"})
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    tokenizer = Tokenizer.from_hf_dir(tmp_path)
    assert tokenizer.eos_ids == {1, 106, 258}
    assert tokenizer.eos_token == "<eot>"


@pytest.mark.parametrize(
    ("processor", "key", "expected"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_bos_of_a_hugging_face_directory(
    tmp_path: Path, processor: bool, key: bool | None, expected: bool
) -> None:
    config = {} if key is None else {"add_bos_token": key}
    tokenizer = Tokenizer.from_hf_dir(hf_dir(tmp_path, config=config, bos_processor=processor))
    assert tokenizer.add_bos is expected
    assert tokenizer.encode("hi", add_bos=tokenizer.add_bos).count(256) == int(expected)
    assert tokenizer.encode("hi", add_bos=False) == list(b"hi")


def test_special_tokens_map_fills_gaps(tmp_path: Path) -> None:
    hf_dir(tmp_path, special_tokens_map={"bos_token": "</s>", "eos_token": "<eot>"})
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tokenizer = Tokenizer.from_hf_dir(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<eot>")


def test_templates_of_a_hugging_face_directory(tmp_path: Path) -> None:
    assert Tokenizer.from_hf_dir(hf_dir(tmp_path, config={"chat_template": "A"})).chat_template == "A"
    named = [{"name": "default", "template": "B"}, {"name": "tool_use", "template": "C"}]
    tokenizer = Tokenizer.from_hf_dir(hf_dir(tmp_path, config={"chat_template": named}))
    assert tokenizer.chat_templates == {"default": "B", "tool_use": "C"}
    (tmp_path / "chat_template.jinja").write_text("D 世", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("E")
    assert Tokenizer.from_hf_dir(tmp_path).chat_templates == {"default": "D 世", "tool_use": "C", "rag": "E"}


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    listed = {"258": {"content": "<eot>", "special": True}, "259": {"content": "<new>", "special": True}}
    tokenizer = Tokenizer.from_hf_dir(hf_dir(tmp_path, config={"added_tokens_decoder": listed}))
    assert tokenizer.encode("a<new>", add_bos=False) == [97, 259]
    listed["900"] = {"content": "<far>", "special": True}
    with pytest.raises(TokenizerError, match="'<far>' should have id 900 but gets 260"):
        Tokenizer.from_hf_dir(hf_dir(tmp_path, config={"added_tokens_decoder": listed}))


def test_broken_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_hf_dir(tmp_path)
    with pytest.raises(TokenizerError, match="eos_token '<nope>' is not in the vocabulary"):
        Tokenizer.from_hf_dir(hf_dir(tmp_path, config={"eos_token": "<nope>"}))
    hf_dir(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(TokenizerError, match=r"config\.json: eos_token_id 'two'"):
        Tokenizer.from_hf_dir(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(TokenizerError, match=r"config\.json is not valid JSON"):
        Tokenizer.from_hf_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"half": ')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_hf_dir(tmp_path)
