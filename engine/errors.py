"""Errors of the engine's faces that callers tell apart. Pure."""

from __future__ import annotations


class EngineStopped(RuntimeError):
    """The engine's thread has ended, or ends before it could do what it was asked for."""
