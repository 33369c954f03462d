"""Works on batches behind the live traffic's back, and takes them up again after a restart."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ..core.service import Service
from ..http.errors import ApiError, bad_request
from .archive import Archive
from .dispatch import Answer, Dispatcher
from .lines import Line, Problem, ResultFileError, Tally, answer_line, problem_line, read_lines
from .records import (
    Batch,
    BatchProblem,
    BatchProblems,
    BatchRecord,
    BatchUsage,
    InputTokensDetails,
    Outcome,
    OutputTokensDetails,
    RequestCounts,
)
from .results import ResultFile
from .store import Store, open_private
from .work import answer_all, in_chunks

log = logging.getLogger(__name__)

MAX_LINES = 50_000
MAX_PROBLEMS = 100
"""Of an input file's, told of; one bad line is enough to refuse it."""
MAX_ACTIVE = 64
"""Batches of one tenant under way at once."""
POLL = 0.05
"""Seconds between looks at what may end a batch early, or let its next line start."""
PATIENCE = 5.0
"""Seconds before a full disk, or a server that is too busy, is tried again."""

_T = TypeVar("_T")


@dataclass
class Job:
    """A batch at work."""

    record: BatchRecord
    tally: Tally = field(default_factory=Tally)
    good: ResultFile | None = None
    bad: ResultFile | None = None

    @property
    def batch(self) -> Batch:
        return self.record.batch

    def put(self, line: Line, answer: Answer | Problem) -> None:
        """Writes down how a line ended."""
        assert self.good is not None
        assert self.bad is not None
        if isinstance(answer, Problem):
            self.bad.append(problem_line(line, answer))
        else:
            file = self.good if answer.status == 200 else self.bad
            file.append(answer_line(line, answer.status, answer.body))

    def put_rest(self, lines: list[Line], problem: Problem) -> None:
        """Writes down, of lines that nobody will answer any more, why."""
        for line in lines:
            if line.key not in self.tally.keys:
                self.put(line, problem)

    def count(self) -> None:
        """Shows in the batch what is done of it."""
        tally, usage = self.tally, self.tally.usage
        total = self.batch.request_counts.total
        self.batch.request_counts = RequestCounts(total, tally.completed, tally.failed)
        self.batch.usage = BatchUsage(
            input_tokens=usage.input_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        )

    def open(self, store: Store) -> None:
        """Takes up the results that an earlier run left, if any."""
        self.good = ResultFile(store.path(self.record.output_id), self.tally)
        self.bad = ResultFile(store.path(self.record.error_id), self.tally)

    def close(self) -> None:
        for file in (self.good, self.bad):
            if file is not None:
                file.close()


class BatchRunner:
    """Owns the tasks that work on batches, as many lines at once as `concurrency` for all batches together."""

    def __init__(
        self,
        archive: Archive,
        dispatcher: Dispatcher,
        service: Service,
        now: Callable[[], float],
        *,
        concurrency: int,
        max_line: int,
    ) -> None:
        self.archive, self.dispatcher = archive, dispatcher
        self._service, self._now, self._max_line = service, now, max_line
        self._slots = asyncio.Semaphore(concurrency)
        self._answering = 0
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: asyncio.Task[None] | None = None
        self._closed = False

    async def run(self) -> None:
        """Works until the server shuts down or this is cancelled; what was begun goes on at the next start."""
        try:
            if self.archive.exists:
                await self._load()
        except Exception as error:
            log.warning("batches of an earlier run do not go on: %s", error)
        try:
            while not self._service.draining:
                await asyncio.sleep(POLL)
        finally:
            self._closed = True
            ended = [*self._tasks, *([self._loading] if self._loading is not None else [])]
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)

    async def create(self, record: BatchRecord) -> None:
        """Stores a new batch and begins with it. Raises `ApiError`."""
        await self._load()
        await self.archive.run(lambda store: store.add_batch(record, MAX_ACTIVE))
        self._begin(record)

    async def find(self, batch_id: str, tenant: str) -> BatchRecord:
        """A batch as it is at this moment. Raises `ApiError` 404."""
        await self._load()
        found = await self.archive.run(lambda store: store.batch(batch_id, tenant))
        return self._live(found)

    async def page(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """A tenant's batches, the latest first, and whether there are more. Raises `ApiError` 400."""
        await self._load()
        found, more = await self.archive.run(lambda store: store.batches(tenant, after=after, limit=limit))
        return [self._live(record) for record in found], more

    async def cancel(self, batch_id: str, tenant: str) -> BatchRecord:
        """Asks a batch to end early. Raises `ApiError` 404, or 400 when it has ended otherwise."""
        record = await self.find(batch_id, tenant)
        batch = record.batch
        if batch.cancelling_at is not None:
            return record
        if batch.status not in ("validating", "in_progress"):
            raise bad_request(f"A batch that is {batch.status} cannot be cancelled.", code="batch_not_active")
        batch.status, batch.cancelling_at = "cancelling", int(self._now())
        await self.archive.run(lambda store: store.save_batch(record))
        return record

    def _live(self, record: BatchRecord) -> BatchRecord:
        job = self._jobs.get(record.batch.id)
        return record if job is None else job.record

    async def _load(self) -> None:
        """Takes up, once, what an earlier run of the server has left."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._take_up())
        loading = self._loading
        try:
            await asyncio.shield(loading)
        except Exception:
            # The next call tries again.
            if self._loading is loading:
                self._loading = None
            raise

    async def _take_up(self) -> None:
        for record in await self.archive.run(lambda store: store.active_batches()):
            log.info("batch %s goes on", record.batch.id)
            self._begin(record)

    def _begin(self, record: BatchRecord) -> None:
        if self._closed:
            # It is stored, and goes on at the next start.
            return
        job = self._jobs[record.batch.id] = Job(record)
        task = asyncio.create_task(self._work(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, job: Job) -> None:
        try:
            if not job.batch.request_counts.total:
                await self._validate(job)
            if job.record.active:
                await self._insist(job.open)
                job.count()
                if job.record.outcome is None:
                    await self._finalizing(job, await self._answer(job))
                await self._finish(job, job.record.outcome or "completed")
        except FileNotFoundError:
            await self._fail(
                job, [BatchProblem(code="input_file_missing", message="The input file is gone.")]
            )
        except ResultFileError as error:
            log.error("batch %s: %s", job.batch.id, error)
            await self._fail(
                job, [BatchProblem(code="results_damaged", message="The results so far are damaged.")]
            )
        except Exception:
            log.exception("batch %s", job.batch.id)
            problem = BatchProblem(
                code="internal_error", message="The server had an internal error; its log says more."
            )
            await self._fail(job, [problem])
        finally:
            self.archive.run_later(lambda _: job.close())
        del self._jobs[job.batch.id]

    async def _validate(self, job: Job) -> None:
        """Reads the input once: to count it, and to refuse it as a whole if a line is bad."""
        batch, problems, total = job.batch, [], 0
        async with self._input(job) as chunks:
            async for chunk in chunks:
                total += len(chunk)
                problems += [problem for line in chunk if (problem := _problem_of(line, batch.endpoint))]
                if total > MAX_LINES:
                    number = chunk[MAX_LINES - total].number
                    message = f"The file has more than {MAX_LINES} lines."
                    problems.append(BatchProblem(code="too_many_lines", message=message, line=number))
                    break
        if not total:
            problems.append(BatchProblem(code="empty_file", message="The file has no lines."))
        if problems:
            await self._fail(job, problems[:MAX_PROBLEMS])
            return
        batch.request_counts = RequestCounts(total)
        if batch.cancelling_at is None:
            batch.status, batch.in_progress_at = "in_progress", int(self._now())
        await self._save(job)

    async def _answer(self, job: Job) -> Outcome:
        """Answers the lines that are not answered yet; tells what ended that."""
        answering = asyncio.create_task(self._answer_rest(job))
        try:
            while not answering.done():
                if job.batch.cancelling_at is not None:
                    return "cancelled"
                if self._now() >= job.batch.expires_at:
                    return "expired"
                await asyncio.wait((answering,), timeout=POLL)
            await answering
            return "completed"
        finally:
            answering.cancel()
            await asyncio.wait((answering,))

    async def _answer_rest(self, job: Job) -> None:
        async with self._input(job) as chunks:
            await answer_all(chunks, job.tally.keys, lambda line: self._one(job, line), self._slots)

    async def _one(self, job: Job, line: Line) -> None:
        answer = await self._try(job, line)
        while answer.status in (429, 503):
            # Nothing is wrong with the line: the server has no room for it now, or shuts down.
            await asyncio.sleep(PATIENCE)
            answer = await self._try(job, line)
        await self._insist(lambda _: job.put(line, answer))
        job.count()

    async def _try(self, job: Job, line: Line) -> Answer:
        """What a line is answered, once the live traffic leaves room for it."""
        while not self._has_room():
            await asyncio.sleep(POLL)
        self._answering += 1
        try:
            return await self.dispatcher.answer(line.url, line.body, job.record.tenant)
        finally:
            self._answering -= 1

    def _has_room(self) -> bool:
        """Nobody waits in the engine; a batch still advances, by one line at a time, when somebody always does."""
        try:
            self._service.check_ready()
        except ApiError:
            return False
        return self._answering == 0 or self._service.stats.waiting == 0

    async def _finalizing(self, job: Job, outcome: Outcome) -> None:
        job.record.outcome = outcome
        job.batch.finalizing_at = int(self._now())
        if outcome != "cancelled":
            job.batch.status = "finalizing"
        await self._save(job)

    async def _finish(self, job: Job, outcome: Outcome) -> None:
        """Gives each line that got no answer its place among the errors, and shows the result files."""
        if outcome != "completed":
            problem = _CUT_OFF[outcome]
            async with self._input(job) as chunks:
                async for chunk in chunks:
                    await self._insist(lambda _, chunk=chunk: job.put_rest(chunk, problem))
        job.count()
        counts = job.batch.request_counts
        if counts.completed + counts.failed != counts.total:
            raise RuntimeError(f"{counts} do not add up")
        await self._insist(lambda store: self._show(store, job, outcome))

    def _show(self, store: Store, job: Job, outcome: Outcome) -> None:
        job.close()
        record, batch = job.record, job.batch
        names = {record.output_id: f"{batch.id}_output.jsonl", record.error_id: f"{batch.id}_error.jsonl"}
        shown = [(file_id, name) for file_id, name in names.items() if store.path(file_id).stat().st_size]
        there = dict(shown)
        done = msgspec.structs.replace(
            batch,
            status=outcome,
            output_file_id=record.output_id if record.output_id in there else None,
            error_file_id=record.error_id if record.error_id in there else None,
            **{f"{outcome}_at": int(self._now())},
        )
        store.save_batch(msgspec.structs.replace(record, batch=done), shown)
        record.batch = done
        for file_id in names.keys() - there.keys():
            store.path(file_id).unlink(missing_ok=True)

    async def _fail(self, job: Job, problems: list[BatchProblem]) -> None:
        job.batch.status, job.batch.failed_at = "failed", int(self._now())
        job.batch.errors = BatchProblems(data=problems)
        await self._save(job)

    async def _save(self, job: Job) -> None:
        await self._insist(lambda store: store.save_batch(job.record))

    @asynccontextmanager
    async def _input(self, job: Job) -> AsyncIterator[AsyncIterator[list[Line]]]:
        """All lines of the input file, some at a time. Raises FileNotFoundError."""
        file = await self.archive.run(lambda store: open_private(store.path(job.batch.input_file_id), "rb"))
        try:
            lines = read_lines(file, self._max_line)
            yield in_chunks(lines, lambda read: self.archive.run(lambda _: read()))
        finally:
            file.close()

    async def _insist(self, work: Callable[[Store], _T]) -> _T:
        """Has the store do something, however long that takes: a disk that is full may have room again later."""
        while True:
            try:
                return await self.archive.run(work)
            except FileNotFoundError:
                raise
            except (ApiError, OSError, sqlite3.Error) as error:
                log.warning("a batch waits for the disk: %s", error)
            await asyncio.sleep(PATIENCE)


def _problem_of(line: Line, endpoint: str) -> BatchProblem | None:
    problem = line.problem
    if problem is None and line.url != endpoint:
        message = f"Line {line.number}: url is {line.url[:100]!r}, but the batch is for {endpoint}."
        problem = Problem("mismatched_endpoint", message, "url")
    if problem is None:
        return None
    return BatchProblem(code=problem.code, message=problem.message, param=problem.param, line=line.number)


_CUT_OFF: dict[Outcome, Problem] = {
    "expired": Problem("batch_expired", "The completion window ended before this line was answered."),
    "cancelled": Problem("batch_cancelled", "The batch was cancelled before this line was answered."),
}
