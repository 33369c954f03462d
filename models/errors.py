"""The one exception that users see when a model's files are wrong."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be used as it is; the message says what is wrong with which file and, where known, the cure."""
