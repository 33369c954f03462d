"""What counts as a user's mistake, and how it is worded."""

from __future__ import annotations

import re

_FIELD = re.compile(r"^([a-z][a-z0-9_]*):(?= )")


class UsageError(Exception):
    """The call itself is wrong: unknown flag, missing or malformed value."""

    def __init__(self, command: str, message: str) -> None:
        super().__init__(message)
        self.command = command


def is_user_mistake(error: Exception) -> bool:
    """True for errors whose message is written for the user; anything else is our fault and keeps its traceback."""
    from ..engine.chat_template import TemplateError
    from ..engine.config import ConfigError
    from ..engine.tokenizer import TokenizerError
    from ..engine.validate import ParameterError
    from ..lab.errors import LabError
    from ..models.errors import ModelError

    return isinstance(
        error, (ConfigError, LabError, ModelError, ParameterError, TokenizerError, TemplateError, OSError)
    )


def one_line(error: Exception) -> str:
    """The message on one line; a setting is named as the flag that was typed (`page_size:` -> `--page-size:`)."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"  # without the errno, as commands say it elsewhere
    text = " ".join(str(error).split()) or type(error).__name__
    return _FIELD.sub(lambda match: f"--{match[1].replace('_', '-')}:", text)
