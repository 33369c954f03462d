"""`--config FILE`: a command's flags out of a TOML or YAML file.

The command line goes before the environment, the environment before the file, the file before the defaults.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError
from .option import Parser
from .options_of_server import SECRETS

_NOT_IN_FILES = ("help", "version", "config")


def add_config_option(parser: Parser) -> None:
    """Adds `--config`; `parse` reads it."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="flags out of a .toml, .yaml or .yml file; the command line goes first",
    )


def parse(parser: Parser, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The settings of a command line, completed out of the file that it names; secrets that `environ` has are left to it.

    Raises `UsageError`.
    """
    given = _given(parser, argv)
    settings: dict[str, Any] = {}
    if (name := given.get("config")) is not None:
        settings = _Reader(parser, Path(name).expanduser()).settings()
    for field, variable in SECRETS.items():
        if environ.get(variable):
            settings.pop(field, None)
    # A bare MODEL is a spelling of --model-path, with a setting of its own.
    if given.get("model") is not None:
        settings.pop("model_path", None)
    values = vars(parser.parse_args(argv, argparse.Namespace(**settings)))
    # What may be repeated was added to the file's; the command line alone counts.
    return {key: given.get(key, value) for key, value in values.items() if key != "config"}


def _given(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What the command line itself says, defaults left out."""
    defaults = {action: action.default for action in parser._actions}
    try:
        for action in defaults:
            action.default = argparse.SUPPRESS
        given = vars(parser.parse_args(argv))
    finally:
        for action, default in defaults.items():
            action.default = default
    return {key: value for key, value in given.items() if value is not None}


class _Reader:
    """One file, for one command."""

    def __init__(self, parser: Parser, path: Path) -> None:
        self._parser = parser
        self._path = path
        self._flags = {
            flag[2:]: action
            for action in parser._actions
            for flag in action.option_strings
            if flag.startswith("--") and action.dest not in _NOT_IN_FILES
        }

    def settings(self) -> dict[str, Any]:
        """Setting -> value, as the command line would have given it."""
        found: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key, value in self._load().items():
            name = str(key).replace("_", "-")
            if name not in self._flags:
                raise self._problem(f"unknown key {key!r}{self._hint(name)}")
            action = self._flags[name]
            if (other := spelled.setdefault(action.dest, str(key))) != key:
                raise self._problem(f"{other!r} and {key!r} are the same setting; give one of them")
            if value is not None:
                # Through the very spelling: others of the setting may read values in other units.
                found[action.dest] = self._value(action, f"--{name}", str(key), value)
        return found

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._flags, n=1)
        return (
            f"; did you mean {near[0]!r}?" if near else f" (see {self._parser.prog} --help for what there is)"
        )

    def _value(self, action: argparse.Action, flag: str, key: str, value: Any) -> Any:
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise self._problem(f"{key!r} is a switch: write true or false, not {value!r}")
            return action.const if value else not action.const
        items = value if isinstance(value, list) and isinstance(action, argparse._AppendAction) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, str | int | float):
                raise self._problem(f"{key!r} must be text or a number, not {type(item).__name__}")
        try:
            return _given(self._parser, [f"{flag}={item}" for item in items]).get(action.dest)
        except UsageError as error:
            raise self._problem(f"{key!r}: {str(error).partition(': ')[2]}") from None

    def _load(self) -> dict[Any, Any]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise self._problem(error.strerror or str(error)) from None
        except UnicodeDecodeError as error:
            raise self._problem(f"not UTF-8 text: byte {error.start}") from None
        match self._path.suffix.lower():
            case ".toml":
                loaded = self._load_toml(text)
            case ".yaml" | ".yml":
                loaded = self._load_yaml(text)
            case _:
                raise self._problem("the file's name must end in .toml, .yaml or .yml")
        if loaded is None:
            return {}
        if not isinstance(loaded, dict):
            raise self._problem("write one `flag: value` a line")
        return loaded

    def _load_toml(self, text: str) -> Any:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise self._problem(f"not valid TOML: {error}") from None

    def _load_yaml(self, text: str) -> Any:
        import yaml

        class Loader(yaml.SafeLoader):
            """Takes no key twice, which YAML forbids and PyYAML does not mind."""

            def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
                keys = [key.value for key, _ in node.value]
                if twice := {key for key in keys if isinstance(key, str) and keys.count(key) > 1}:
                    raise yaml.MarkedYAMLError(problem=f"{min(twice)!r} is given twice")
                return super().construct_mapping(node, deep)

        try:
            return yaml.load(text, Loader)
        except yaml.MarkedYAMLError as error:
            where = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
            raise self._problem(f"not valid YAML{where}: {error.problem}") from None
        except yaml.YAMLError as error:
            raise self._problem(f"not valid YAML: {' '.join(str(error).split())}") from None

    def _problem(self, text: str) -> UsageError:
        return UsageError(self._parser.prog, f"--config {self._path}: {text}")
