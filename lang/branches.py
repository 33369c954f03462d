"""Several states that go on from the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .expr import Expr

if TYPE_CHECKING:
    from .state import ProgramState


class Branches:
    """The branches of a fork. Adding to all of them at once: `branches += gen("x")`."""

    def __init__(self, parent: ProgramState, states: list[ProgramState]) -> None:
        self._parent = parent
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __getitem__(self, key: int | str) -> Any:
        """A branch by its number, or a name's texts of all branches."""
        return self._states[key] if isinstance(key, int) else [state[key] for state in self._states]

    def __setitem__(self, key: int, state: ProgramState) -> None:
        # What `branches[0] += …` does at its end.
        if self._states[key] is not state:
            raise TypeError("a branch cannot be replaced")

    def __iadd__(self, other: Expr | str | Callable[[int], Expr | str]) -> Branches:
        for number, state in enumerate(self._states):
            state += other(number) if callable(other) else other
        return self

    def join(self) -> None:
        """Waits for all branches; each name of theirs is then, in the state that was forked, the list of their texts."""
        for state in self._states:
            state.sync()
        for name in {name: None for state in self._states for name in state.names()}:
            self._parent.gather(name, [state[name] for state in self._states if name in state])
