"""`tierax chat`: a conversation in the terminal, or out of a pipe: answers on stdout, all else on stderr."""

from __future__ import annotations

import difflib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .chat_backends import TIERS, Backend, ChatError, LocalModel, Message, RemoteModel, Turn
from .config_file import add_config_option, parse
from .errors import UsageError
from .generate import SAMPLING_OPTIONS
from .option import Parser, add_options, pick
from .options import ENGINE_OPTIONS, add_engine_options, engine_config
from .options_of_tiers import TIER_OPTIONS

NAME = "tierax chat"
COMMANDS = {
    "/reset": "begin anew; the system message stays",
    "/system": "[TEXT]: set the system message, or take it away; begins anew",
    "/save": "FILE: write the conversation, as JSON",
    "/load": "FILE: go on with a conversation that was saved",
    "/stats": "what this session has computed, and what the cache has spared",
    "/help": "this list",
    "/exit": "leave; so does Ctrl-D",
}
HISTORY_LINES = 1000


def run(argv: list[str]) -> int:
    """Chats until the input ends; 1 when a turn had no answer, 2 when the model or server cannot be had."""
    parser = Parser(
        NAME,
        "Chat with a local model, or with a server by --url. Lines of the input are your messages; a line that ends in \\ goes"
        " on in the next. /help lists commands.",
    )
    add_config_option(parser)
    where = parser.add_argument_group("server")
    where.add_argument("--url", help="ask this OpenAI-compatible server, e.g. http://localhost:30000")
    where.add_argument("--api-key", metavar="KEY", help="its key; else $TIERAX_API_KEY or $OPENAI_API_KEY")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--no-history", action="store_true", help="keep no file of the lines that were typed in a terminal"
    )
    add_options(parser, SAMPLING_OPTIONS, "sampling")
    add_engine_options(parser)
    values = parse(parser, argv)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # Bytes that are no text, and letters that the terminal lacks, are no reason to end.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr)
    try:
        backend = _backend(values, parser, terminal)
    except ChatError as error:
        raise UsageError(NAME, str(error)) from None
    try:
        if terminal.interactive and not values["no_history"]:
            with _History(_history_path(os.environ)):
                return Chat(backend, terminal, values["system"]).run()
        return Chat(backend, terminal, values["system"]).run()
    finally:
        backend.close()


def _backend(values: Mapping[str, Any], parser: Parser, terminal: Terminal) -> Backend:
    sampling = pick(values, SAMPLING_OPTIONS)
    url = values["url"]
    if url is None:
        if values["api_key"] is not None:
            parser.error("--api-key is for --url")
        # One conversation: few programs to prepare, and the whole pool for it.
        return LocalModel(engine_config({"max_num_seqs": 1, **values}, parser), sampling, terminal.note)
    if not url.startswith(("http://", "https://")):
        parser.error(f"--url {url}: give a URL such as http://localhost:30000")
    settings = pick(values, (*ENGINE_OPTIONS, *TIER_OPTIONS))
    named = settings.pop("model_path", values["model"])
    if settings:
        flag = next(iter(settings)).replace("_", "-")
        parser.error(f"--{flag} is for a local model; with --url the server has settings of its own")
    key = values["api_key"] or os.environ.get("TIERAX_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return RemoteModel(url, key, named, sampling)


@dataclass(slots=True)
class Terminal:
    """Where lines come from and where text goes. Colours only where a person looks, and wants them."""

    source: TextIO
    out: TextIO
    err: TextIO
    interactive: bool = False
    colour: bool = False

    def __post_init__(self) -> None:
        self.interactive = self.source.isatty() and self.out.isatty()
        self.colour = self.out.isatty() and self.err.isatty() and not os.environ.get("NO_COLOR")

    def read(self, prompt: str) -> str | None:
        """A line; None at the end of the input."""
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                self.out.write("\n")
                return None
        line = self.source.readline()
        return line.rstrip("\n") if line else None

    def write(self, text: str, *, dim: bool = False) -> None:
        """A piece of the answer."""
        self.out.write(self._dimmed(text) if dim else text)
        self.out.flush()

    def note(self, text: str) -> None:
        """A line about the answer, or about anything else."""
        self.err.write(self._dimmed(text) + "\n")
        self.err.flush()

    def _dimmed(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.colour else text


@dataclass(slots=True)
class Totals:
    """Sums over a session's turns."""

    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*TIERS, "somewhere"), 0))
    ttft: list[float] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.turns += 1
        self.prompt_tokens += turn.prompt_tokens or 0
        self.output_tokens += turn.output_tokens or 0
        found = turn.by_tier or {"somewhere": turn.cached_tokens or 0}
        for tier in self.cached:
            self.cached[tier] += found.get(tier, 0)
        if turn.ttft is not None:
            self.ttft.append(turn.ttft)


class Chat:
    """A conversation and its commands."""

    def __init__(
        self,
        backend: Backend,
        terminal: Terminal,
        system: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._terminal = terminal
        self._clock = clock
        self._system = system
        self._messages: list[Message] = []
        self._totals = Totals()
        self._failed = False

    def run(self) -> int:
        """Reads and answers until the input ends. Returns 1 if a turn or a command failed, else 0."""
        if self._terminal.interactive:
            self._terminal.note(f"{self._backend.name}: /help lists commands, Ctrl-C stops an answer.")
        while (line := self._line()) is not None:
            if line.startswith("/") and not line.startswith("//"):
                if line.split()[0] in ("/exit", "/quit"):
                    break
                self._command(line)
            elif line.strip():
                # Two slashes stand for one that is no command's.
                self._turn(line.removeprefix("/") if line.startswith("//") else line)
        return 1 if self._failed else 0

    def _line(self) -> str | None:
        lines: list[str] = []
        while True:
            try:
                line = self._terminal.read("> " if not lines else "… ")
            except KeyboardInterrupt:
                self._terminal.note("\n(Ctrl-D or /exit leaves)")
                lines.clear()
                continue
            if line is None:
                return "\n".join(lines) if lines else None
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _turn(self, text: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*self._messages, {"role": "user", "content": text}]
        turn = Turn(self._clock, lambda piece, reasoning: self._terminal.write(piece, dim=reasoning))
        problem = None
        try:
            self._backend.answer([*system, *messages], turn)
        except KeyboardInterrupt:
            problem = "stopped"
        except ChatError as error:
            self._failed = True
            problem = f"error: {error}"
        if turn.first is not None:
            self._terminal.write("\n")
        if problem is None or turn.text:
            # What was said of a stopped answer stays said: the conversation goes on from there.
            self._messages = [*messages, {"role": "assistant", "content": turn.text}]
            self._totals.add(turn)
        if problem is not None:
            self._terminal.note(f"[{problem}]")
        if turn.first is not None:
            self._terminal.note(f"[{_summary(turn)}]")

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        try:
            match name:
                case "/reset":
                    self._messages = []
                    self._terminal.note("[begun anew]")
                case "/system":
                    self._system, self._messages = rest or None, []
                    self._terminal.note("[system message set]" if rest else "[no system message]")
                case "/save":
                    self._save(rest)
                case "/load":
                    self._load(rest)
                case "/stats":
                    self._terminal.note(self._stats())
                case "/help":
                    self._terminal.note("\n".join(f"{name:<8} {text}" for name, text in COMMANDS.items()))
                case _:
                    near = difflib.get_close_matches(name, COMMANDS, n=1)
                    hint = f"did you mean {near[0]}?" if near else "/help lists them"
                    raise ChatError(f"no command {name}; {hint}")
        except ChatError as error:
            self._failed = True
            self._terminal.note(f"[error: {error}]")

    def _save(self, name: str) -> None:
        path = _file(name, "/save")
        system = [{"role": "system", "content": self._system}] if self._system else []
        saved = {"model": self._backend.name, "messages": [*system, *self._messages]}
        try:
            path.write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ChatError(f"{path}: {error.strerror}") from None
        self._terminal.note(f"[{len(saved['messages'])} messages written to {path}]")

    def _load(self, name: str) -> None:
        path = _file(name, "/load")
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            found = [{"role": str(m["role"]), "content": _text(m["content"])} for m in messages]
        except OSError as error:
            raise ChatError(f"{path}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"{path} holds no conversation that /save wrote") from None
        first = found[0] if found and found[0]["role"] == "system" else None
        self._system = first["content"] if first is not None else None
        self._messages = found[1:] if first is not None else found
        self._terminal.note(f"[{len(found)} messages read from {path}]")

    def _stats(self) -> str:
        totals = self._totals
        hits = sum(totals.cached.values())
        share = f" ({hits / totals.prompt_tokens:.0%})" if totals.prompt_tokens else ""
        mean = f", {_seconds(sum(totals.ttft) / len(totals.ttft))} to the first token" if totals.ttft else ""
        return (
            f"[{totals.turns} turns{mean}; {totals.prompt_tokens} prompt tokens, {hits} of them from the cache{share}"
            f"{_by_tier(totals.cached)}; {totals.output_tokens} tokens of answers]"
        )


def _summary(turn: Turn) -> str:
    """`0.12 s to the first token, 41.3 tok/s, 25 tokens; 96 of 112 prompt tokens cached (device 96)`."""
    assert turn.ttft is not None
    parts = [f"{_seconds(turn.ttft)} to the first token"]
    if turn.rate is not None:
        parts.append(f"{turn.rate:.1f} tok/s")
    if turn.output_tokens is not None:
        parts.append(f"{turn.output_tokens} tokens")
    text = ", ".join(parts)
    if turn.prompt_tokens is not None and turn.cached_tokens is not None:
        text += f"; {turn.cached_tokens} of {turn.prompt_tokens} prompt tokens cached{_by_tier(turn.by_tier)}"
    return text + ("; cut off by --max-tokens or the context" if turn.finish_reason == "length" else "")


def _by_tier(cached: Mapping[str, int]) -> str:
    parts = [f"{tier} {cached[tier]}" for tier in TIERS if cached.get(tier)]
    return f" ({', '.join(parts)})" if parts else ""


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _file(name: str, command: str) -> Path:
    if not name:
        raise ChatError(f"{command} FILE: which file?")
    return Path(name).expanduser()


def _text(content: object) -> str:
    if not isinstance(content, str):
        raise TypeError("text is expected")
    return content


def _history_path(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tierax" / "chat-history"


class _History:
    """Line editing with what was typed before, in a file that only its owner reads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        try:
            import readline
        except ImportError:
            # Not everywhere; `input` works without.
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.read_history_file(self._path)
        except OSError:
            # A convenience: a home that cannot be written to is no reason to refuse a chat.
            return
        readline.set_history_length(HISTORY_LINES)

    def __exit__(self, *_: object) -> None:
        try:
            import readline

            readline.write_history_file(self._path)
        except (ImportError, OSError):
            return
