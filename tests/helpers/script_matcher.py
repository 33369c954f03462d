"""A constraint that is a list of token sets, for tests of the loop without any grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from tierax.engine.constraint import ConstraintError


class ScriptMatcher:
    """Implements `constraint.Matcher`: one set of allowed tokens per position, from 0 to 99.

    The text is complete at the end, and before the positions in `complete`, where a stop id may come instead. Positions with
    one token only are forced. `fails_at`: the position whose token cannot be followed.
    """

    def __init__(
        self,
        steps: Sequence[Collection[int]],
        *,
        stop_ids: Collection[int] = (),
        complete: Collection[int] = (),
        fails_at: int | None = None,
    ) -> None:
        self._steps = steps
        self._stop_ids = stop_ids
        self._complete = complete
        self._fails_at = fails_at
        self.at = 0

    def again(self) -> ScriptMatcher:
        """A new one of the same constraint."""
        return ScriptMatcher(
            self._steps, stop_ids=self._stop_ids, complete=self._complete, fails_at=self._fails_at
        )

    @property
    def ended(self) -> bool:
        return self.at == len(self._steps)

    @property
    def forced(self) -> list[int]:
        forced: list[int] = []
        for place in range(self.at, len(self._steps)):
            if place in self._complete or len(self._steps[place]) > 1:
                break
            forced += self._steps[place]
        return forced

    @property
    def mask(self) -> NDArray[np.int32]:
        bits = np.zeros(128, np.uint8)
        bits[list(self._steps[self.at])] = 1
        if self.at in self._complete:
            bits[list(self._stop_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token_id: int) -> None:
        if self.at == self._fails_at:
            raise ConstraintError("script", "the script fails here")
        if token_id not in self._steps[self.at]:
            raise ConstraintError("script", f"token {token_id} is not in the script")
        self.at += 1
