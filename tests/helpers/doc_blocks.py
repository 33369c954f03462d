"""Code blocks of the documentation, and the commands in them.

A block without a language, or of `console` (where commands begin with `$`), is commands; `python` is a program; `text` and
`json` are output.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = ("", "bash", "sh", "console")
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_ENDS = ("|", "||", "&&", ";", "&")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    """Relative to the root."""
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """What users read."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]


def blocks() -> list[Block]:
    """All blocks of all pages."""
    found = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(path.relative_to(ROOT)), line, match[2], match[3]))
    return found


def commands(block: Block) -> list[list[str]]:
    """The words of every command of a block: a pipeline's parts apart, redirections and variables left out.

    Raises ValueError for a line whose quotes do not end.
    """
    found = []
    for line in _lines(block):
        command: list[str] = []
        words = iter(_words(line))
        for word in words:
            if word in _ENDS:
                found.append(command)
                command = []
            elif word in (">", "<", ">>"):
                next(words)
            elif command or not re.match(r"[A-Z_]+=", word):
                command.append(word)
        found.append(command)
    return [command for command in found if command]


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    return list(lexer)


def _lines(block: Block) -> Iterator[str]:
    """Whole commands: a line goes on after a backslash, and while a quote is open."""
    so_far = ""
    for line in block.text.splitlines():
        if block.language == "console" and not so_far:
            if not line.startswith("$ "):
                continue
            line = line[2:]
        so_far += line.removesuffix("\\") if line.endswith("\\") else line + "\n"
        if line.endswith("\\") or not _ended(so_far):
            continue
        yield so_far
        so_far = ""
    if so_far.strip():
        raise ValueError(f"{block}: a command does not end: {so_far[:80]}")


def _ended(text: str) -> bool:
    try:
        _words(text)
    except ValueError:
        return False
    return True
