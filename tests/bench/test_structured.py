"""`tierax bench structured`: what it finds right, and that it finds what is wrong."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine
from helpers.tiny_text_model import write_tiny_text_model
from tierax.bench import structured
from tierax.bench.schema_cases import Case, CasesError, Judge, as_text, drawn_cases, read_cases
from tierax.bench.schema_trial import try_schemas
from tierax.bench.schemas import KEYWORDS, drawn_schemas
from tierax.engine.constraint import Constraint
from tierax.engine.grammar import Compiled

jsonschema: Any = importlib.import_module("jsonschema")
ALL = len(KEYWORDS)
REFUSED = {
    *("contains", "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    *(
        "uniqueItems",
        "unevaluatedItems",
        "not",
        "else",
        "$ref",
        "oneOf",
        "minProperties",
        "json_schema",
        "required",
    ),
}
"""What cannot be enforced; the last two stand for schemas that nothing fits."""


class Lenient(FakeEngine):
    """Overlooks a keyword."""

    def __init__(self, keyword: str) -> None:
        super().__init__()
        self._keyword = keyword

    def compile_constraint(self, constraint: Constraint) -> Compiled:
        assert isinstance(constraint.value, str)
        return super().compile_constraint(
            Constraint.json_schema(without(json.loads(constraint.value), self._keyword))
        )


class Severe(FakeEngine):
    """Takes integers only."""

    def compile_constraint(self, constraint: Constraint) -> Compiled:
        assert isinstance(constraint.value, str)
        return super().compile_constraint(
            Constraint.json_schema({"allOf": [json.loads(constraint.value), {"type": "integer"}]})
        )


def without(schema: Any, keyword: str) -> Any:
    if isinstance(schema, list):
        return [without(part, keyword) for part in schema]
    if isinstance(schema, dict):
        return {name: without(part, keyword) for name, part in schema.items() if name != keyword}
    return schema


def test_drawn_schemas_are_schemas_of_every_keyword_and_the_same_each_time():
    drawn = list(drawn_schemas(2 * ALL, seed=3))
    assert {name for name, _ in drawn} == set(KEYWORDS)
    assert drawn == list(drawn_schemas(2 * ALL, seed=3)) != list(drawn_schemas(2 * ALL, seed=4))
    for _, schema in drawn:
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_keyword_is_enforced_or_refused():
    findings = try_schemas(drawn_cases(ALL, seed=1), FakeEngine(), perf_counter, seed=1)
    told = findings.told()
    assert findings.problems == 0, told
    assert findings.schemas == ALL
    assert set(findings.refused) <= REFUSED
    assert sum(findings.refused.values()) < 16
    assert findings.texts >= 25
    assert min(findings.valid_values, findings.invalid_values) >= 120
    assert told["compile_ms_max"] >= told["compile_ms_mean"] > 0


@pytest.mark.slow
def test_six_hundred_schemas():
    findings = try_schemas(drawn_cases(600, seed=1), FakeEngine(), perf_counter, seed=1, texts=3)
    assert findings.problems == 0, findings.told()
    assert set(findings.refused) <= REFUSED
    assert findings.texts > 1000


@pytest.mark.parametrize("keyword", ["maximum", "required", "enum", "maxLength", "pattern", "minItems"])
def test_a_keyword_that_is_overlooked_is_found_out(keyword):
    cases = [case for case in drawn_cases(6 * ALL, seed=1) if case.name == keyword]
    findings = try_schemas(cases, Lenient(keyword), perf_counter, seed=1, texts=2)
    assert findings.accepted or findings.misfits
    assert all(keyword in json.dumps(problem["schema"]) for problem in findings.accepted)


def test_what_is_wrongly_rejected_is_found_out():
    findings = try_schemas(
        [Case("number", {"type": "number"}, [(2.5, True), (2, True)])], Severe(), perf_counter, 1
    )
    assert [problem["text"] for problem in findings.rejected] == ["2.5"]
    assert findings.problems == 1


def test_a_judge_says_nothing_where_it_does_not_know():
    judge = Judge.of({"type": "string", "format": "date-time"})
    assert judge is not None
    assert judge.fits("2024-02-29T12:30:00Z") is True
    assert judge.fits("perhaps") is None
    assert judge.fits(5) is False
    nowhere = Judge.of({"$ref": "https://example.org/not-here.json"})
    assert nowhere is not None
    assert nowhere.fits(5) is None
    assert Judge.of({"type": "nope"}) is None


def test_values_are_written_in_the_schemas_order():
    schema: Any = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"properties": {"b": True, "a": {"properties": {"z": {}, "y": {}}}}}},
    }
    assert (
        as_text({"a": {"y": 1.0, "z": 2.5}, "more": 1, "b": 0}, schema)
        == '{"b":0,"a":{"z":2.5,"y":1},"more":1}'
    )


def test_a_directory_of_schemas(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    suite = [
        {
            "description": "x",
            "schema": {"type": "integer"},
            "tests": [{"data": 5, "valid": True}, {"data": "5", "valid": False}],
        }
    ]
    (tmp_path / "deep" / "suite.json").write_text(json.dumps(suite))
    (tmp_path / "alone.json").write_text('{"type": "boolean"}')
    cases = list(read_cases(tmp_path, seed=1))
    assert [case.name for case in cases] == ["alone.json", "deep/suite.json"]
    assert list(cases[1].values) == [(5, True), ("5", False)]
    findings = try_schemas(cases, FakeEngine(), perf_counter, seed=1)
    assert (findings.schemas, findings.texts, findings.problems) == (2, 2, 0)


def test_a_directory_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(CasesError, match=r"no \.json files"):
        list(read_cases(tmp_path, seed=1))
    (tmp_path / "x.json").write_text("{")
    assert structured.main(["--count", "1", "--schemas", str(tmp_path)]) == 2
    assert "x.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_with_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_tiny_text_model(tmp_path / "model")
    line = f"--model {tmp_path / 'model'} --count 20 --sample 3 --running 2 --tokens 8 --repeats 1 --texts 1"
    outputs = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    assert structured.main([*line.split(), *outputs]) == 0
    assert all(f"{form}, constrained" in (tmp_path / "out.svg").read_text() for form in structured.FORMS)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["schemas"]["schemas"] == 20
    assert report["model"]["texts"] + report["model"]["texts_cut"] == 3
    assert [rate["form"] for rate in report["throughput"]] == list(structured.FORMS)
    for rate in report["throughput"]:
        assert rate["tok_s"] > 0
        assert 0 <= rate["hidden"] <= 1
        assert rate["ratio_spread"] == [rate["ratio"]] * 2
    assert capsys.readouterr().out == ""
    wrong = copy.deepcopy(report)
    wrong["schemas"]["invalid_accepted"] = [{"about": "maximum", "schema": {}, "text": "7"}]
    text = structured._text(wrong)
    assert "1 let through" in text
    assert "wrong: {'about': 'maximum'" in text
