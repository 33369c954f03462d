"""Flags as rows of a table, and the parser that reads them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..engine.config import ConfigError, parse_size
from ..engine.version import __version__
from .errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes become a `UsageError`, one line without the usage block."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument(
            "--version", action="version", version=f"tierax {__version__}", help="show the version, and exit"
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message)


@dataclass(frozen=True, slots=True)
class Option:
    """Flags that fill one setting. `const` makes it a switch; otherwise `convert` reads the value, or values if `many`."""

    field: str
    flags: tuple[str, ...]
    help: str
    convert: Callable[[str], Any] = str
    metavar: str | None = None
    const: Any = None
    many: bool = False


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option], title: str) -> None:
    """Adds rows of the table; an absent flag leaves no trace, so the dataclass defaults stand."""
    group = parser.add_argument_group(title)
    for option in options:
        kwargs: dict[str, Any] = {"dest": option.field, "help": option.help, "default": argparse.SUPPRESS}
        if option.const is not None:
            group.add_argument(*option.flags, action="store_const", const=option.const, **kwargs)
        else:
            metavar = option.metavar or option.flags[0].rsplit("-", 1)[-1].upper()
            action = "append" if option.many else "store"
            group.add_argument(*option.flags, type=option.convert, metavar=metavar, action=action, **kwargs)


def pick(values: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """The settings among `values` that these rows fill and the user gave."""
    return {option.field: values[option.field] for option in options if option.field in values}


def size(text: str) -> int:
    """Bytes, from `2GiB` and the like; for argparse."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size: ")) from None
