"""Runs what `with assistant(): …` has recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .backend import Backend, default_backend
from .budget import Budget
from .errors import BackendError, ProgramError
from .expr import Begin, End, Expr, Message, Sampling, Seq
from .family import Family
from .recording import Block, take_recorded
from .result import Result
from .state import ProgramState


def run_recorded(
    backend: Backend, where: str, max_total_tokens: int | None, sampling: Mapping[str, Any]
) -> Result:
    """See `Backend.run`."""
    default = default_backend.current
    if default is not None and default is not backend:
        raise ProgramError(
            "this backend is not the default one, which the program was recorded for: run it there, or call"
            " set_default_backend",
            where,
        )
    family = Family(backend, Sampling(**Sampling.checked(sampling)), Budget(max_total_tokens))
    parts = list(_parts(take_recorded(where)))
    try:
        state = ProgramState(family)
    except BackendError as error:
        raise ProgramError(str(error), where) from None
    try:
        for part, line in parts:
            state.add(part, line)
        family.finish()
    except BaseException:
        family.cancel()
        raise
    return Result(state)


def _parts(entries: Iterable[tuple[Block, Expr]]) -> Iterable[tuple[Expr, str]]:
    """Whole messages as they are, loose parts in messages of their block's role; each with its line."""
    open_block: Block | None = None
    for block, entry in entries:
        for part in entry.parts if isinstance(entry, Seq) else (entry,):
            where = getattr(part, "where", block.where)
            alone = isinstance(part, Message | Begin | End)
            if open_block is not None and (alone or open_block is not block):
                yield End(open_block.role, where), where
                open_block = None
            if not alone and open_block is None:
                yield Begin(block.role, where), where
                open_block = block
            yield part, where
    if open_block is not None:
        yield End(open_block.role, open_block.where), open_block.where
