"""Files and batches as clients see them, in OpenAI's form, and what the server remembers of a batch besides."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Outcome = Literal["completed", "expired", "cancelled"]
FINAL = ("failed", "completed", "expired", "cancelled")
"""States that nothing follows."""


class FileObject(msgspec.Struct, kw_only=True):
    """An uploaded or produced file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class BatchProblem(msgspec.Struct, kw_only=True):
    """What is wrong with a batch or with a line of its input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchProblems(msgspec.Struct, kw_only=True):
    """All that was found wrong."""

    object: Literal["list"] = "list"
    data: list[BatchProblem]


class RequestCounts(msgspec.Struct):
    """Lines of a batch by how they ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(msgspec.Struct):
    """Prompt tokens that needed no computing."""

    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Output tokens that are not part of the answers."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    """Tokens of all good answers together."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Batch(msgspec.Struct, kw_only=True):
    """A batch. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, whose it is, and the files that its results go to while nobody sees them yet."""

    batch: Batch
    tenant: str
    output_id: str
    error_id: str
    outcome: Outcome | None = None
    """What the batch becomes once it is finalized."""
    results_live: int | None = None
    """Seconds after which the result files go; None = they stay."""

    @property
    def active(self) -> bool:
        """Work on it is not done."""
        return self.batch.status not in FINAL
