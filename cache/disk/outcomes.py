"""What an exception of tensorstore's, or of the file system's, means: for a page, and for people."""

from __future__ import annotations

import errno
import re

from ..moves import Outcome

PATIENCE_S = 60.0
"""What the calls of a store that wait (list, describe, index) wait at most."""
_ERRNO = re.compile(r"os_error_code='(\d+)'")


def classify(error: BaseException) -> Outcome:
    """What an exception of tensorstore's means for a page: it carries an errno, or a status word, in its message."""
    text = str(error)
    if found := _ERRNO.search(text):
        number = int(found[1])
    else:
        number = getattr(error, "errno", None) or 0
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Outcome.NO_SPACE
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Outcome.DENIED
    if number in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR):
        return Outcome.MISSING
    if number:
        return Outcome.IO_ERROR
    status = text.partition(":")[0]
    if status == "NOT_FOUND":
        return Outcome.MISSING
    if status in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return Outcome.DENIED
    if status == "CANCELLED":
        return Outcome.CANCELLED
    return Outcome.IO_ERROR


def plain(error: BaseException) -> str:
    """One line for people: without tensorstore's status word, errno and source locations."""
    if isinstance(error, TimeoutError):
        return f"no answer within {PATIENCE_S:g} s"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = re.sub(
        r"\s*\[(?:os_error_code|source locations|tensorstore_spec)=.*", "", str(error), flags=re.DOTALL
    )
    return " ".join(re.sub(r"^[A-Z_]+: ", "", text).split())
