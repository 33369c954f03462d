"""`tierax --print-completion`: what bash offers, and that all shells get every flag."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tierax.cli.completion import Words, all_words, script
from tierax.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def words() -> Words:
    return all_words(COMMANDS)


def offered(source: str, line: str) -> list[str]:
    """What bash would offer for the last word of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"{source}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _tierax; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tierax se", ["serve"]),
        ("tierax ", list(COMMANDS)),
        ("tierax serve --hicache-r", ["--hicache-ratio"]),
        ("tierax serve demo --max-num-s", ["--max-num-seqs"]),
        ("tierax bench on", ["online"]),
        ("tierax bench online --work", ["--workload"]),
        ("tierax lab oracle --cap", ["--capacity-blocks"]),
        ("tierax cache ver", ["verify"]),
        ("tierax cache verify --de", ["--delete"]),
        ("tierax serve /mod", []),  # a file name: bash's own
    ],
)
def test_bash(line: str, expected: list[str], words: Words) -> None:
    assert offered(script("bash", words), line) == expected


def test_other_shells_get_the_same(words: Words) -> None:
    assert script("zsh", words).endswith(script("bash", words))
    fish = script("fish", words)
    for place, found in words.items():
        seen = "".join(f"; and __fish_seen_subcommand_from {word}" for word in place.split())
        for word in found:
            ending = f'" -l {word[2:]}$' if word.startswith("--") else f'.*" -a {word} '
            assert re.search(rf'^complete -c tierax .*"true{re.escape(seen)}{ending}', fish, re.MULTILINE), (
                place,
                word,
            )


def test_a_shell_has_to_be_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierax.cli.completion.all_words", lambda commands: {"": {"serve": "x"}})
    assert main(["--print-completion", "bash"]) == 0
    assert capsys.readouterr().out.endswith("complete -o default -F _tierax tierax\n")
    for line in (["--print-completion"], ["--print-completion", "tcsh"]):
        assert main(line) == 2
        assert "name a shell: bash, zsh, fish" in capsys.readouterr().err
    assert "--print-completion" in Path(__file__).parents[1].joinpath("docs/command-line.md").read_text()
