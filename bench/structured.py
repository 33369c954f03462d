"""Constrained answers: whether they fit their schemas, and what they cost.

Schemas are tried on the compiler alone (every keyword, random texts, values that fit and values that do not) and, a sample of
them, with the model; then as many rows as run at a time are measured with and without a constraint, in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from ..engine.constraint import Constraint
from ..engine.llm import LLM
from ..engine.request import SamplingParams
from .pictures import Panel, bars
from .report import Parser, number, table, write_report
from .schema_cases import Case, CasesError, drawn_cases, read_cases
from .schema_trial import Findings, judge_text, try_schemas

Clock = Callable[[], float]
Say = Callable[[str], None]

LEAST_SHARE = 0.9
"""Of the unconstrained throughput that constrained rows are to have."""
FORMS = {
    "objects": Constraint.json_schema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 24},
                    "size": {"type": "number"},
                    "kind": {"enum": ["small", "medium", "large"]},
                },
                "required": ["name", "size", "kind"],
                "additionalProperties": False,
            },
            "minItems": 100,
        }
    ),
    "letters": Constraint.regex("[a-z ,.]*"),
}
"""What the measured rows write: much that is forced, and nothing. Neither comes to its end of itself."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput of one form beside that of free text, medians of the repetitions."""

    form: str
    running: int
    free_tok_s: float
    tok_s: float
    ratio: float
    ratio_spread: tuple[float, float]
    """The least and the most."""
    jumped: float
    """Share of the tokens that took no step of their own."""
    free_step_ms: float
    step_ms: float
    mask_ms_per_step: float
    """Time of finding out what may come next, for all rows together."""
    hidden: float
    """Share of it by which the step did not get longer; 1 = all. The difference of two medians: it says nothing where steps
    vary by more than the masks take."""


def main(argv: list[str] | None = None, clock: Clock = perf_counter) -> int:
    """Measures, and prints a table or JSON. Returns 1 if a text or value was judged wrongly, 2 if it cannot be measured."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.plot is not None and args.repeats == 0:
        parser.error("--plot draws the throughput, which --repeats 0 leaves out")
    for package in ("jsonschema", "llguidance"):
        if importlib.util.find_spec(package) is None:
            return _fail(f"the {package} package is needed to judge texts: pip install {package}")
    try:
        cases = list(_cases(args))
    except CasesError as error:
        return _fail(str(error))
    options = {"max_num_seqs": args.running, "context_length": 1024, "host_cache_size": 0}
    _say("loading the model")
    with LLM(args.model, use_tqdm=False, **options) as llm:
        report = measure(llm, cases, args, clock, _say)
    if args.json is None:
        print(_text(report))
    else:
        write_report(report, args.json)
    parser.draw(args.plot, _panel(report["throughput"]))
    return 1 if report["schemas"]["problems"] or report["model"]["problems"] else 0


def measure(
    llm: LLM, cases: Sequence[Case], args: argparse.Namespace, clock: Clock, say: Say
) -> dict[str, Any]:
    """All that was asked for, in a form for JSON."""
    say(f"{len(cases)} schemas on the compiler alone")
    findings = try_schemas(cases, llm.engine, clock, args.seed, args.texts)
    say(f"{args.sample} schemas with the model")
    written = write_with_model(llm, cases, args.sample, args.seed)
    say("throughput")
    rates = [] if args.repeats == 0 else measure_rates(llm, args, clock)
    return {
        "schemas": findings.told(),
        "model": {
            "texts": written.texts,
            "texts_cut": written.cut,
            "texts_that_misfit": written.misfits,
            "problems": written.problems,
        },
        "throughput": [asdict(rate) for rate in rates],
    }


def write_with_model(llm: LLM, cases: Sequence[Case], count: int, seed: int) -> Findings:
    """Has the model write under a sample of the schemas that can be enforced, and judges what ended of itself."""
    findings = Findings()
    chosen = [case for case in random.Random(seed).sample(cases, len(cases)) if _enforced(llm, case)][:count]
    params = [
        SamplingParams(max_tokens=160, seed=seed + i, constraint=Constraint.json_schema(case.schema))
        for i, case in enumerate(chosen)
    ]
    prompts = [f"Here is some JSON about {case.name}:\n" for case in chosen]
    for case, output in zip(chosen, llm.generate(prompts, params, use_tqdm=False), strict=True):
        if output.error is not None:
            findings.misfits.append({"about": case.name, "schema": case.schema, "error": output.error})
        elif output.finish_reason == "length":
            findings.cut += 1
        else:
            findings.texts += 1
            judge_text(case, output.text, findings)
    return findings


def _enforced(llm: LLM, case: Case) -> bool:
    try:
        llm.engine.compile_constraint(Constraint.json_schema(case.schema))
    except ValueError:
        return False
    return True


def measure_rates(llm: LLM, args: argparse.Namespace, clock: Clock) -> list[Rate]:
    """Throughput of each of `FORMS`. Free and constrained rows take turns, so that both meet the same machine."""
    runs = Runs(llm, args.running, args.tokens, args.seed, clock)
    runs.run(None)
    rates = []
    for name, form in FORMS.items():
        runs.run(form)
        pairs = [(runs.run(None), runs.run(form)) for _ in range(args.repeats)]
        rates.append(_rate(name, args.running, pairs))
    return rates


@dataclass(frozen=True, slots=True)
class Run:
    """One batch, from its first step to its last."""

    tokens: int
    seconds: float
    steps: int
    jumped: int
    mask_seconds: float


class Runs:
    """Batches of as many rows as run at a time, each with prompts of its own."""

    def __init__(self, llm: LLM, running: int, tokens: int, seed: int, clock: Clock) -> None:
        self._llm = llm
        self._running = running
        self._tokens = tokens
        self._random = random.Random(seed)
        self._clock = clock

    def run(self, form: Constraint | None) -> Run:
        """A batch in which all rows have this form; `ignore_eos` keeps free ones going as long."""
        vocabulary = range(self._llm.engine.model_config.vocab_size)
        prompts = [self._random.choices(vocabulary, k=32) for _ in range(self._running)]
        params = [
            SamplingParams(max_tokens=self._tokens, ignore_eos=True, seed=i, constraint=form)
            for i in range(self._running)
        ]
        stats = self._llm.engine.stats
        before = replace(stats)
        started = self._clock()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = self._clock() - started
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            raise RuntimeError(errors[0])
        return Run(
            tokens=sum(len(output.token_ids) for output in outputs),
            seconds=seconds,
            steps=stats.steps - before.steps,
            jumped=stats.jumped_tokens - before.jumped_tokens,
            mask_seconds=stats.mask_seconds - before.mask_seconds,
        )


def _rate(name: str, running: int, pairs: Sequence[tuple[Run, Run]]) -> Rate:
    def median(of: Callable[[Run, Run], float]) -> float:
        return statistics.median(of(free, held) for free, held in pairs)

    free_step = median(lambda free, _: 1000 * free.seconds / free.steps)
    step = median(lambda _, held: 1000 * held.seconds / held.steps)
    mask = median(lambda _, held: 1000 * held.mask_seconds / held.steps)
    longer = max(0.0, step - free_step)
    ratios = [(held.tokens / held.seconds) / (free.tokens / free.seconds) for free, held in pairs]
    return Rate(
        form=name,
        running=running,
        free_tok_s=median(lambda free, _: free.tokens / free.seconds),
        tok_s=median(lambda _, held: held.tokens / held.seconds),
        ratio=statistics.median(ratios),
        ratio_spread=(min(ratios), max(ratios)),
        jumped=median(lambda _, held: held.jumped / held.tokens),
        free_step_ms=free_step,
        step_ms=step,
        mask_ms_per_step=mask,
        hidden=max(0.0, 1 - longer / mask) if mask > 0 else 1.0,
    )


def _text(report: dict[str, Any]) -> str:
    schemas, model = report["schemas"], report["model"]
    rows = [
        ["schemas", str(schemas["schemas"]), ""],
        ["refused", str(sum(schemas["refused"].values())), ""],
        ["compile, ms", number(schemas["compile_ms_mean"]), f"{number(schemas['compile_ms_max'])} at most"],
        ["random texts", str(schemas["texts"]), f"{len(schemas['texts_that_misfit'])} do not fit"],
        ["values that fit", str(schemas["valid_values"]), f"{len(schemas['valid_rejected'])} rejected"],
        [
            "values that do not",
            str(schemas["invalid_values"]),
            f"{len(schemas['invalid_accepted'])} let through",
        ],
        ["the model's texts", str(model["texts"]), f"{len(model['texts_that_misfit'])} do not fit"],
        ["cut, not judged", str(schemas["texts_cut"] + model["texts_cut"]), ""],
    ]
    parts = [table(["", "count", "of which"], rows)]
    refused = ", ".join(f"{keyword} {count}" for keyword, count in schemas["refused"].items())
    parts.append(f"refused, by keyword: {refused or 'none'}")
    if report["throughput"]:
        parts.append(_rates_text(report["throughput"]))
    for problem in chain(
        schemas["texts_that_misfit"],
        schemas["valid_rejected"],
        schemas["invalid_accepted"],
        model["texts_that_misfit"],
    ):
        parts.append(f"wrong: {problem}")
    return "\n\n".join(parts)


def _rates_text(rates: Sequence[dict[str, Any]]) -> str:
    header = [
        "all rows constrained",
        "free tok/s",
        "tok/s",
        "ratio",
        "least - most",
        "jumped",
        "free step ms",
        "step ms",
    ]
    header += ["masks ms/step", "hidden"]
    rows = [
        [
            f"{rate['form']}, {rate['running']} running",
            number(rate["free_tok_s"]),
            number(rate["tok_s"]),
            f"{rate['ratio']:.0%}",
            " - ".join(f"{ratio:.0%}" for ratio in rate["ratio_spread"]),
            f"{rate['jumped']:.0%}",
            number(rate["free_step_ms"]),
            number(rate["step_ms"]),
            number(rate["mask_ms_per_step"]),
            f"{rate['hidden']:.0%}",
        ]
        for rate in rates
    ]
    low = [rate["form"] for rate in rates if rate["ratio"] < LEAST_SHARE]
    verdict = f"below {LEAST_SHARE:.0%}: {', '.join(low)}" if low else f"all at least {LEAST_SHARE:.0%}"
    return f"{table(header, rows)}\n{verdict}"


def _panel(rates: Sequence[dict[str, Any]]) -> Panel:
    speeds = {}
    for rate in rates:
        speeds[f"{rate['form']}, free"] = rate["free_tok_s"]
        speeds[f"{rate['form']}, constrained"] = rate["tok_s"]
    return bars(speeds, "tok/s, median", "Rows that must keep to a form beside free ones")


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    yield from drawn_cases(args.count, args.seed)
    if args.schemas is not None:
        yield from read_cases(args.schemas, args.seed)


def _say(stage: str) -> None:
    print(f"measuring: {stage}", file=sys.stderr, flush=True)


def _fail(message: str) -> int:
    print(f"tierax bench structured: error: {message}", file=sys.stderr)
    return 2


def _parser() -> Parser:
    parser = Parser("tierax bench structured", __doc__)
    parser.add_argument("--model", "--model-path", default="demo", metavar="MODEL", help="default: demo")
    parser.add_argument(
        "--schemas", type=Path, metavar="DIR", help="schemas of your own too, .json files below a directory"
    )
    parser.add_argument("--count", type=int, default=600, metavar="N", help="schemas that are drawn (600)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is drawn (1)")
    parser.add_argument("--texts", type=int, default=2, metavar="N", help="random texts per schema (2)")
    parser.add_argument("--sample", type=int, default=32, metavar="N", help="schemas for the model (32)")
    parser.add_argument("--running", type=int, default=16, metavar="N", help="rows that are measured (16)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="per row (96)")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of the throughput; 0 leaves it out (3)"
    )
    parser.add_outputs("throughput with and without constraints")
    return parser


if __name__ == "__main__":
    sys.exit(main())
