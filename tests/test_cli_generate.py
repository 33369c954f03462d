"""`tierax generate`: texts on the stdout, reports and errors beside them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.cli_calls import fake_module, mistake
from tierax import SamplingParams
from tierax.cli.main import main
from tierax.engine.config import EngineConfig
from tierax.engine.constraint import Constraint, ConstraintError


@dataclass
class FakeOutput:
    text: str
    prompt_token_ids: list[int] = field(default_factory=lambda: [7] * 40)
    token_ids: list[int] = field(default_factory=lambda: [5, 6])
    finish_reason: str | None = "length"
    cached_tokens: int = 32
    cached_by_tier: dict[str, int] = field(default_factory=lambda: {"device": 16, "host": 0, "disk": 16})
    error: str | None = None


class FakeLLM:
    """Remembers what it was asked; a prompt of `bad` is an item with an error."""

    calls: list[tuple[EngineConfig, Any, SamplingParams]]

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def generate(self, prompts: list[str], params: SamplingParams) -> list[FakeOutput]:
        self.calls.append((self.config, prompts, params))
        return [FakeOutput(f"<{p}>", error="prompt is too bad" if p == "bad" else None) for p in prompts]

    @property
    def engine(self) -> FakeLLM:
        return self

    def compile_constraint(self, constraint: Constraint) -> None:
        if constraint.value == "[a-":
            raise ConstraintError("regex", "regex cannot be enforced")

    def chat(self, messages: list[Any], params: SamplingParams) -> list[FakeOutput]:
        self.calls.append((self.config, messages, params))
        return [FakeOutput("chatted") for _ in messages]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    FakeLLM.calls = []
    monkeypatch.setitem(sys.modules, "tierax.engine.llm", fake_module(LLM=FakeLLM))
    return FakeLLM


def test_generate_prints_text_and_report(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "generate",
                "--prompt",
                "hi",
                "--max-tokens",
                "9",
                "--temperature",
                "0",
                "--stop",
                "a",
                "--stop",
                "b",
            ]
        )
        == 0
    )
    assert llm.calls == [
        (
            EngineConfig(model_path="demo", skip_warmup=True),
            ["hi"],
            SamplingParams(max_tokens=9, temperature=0.0, stop=["a", "b"]),
        )
    ]
    out, err = capsys.readouterr()
    assert out == "<hi>\n"
    assert err == "32 of 40 prompt tokens from the cache (device 16, disk 16), 2 generated (length)\n"


def test_generate_takes_all_sampling_flags(llm: type[FakeLLM]) -> None:
    line = (
        "generate --prompt x --min-tokens 1 --top-p 0.9 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 "
        "--frequency-penalty 0.2 --presence-penalty 0.3 --ignore-eos --max-new-tokens 3 --seed 4 --page-size 4"
    )
    assert main(line.split()) == 0
    config, _, params = llm.calls[0]
    assert config == EngineConfig(model_path="demo", seed=4, page_size=4, skip_warmup=True)
    assert params == SamplingParams(
        max_tokens=3, min_tokens=1, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1,
        frequency_penalty=0.2, presence_penalty=0.3, ignore_eos=True,
    )  # fmt: skip


def test_generate_keeps_order_and_fails_when_an_item_failed(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("früh\n", encoding="utf-8")
    args = ["generate", "--prompt", "a", "--prompt", "bad", "--prompt-file", str(tmp_path / "p.txt")]
    assert main(args) == 1
    out, err = capsys.readouterr()
    assert out == "<a>\n<früh\n>\n"
    assert err.splitlines() == [
        "prompt 1: 32 of 40 prompt tokens from the cache (device 16, disk 16), 2 generated (length)",
        "tierax generate: prompt 2: prompt is too bad",
        "prompt 3: 32 of 40 prompt tokens from the cache (device 16, disk 16), 2 generated (length)",
    ]


def test_generate_chat_wraps_each_prompt(llm: type[FakeLLM]) -> None:
    assert main(["generate", "--chat", "--prompt", "a", "--prompt", "b"]) == 0
    assert llm.calls[0][1] == [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]


def test_generate_mistakes(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "give at least one --prompt" in mistake(capsys, "generate")
    assert "No such file" in mistake(capsys, "generate", "--prompt-file", str(tmp_path / "none"))
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xff")
    assert "is not UTF-8 text" in mistake(capsys, "generate", "--prompt-file", str(tmp_path / "latin"))
    assert llm.calls == []


def test_generate_takes_what_the_text_must_match(llm: type[FakeLLM], tmp_path: Path) -> None:
    schema, grammar = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "a"')
    lines: dict[str, Constraint] = {
        "--regex [0-9]+": Constraint.regex("[0-9]+"),
        f"--json-schema {schema}": Constraint.json_schema({"type": "integer"}),
        "--json-object": Constraint.json_object(),
        "--choice yes --choice no": Constraint.choice(["yes", "no"]),
        f"--grammar {grammar}": Constraint.grammar('start: "a"'),
    }
    for line, constraint in lines.items():
        assert main(["generate", "--prompt", "x", *line.split()]) == 0
        assert llm.calls[-1][2].constraint == constraint


def test_generate_refuses_forms_in_one_line(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    both = mistake(capsys, "generate", "--prompt", "x", "--regex", "a", "--json-object")
    assert "--regex and --json-object" in both
    assert "--json-schema" in mistake(
        capsys, "generate", "--prompt", "x", "--json-schema", str(tmp_path / "none")
    )
    (tmp_path / "broken.json").write_text("{")
    line = mistake(capsys, "generate", "--prompt", "x", "--json-schema", str(tmp_path / "broken.json"))
    assert "is not valid JSON" in line
    assert "regex cannot be enforced" in mistake(capsys, "generate", "--prompt", "x", "--regex", "[a-")
    assert llm.calls == []
