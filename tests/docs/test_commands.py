"""Every command that the documentation shows is one that the program takes."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from helpers.cli_calls import fake_module
from helpers.doc_blocks import COMMANDS, ROOT, Block, blocks, commands, pages
from tierax.cli.bench import BENCHMARKS
from tierax.cli.lab import PARTS
from tierax.cli.main import COMMANDS as TIERAX_COMMANDS
from tierax.cli.main import main

NOT_RUN = {
    "docker": "needs a daemon; test_operations.py reads the Dockerfile",
    "kubectl": "needs a cluster; test_kubernetes.py reads the manifests",
    "serve": "Ray's; integrations/test_ray.py runs the application",
    "sglang-router": "a program of others; serving/test_router.py runs it",
    "lm_eval": "a program of others; test_scoring_harness.py makes its calls",
    "st": "a program of others; test_schemathesis.py runs it",
    "source": "enters the environment that make has made",
    "mkdir": "makes a place for what is printed",
    "openssl": "makes a certificate to try it with",
    "jq": "reads what curl printed",
    "head": "reads what was printed",
    "grep": "reads what was printed",
    "cat": "shows a file to the next command",
    "printf": "writes for the next command",
}
"""Programs of others, and why no test runs these lines."""


class _Parsed(Exception):
    """Thrown where a command would begin to work."""


@contextmanager
def parsing_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands stop once their line is read; `serve` goes on until its settings are checked."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = parse(self, *args, **kwargs)
        if self.prog == "tierax serve":
            return values
        raise _Parsed

    server = fake_module(run=lambda config, settings: 0)
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setitem(sys.modules, "tierax.serving.server", server)
        patch.chdir(ROOT)
        yield


def shown() -> list[tuple[str, list[str]]]:
    """Where each command stands, and its words; the same line once."""
    found: dict[tuple[str, ...], str] = {}
    for block in blocks():
        if block.language in COMMANDS:
            for words in commands(block):
                found.setdefault(tuple(words), str(block))
    return [(place, list(words)) for words, place in found.items()]


@pytest.mark.parametrize(
    ("place", "words"), shown(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_commands(
    place: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *rest = words
    match program, rest:
        case "tierax", _:
            _takes(rest, monkeypatch, capsys)
        case "python" | "python3", ["-m", "tierax.launch_server", *flags]:
            _takes(["serve", *flags], monkeypatch, capsys)
        case "python" | "python3", [script, *_]:
            assert (ROOT / script).is_file(), f"{place}: {script} is not there"
        case "make", [target, *_]:
            assert re.search(rf"^{target}\b[^=\n]*:", (ROOT / "Makefile").read_text(), re.MULTILINE), place
        case "pip", ["install", *packages]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(packages)):
                assert set(extra.split(",")) <= set(project["optional-dependencies"]), place
        case "curl", _:
            assert any(word.startswith("http") for word in rest), place  # sent by test_calls.py
        case _:
            assert program in NOT_RUN, f"{place}: what is {program}? Mark what is no command as text"


def _takes(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with parsing_only(monkeypatch):
        try:
            code: Any = main(argv)
        except _Parsed:
            code = 0
        except SystemExit as end:
            code = end.code
    assert code == 0, f"tierax {' '.join(argv)}: {capsys.readouterr().err}"


def test_a_wrong_flag_in_a_page_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = Block("x.md", 1, "console", '$ A=1 tierax serve demo \\\n    --prot 1 | tee "a\nb"\noutput\n')
    assert commands(block) == [["tierax", "serve", "demo", "--prot", "1"], ["tee", "a\nb"]]
    with pytest.raises(AssertionError, match="unrecognized arguments: --prot 1"):
        _takes(["serve", "demo", "--prot", "1"], monkeypatch, capsys)
    with pytest.raises(AssertionError, match="must be"):
        _takes(["serve", "demo", "--write-policy", "later"], monkeypatch, capsys)


def known_flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every flag of every command."""
    found = {"--help", "--version", "--print-completion"}

    def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parsers = [self]
        for parser in parsers:
            for action in parser._actions:
                found.update(action.option_strings)
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
        raise _Parsed

    lines = [[name] for name in TIERAX_COMMANDS if name not in ("bench", "lab")]
    lines += [["bench", name] for name in BENCHMARKS] + [["lab", name] for name in PARTS]
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        for line in lines:
            with pytest.raises(_Parsed):
                main(line)
    return found


OTHERS_FLAGS = {"--hicache-storage-backend": "sglang"}
"""Flags of other programs that the text names outside the pages where these are listed."""


def test_flags_that_the_text_names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_flags(monkeypatch) | set(OTHERS_FLAGS)
    wrong = []
    for page in pages():
        if page.name in ("log.md", "platforms.md"):
            continue  # tell of the past, and of compilers
        text = page.read_text(encoding="utf-8")
        if page.name == "migration.md":
            text = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
        for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            wrong += [
                f"{page.name}: {flag}"
                for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
                if flag.rstrip("-") not in known
            ]
    assert wrong == []


def test_migration_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierax.cli.options import ENGINE_OPTIONS, NAME_OPTION
    from tierax.cli.options_of_server import SERVER_OPTIONS
    from tierax.cli.options_of_tiers import TIER_OPTIONS

    serve_only = {
        flag
        for option in (*ENGINE_OPTIONS, *TIER_OPTIONS, *SERVER_OPTIONS, NAME_OPTION)
        for flag in option.flags
    } | {"--tp-size", "--tensor-parallel-size"}
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    tables = text.partition("## Routes")[0]
    listed: set[str] = set()
    for line in tables.splitlines():
        if line.startswith("| ") and not line.startswith("| there"):
            there, here, remark = (cell.strip() for cell in line.strip("|").split("|"))
            source = there if here == "as it is" else here
            flags = set(re.findall(r"--[a-z][\w-]*", source))
            assert flags <= serve_only, line
            assert here == "" or flags or "tierax " in here, line
            assert not (here == "" and set(re.findall(r"--[a-z][\w-]*", there)) & serve_only), line
            listed |= flags | (set(re.findall(r"--[a-z][\w-]*", remark)) & serve_only)
    aliases = {
        flag
        for option in (*ENGINE_OPTIONS, *TIER_OPTIONS, *SERVER_OPTIONS)
        for flag in option.flags
        if len(option.flags) > 1
    } | {"--hicache-ratio", "--hicache-size", "--kv-offloading-size", "--enable-hierarchical-cache"}
    assert aliases - listed == set()
