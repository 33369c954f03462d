"""What a recorded program comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .backend import Completion
from .family import Usage
from .interpreter import Choice
from .state import ProgramState


class Result(Mapping[str, str]):
    """The texts by name. A name that was used several times has the last one here, and all of them in `all(name)`."""

    def __init__(self, state: ProgramState) -> None:
        """Of a program that has ended well."""
        self._state = state
        self._texts = {name: state[name] for name in state.names()}

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __repr__(self) -> str:
        return f"Result({self._texts!r})"

    def all(self, name: str) -> list[str]:
        """The texts of all places with that name, in order."""
        return self._state.get_all(name)

    def meta(self, name: str) -> Any:
        """How the last text of that name came about: a `Completion` says what was cached and how it ended, a `Choice`
        the scores."""
        return self._state.get_meta_info(name)

    @property
    def metas(self) -> list[Completion | Choice]:
        """Of all places, named or not, in the order in which they were filled."""
        return list(self._state.metas)

    @property
    def text(self) -> str:
        """The whole text, chat template included."""
        return self._state.text()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation in OpenAI's form."""
        return self._state.messages()

    @property
    def usage(self) -> Usage:
        """Tokens of all calls together."""
        return self._state.usage()
