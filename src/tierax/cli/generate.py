"""`tierax generate`: completes prompts; the text on stdout, the cache report on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config_file import add_config_option, parse
from .errors import UsageError
from .option import Option, Parser, add_options, pick
from .options import add_engine_options, engine_config

if TYPE_CHECKING:
    from ..engine.constraint import Constraint
    from ..engine.llm import LLM
    from ..engine.offline import Output

SAMPLING_OPTIONS = (
    Option("max_tokens", ("--max-tokens", "--max-new-tokens"), "most tokens to generate (128)", int, "N"),
    Option("min_tokens", ("--min-tokens",), "fewest tokens before an end is allowed", int, "N"),
    Option("temperature", ("--temperature",), "0 = always the likeliest token (1.0)", float, "T"),
    Option("top_p", ("--top-p",), "keep the likeliest tokens that make up this probability", float, "P"),
    Option("top_k", ("--top-k",), "keep the k likeliest tokens; 0 = all", int, "K"),
    Option(
        "min_p", ("--min-p",), "drop tokens below this share of the likeliest one's probability", float, "P"
    ),
    Option("repetition_penalty", ("--repetition-penalty",), "above 1 discourages what was said", float, "X"),
    Option("frequency_penalty", ("--frequency-penalty",), "per occurrence in the output", float, "X"),
    Option("presence_penalty", ("--presence-penalty",), "once for any occurrence in the output", float, "X"),
    Option("ignore_eos", ("--ignore-eos",), "do not stop at the model's end token", const=True),
)
FORM_FLAGS = ("regex", "json_schema", "json_object", "choice", "grammar")


def run(argv: list[str]) -> int:
    """Completes each prompt in turn; 1 when one of them failed."""
    parser = Parser("tierax generate", "Complete prompts: the text on stdout, the cache report on stderr.")
    add_config_option(parser)
    source = parser.add_argument_group("prompts")
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt, may be repeated; - reads stdin"
    )
    source.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="a prompt out of a file, may be repeated"
    )
    source.add_argument(
        "--chat", action="store_true", help="send each prompt as a user's message of a chat of its own"
    )
    add_options(parser, SAMPLING_OPTIONS, "sampling")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop at this text, may be repeated")
    _add_form_flags(parser)
    add_engine_options(parser)
    values = parse(parser, argv)

    prompts = _prompts(values)
    if not prompts:
        parser.error("give at least one --prompt TEXT or --prompt-file FILE")
    constraint = _constraint(values)
    # A few prompts need few of the programs that a server prepares for.
    config = engine_config({"skip_warmup": True, **values}, parser)

    if config.process_id:
        from ..engine.follower import follow

        return follow(config)

    from ..engine.llm import LLM
    from ..engine.request import SamplingParams

    params = SamplingParams(
        **pick(values, SAMPLING_OPTIONS), stop=values["stop"] or [], constraint=constraint
    )
    llm = LLM(config)
    if constraint is not None:
        _check_enforceable(llm, constraint)
    if values["chat"]:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    return _report(outputs)


def _add_form_flags(parser: Parser) -> None:
    form = parser.add_argument_group("what the whole text must match (one of these)")
    form.add_argument("--regex", metavar="PATTERN", help="a regular expression")
    form.add_argument("--json-schema", metavar="FILE", help="JSON that fits the schema in a file")
    form.add_argument("--json-object", action="store_true", help="any JSON object")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts, to be repeated")
    form.add_argument("--grammar", metavar="FILE", help="a grammar in a file, Lark or GBNF")


def _constraint(values: dict[str, Any]) -> Constraint | None:
    given = [name for name in FORM_FLAGS if values[name]]
    if not given:
        return None
    flags = [f"--{name.replace('_', '-')}" for name in given]
    if len(given) > 1:
        raise UsageError(
            "tierax generate", f"{' and '.join(flags)} each say what the text must match: give one"
        )

    from ..engine.constraint import Constraint, ConstraintError

    value = values[given[0]]
    try:
        match given[0]:
            case "json_object":
                return Constraint.json_object()
            case "json_schema":
                return Constraint.json_schema(_read(Path(value), "--json-schema"))
            case "grammar":
                return Constraint.grammar(_read(Path(value), "--grammar"))
            case name:
                return getattr(Constraint, name)(value)
    except ConstraintError as error:
        raise UsageError("tierax generate", f"{flags[0]}: {error}") from None


def _check_enforceable(llm: LLM, constraint: Constraint) -> None:
    from ..engine.constraint import ConstraintError

    try:
        llm.engine.compile_constraint(constraint)
    except ConstraintError as error:
        raise UsageError("tierax generate", str(error)) from None


def _prompts(values: dict[str, Any]) -> list[str]:
    texts = [sys.stdin.read() if text == "-" else text for text in values["prompt"] or []]
    return texts + [_read(Path(name), "--prompt-file") for name in values["prompt_file"] or []]


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError("tierax generate", f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError("tierax generate", f"{path} is not UTF-8 text: byte {error.start}") from None


def _report(outputs: list[Output]) -> int:
    """Prints texts and the cache report, in the order of the prompts."""
    failed = 0
    for number, output in enumerate(outputs, start=1):
        label = f"prompt {number}: " if len(outputs) > 1 else ""
        if output.error is not None:
            failed += 1
            print(f"tierax generate: {label}{output.error}", file=sys.stderr)
            continue
        print(output.text, flush=True)
        print(
            f"{label}{output.cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the cache"
            f"{_by_tier(output.cached_by_tier)}, "
            f"{len(output.token_ids)} generated ({output.finish_reason})",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _by_tier(cached: dict[str, int]) -> str:
    """` (host 16, disk 32)`, the tiers that had something; nothing where none had."""
    parts = [f"{tier} {tokens}" for tier, tokens in cached.items() if tokens]
    return f" ({', '.join(parts)})" if parts else ""
