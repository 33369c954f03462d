"""`tierax batch`: answers the lines of a file, with a model of its own or through a server; goes on where it was."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..engine.config import EngineConfig
from .errors import UsageError
from .option import Parser
from .options import add_engine_options, engine_config

if TYPE_CHECKING:
    from tqdm import tqdm

    from ..serving.batch.lines import Line, Tally
    from ..serving.batch.offline import Answerer

NAME = "tierax batch"
CONCURRENCY = 64
MAX_LINE = 64 * 2**20
"""Bytes of a line."""

Engine = Callable[[], "AbstractAsyncContextManager[Answerer]"]
Work = Callable[["Iterator[Line]", "set[str | int]", Callable[[bytes], None], int], None]
"""Answers the lines whose keys are not given, hands out output lines, so many lines at once (per engine)."""


def run(argv: list[str]) -> int:
    """0 when every line has its answer, 1 when some failed or the run had to end early; `UsageError` otherwise."""
    parser = Parser(NAME, "Answer the lines of a file, in the form of OpenAI's batches.")
    parser.add_argument("input", metavar="IN", help="a file of requests, JSON per line; - reads stdin")
    parser.add_argument(
        "output",
        metavar="OUT",
        help="where answers go; lines that it answers already are skipped; - is stdout",
    )
    parser.add_argument(
        "--max-concurrency", type=_count, default=CONCURRENCY, metavar="N", help="lines at once (64)"
    )
    parser.add_argument("--retry-failed", action="store_true", help="try lines again that failed before")
    parser.add_argument("--base-url", metavar="URL", help="ask this server instead of loading a model")
    parser.add_argument("--api-key", metavar="KEY", help="its key ($TIERAX_API_KEY)")
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="spread the lines over engines on this Ray cluster: auto, HOST:PORT, ray://HOST:10001, or local",
    )
    parser.add_argument(
        "--ray-workers",
        type=_count,
        metavar="N",
        help="engines there (one per accelerator, or else per machine)",
    )
    parser.add_argument(
        "--ray-cpus", type=float, default=1.0, metavar="X", help="CPUs that each engine asks for (1)"
    )
    add_engine_options(parser)
    values = vars(parser.parse_args(argv))
    if values["base_url"] is None and values.get("process_id"):
        return _follow(values, parser)
    work = _spread_work(values, parser) if values["ray"] is not None else _work(_answerer(values, parser))

    with _input(values["input"], values["output"]) as source:
        try:
            return _answer(source, values, work, _dismissal(values, parser))
        except KeyboardInterrupt:
            print(f"{NAME}: interrupted; the same command goes on from here", file=sys.stderr)
            raise


def _follow(values: dict[str, Any], parser: Parser) -> int:
    """Files are process 0's business."""
    if values["ray"] is not None:
        parser.error("--ray spreads lines over engines of one process each; leave --process-id away")
    config = _batch_config(values, parser)

    from ..engine.follower import follow

    return follow(config)


def _dismissal(values: dict[str, Any], parser: Parser) -> Callable[[], None]:
    """What lets other processes go where no line is left to answer."""
    if values["base_url"] is not None or values.get("num_processes", 1) == 1:
        return lambda: None
    config = _batch_config(values, parser)

    def dismiss_others() -> None:
        from ..engine.leader import dismiss

        dismiss(config)

    return dismiss_others


def _answer(source: BinaryIO, values: dict[str, Any], work: Work, dismiss: Callable[[], None]) -> int:
    """`dismiss` is called in the place of `work` where nothing is left to do."""
    from tqdm import tqdm

    from ..engine.errors import EngineStopped
    from ..integrations.spread import WorkerDied
    from ..serving.batch.lines import Tally, read_lines
    from ..serving.batch.offline import ServerGone

    tally = Tally()
    with _output(values["output"], tally, retry=values["retry_failed"]) as put:
        before = len(tally.keys)
        keys = [line.key for line in read_lines(source, MAX_LINE)]
        left = sum(key not in tally.keys for key in keys)
        source.seek(0)
        if not left:
            dismiss()
        else:
            with tqdm(total=len(keys), initial=len(keys) - left, unit="line", disable=None) as bar:

                def done(raw: bytes) -> None:
                    put(raw)
                    _show(bar, tally)

                try:
                    work(read_lines(source, MAX_LINE), tally.keys, done, values["max_concurrency"])
                except (ServerGone, EngineStopped, WorkerDied) as error:
                    if isinstance(error, ServerGone) and not error.reached:
                        raise UsageError(NAME, str(error)) from None
                    print(f"{NAME}: {error}; the same command goes on from here", file=sys.stderr)
                    return 1
                except OSError as error:
                    print(f"{NAME}: {values['output']}: {error.strerror}", file=sys.stderr)
                    return 1
    print(
        f"{NAME}: {len(tally.keys)} lines answered ({before} before), {tally.failed} failed", file=sys.stderr
    )
    return 1 if tally.failed else 0


def _work(answerer: Engine) -> Work:
    """Lines in the order of their file, by one engine or server."""

    def work(lines: Iterator[Line], keys: set[str | int], put: Callable[[bytes], None], at_once: int) -> None:
        from ..serving.batch.offline import answer_file

        async def answer() -> None:
            async with answerer() as one:
                await answer_file(lines, keys, one, put, concurrency=at_once)

        asyncio.run(answer())

    return work


def _spread_work(values: dict[str, Any], parser: Parser) -> Work:
    """Lines by common beginnings, by engines on a Ray cluster."""
    from ..integrations.ray_batch import check_packages

    if values["base_url"] is not None:
        parser.error("--ray runs engines of its own; leave --base-url away")
    if not 0 < values["ray_cpus"] < math.inf:
        parser.error(f"--ray-cpus {values['ray_cpus']:g}: must be more than 0")
    check_packages()
    config = _batch_config(values, parser)
    if config.num_processes > 1:
        parser.error("--ray spreads lines over engines of one process each; leave --num-processes away")

    def work(lines: Iterator[Line], keys: set[str | int], put: Callable[[bytes], None], at_once: int) -> None:
        from ..integrations.ray_batch import ray_workers
        from ..integrations.spread import spread

        left = [line for line in lines if line.key not in keys]
        cluster = ray_workers(
            config,
            values["ray"],
            count=values["ray_workers"],
            cpus=values["ray_cpus"],
            max_line=MAX_LINE,
        )
        with cluster as workers:
            spread(left, workers, put, concurrency=at_once)

    return work


def _show(bar: tqdm, tally: Tally) -> None:
    bar.set_postfix_str(f"{tally.usage.output_tokens} tokens, {tally.failed} failed", refresh=False)
    bar.update()


def _answerer(values: dict[str, Any], parser: Parser) -> Engine:
    url = values["base_url"]
    if url is not None:
        if not url.startswith(("http://", "https://")):
            parser.error(f"--base-url {url}: give a URL such as http://localhost:30000/v1")
        if values["model"] is not None or "model_path" in values:
            parser.error("--base-url asks a server, which has its model; leave --model-path away")
        key = values["api_key"] or os.environ.get("TIERAX_API_KEY")
        return lambda: _remote(url, key)
    if values["api_key"] is not None:
        parser.error("--api-key is for --base-url")
    config = _batch_config(values, parser)
    return lambda: _local(config)


def _batch_config(values: dict[str, Any], parser: Parser) -> EngineConfig:
    # A batch needs few of the programs that a server prepares for.
    return engine_config({"skip_warmup": True, **values}, parser)


def _remote(url: str, key: str | None) -> AbstractAsyncContextManager[Answerer]:
    from ..serving.batch.offline import remote_answerer

    return remote_answerer(url, key)


def _local(config: EngineConfig) -> AbstractAsyncContextManager[Answerer]:
    from ..serving.batch.offline import engine_thread, local_answerer

    return local_answerer(engine_thread(config), MAX_LINE)


@contextmanager
def _input(source: str, output: str) -> Iterator[BinaryIO]:
    if source == "-":
        # Twice read: once to count, so that the bar knows its end.
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
            copy.seek(0)
            yield copy
        return
    path = Path(source)
    try:
        if output != "-" and Path(output).exists() and path.samefile(output):
            raise UsageError(NAME, f"{source} is input and output at once; give another file for the answers")
        file = path.open("rb")
    except OSError as error:
        raise UsageError(NAME, f"{source}: {error.strerror}") from None
    with file:
        yield file


@contextmanager
def _output(output: str, tally: Tally, *, retry: bool) -> Iterator[Callable[[bytes], None]]:
    from ..serving.batch.lines import ResultFileError
    from ..serving.batch.results import ResultFile, drop_failed

    if output == "-":

        def put(raw: bytes) -> None:
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()
            tally.add(raw)

        yield put
        return
    path = Path(output)
    if path.exists() and not path.is_file():
        raise UsageError(NAME, f"{output} is not a plain file; - writes to stdout")
    try:
        if retry and path.exists():
            drop_failed(path.resolve())
        file = ResultFile(path.resolve(), tally, 0o666)
    except ResultFileError as error:
        raise UsageError(NAME, str(error)) from None
    except OSError as error:
        raise UsageError(NAME, f"{output}: {error.strerror}") from None
    try:
        yield file.append
    finally:
        file.close()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)
