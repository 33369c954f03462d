"""`tierax --print-completion SHELL`: a script that completes commands, their parts and their flags.

What there is to complete is read off the help of every command, so it cannot fall behind. Values are completed as file names.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Mapping

from .errors import UsageError

SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_PART = re.compile(r"^ {4}([a-z]+)(?: |$)", re.MULTILINE)

Words = dict[str, dict[str, str]]
"""A line so far ("" at its beginning, `bench online`) -> what may follow, and its summary."""


def run(argv: list[str]) -> int:
    """Prints the script for the shell that the line names."""
    from .main import COMMANDS

    if len(argv) != 1 or argv[0] not in SHELLS:
        raise UsageError("tierax", f"--print-completion: name a shell: {', '.join(SHELLS)}")
    print(script(argv[0], all_words(COMMANDS)), end="")
    return 0


def script(shell: str, words: Words) -> str:
    """The text to be sourced by one of `SHELLS`."""
    if shell == "fish":
        return _fish(words)
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _bash(words)


def all_words(commands: Mapping[str, str]) -> Words:
    """Of every line; `commands` is name -> summary."""
    from .bench import BENCHMARKS
    from .lab import PARTS

    found: Words = {"": dict(commands), "bench": dict(BENCHMARKS), "lab": dict(PARTS)}
    lines = [name for name in commands if name not in found]
    lines += [f"{name} {part}" for name in ("bench", "lab") for part in found[name]]
    for line in lines:
        text = _help(line)
        parts = _PART.findall(text) if line == "cache" else []
        if parts:
            found[line] = dict.fromkeys(parts, "")
        for place in [f"{line} {part}" for part in parts] or [line]:
            found[place] = dict.fromkeys(sorted(_FLAG.findall(_flag_columns(_help(place)))), "")
    return found


def _flag_columns(text: str) -> str:
    """The lines of a help text that name flags, not those that speak of them."""
    return "\n".join(line for line in text.splitlines() if re.match(r" {2}-", line))


def _help(line: str) -> str:
    name, *rest = line.split()
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        importlib.import_module(f".{name}", __package__).run([*rest, "--help"])
    return text.getvalue()


def _bash(words: Words) -> str:
    cases = "\n".join(f'        "{place}") words="{" ".join(found)}" ;;' for place, found in words.items())
    two = "|".join(
        place for place, found in words.items() if place and not any(w.startswith("-") for w in found)
    )
    return f"""_tierax() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" place="" words=""
    ((COMP_CWORD > 1)) && place="${{COMP_WORDS[1]}}"
    case "$place" in
        {two}) ((COMP_CWORD > 2)) && place="$place ${{COMP_WORDS[2]}}" ;;
    esac
    case "$place" in
{cases}
    esac
    if [[ "$current" == -* || "$words" != -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
}}
complete -o default -F _tierax tierax
"""


def _fish(words: Words) -> str:
    lines = []
    for place, found in words.items():
        seen = "".join(f"; and __fish_seen_subcommand_from {word}" for word in place.split())
        for word, summary in found.items():
            if word.startswith("--"):
                lines.append(f'complete -c tierax -n "true{seen}" -l {word[2:]}')
            else:
                test = f"true{seen}; and not __fish_seen_subcommand_from {' '.join(found)}"
                about = summary.replace("'", "\\'")
                lines.append(f"complete -c tierax -f -n \"{test}\" -a {word} -d '{about}'")
    return "\n".join(lines) + "\n"
