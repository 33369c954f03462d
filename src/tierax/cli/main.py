"""The `tierax` command: picks a subcommand and turns user mistakes into one line and exit code 2.

Nothing heavy is imported before a subcommand really needs it, so that `tierax --help` is instant.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from .. import __version__
from .errors import UsageError, is_user_mistake, one_line

COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI-compatible)",
    "chat": "chat in the terminal with a local model, or with a server by --url",
    "generate": "complete prompts: the text on stdout, the cache report on stderr",
    "batch": "answer the lines of a file, with a local model or through a server; goes on where it was",
    "convert": "convert a Hugging Face or GGUF model to an Orbax checkpoint",
    "cache": "look after a disk cache, or a running server's: stat, ls, verify, prune, clear, warm, pin, unpin",
    "bench": "measure speed and quality: cache, kernels, load, offline, online, perplexity, radix",
    "lab": "replay traces through the scheduler and the cache in simulated time, against the optimum",
    "doctor": "tell what an installation runs on, and which kernels serve",
}
"""Subcommand -> its summary; each lives in the module of its name and has `run(argv) -> int`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line. Returns the exit code: 0, 1 (failure), 2 (a mistake in the call), 130 (interrupted)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"tierax {__version__}")
        return 0
    if args[0] == "--print-completion":
        return _run("completion", args[1:])
    name, *rest = args
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"tierax: error: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    return _run(name, rest)


def _run(name: str, args: list[str]) -> int:
    try:
        return importlib.import_module(f".{name}", __package__).run(args)
    except UsageError as error:
        print(f"{error.command}: error: {error} (see {error.command} --help)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our stdout has gone (`tierax … | head`); keep the interpreter's last flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not is_user_mistake(error):
            raise
        print(f"tierax {name}: error: {one_line(error)}", file=sys.stderr)
        return 2


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tierax COMMAND …",
            "",
            "commands:",
            *lines,
            "",
            "tierax COMMAND --help shows a command's options.",
            "tierax --print-completion bash (or zsh, fish) prints what completes them in that shell.",
        ]
    )
