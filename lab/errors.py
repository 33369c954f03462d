"""What a user of the lab can get wrong."""

from __future__ import annotations


class LabError(Exception):
    """A trace, a preset or a setting that cannot be used; the message is one line for the user."""


class TraceError(LabError):
    """A trace that cannot be read; the message names the file, and the line where there is one."""
