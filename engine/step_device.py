"""The device's side of the steps: parameters, page pool and sampler state, and the commands that run programs on them.

Every command takes host values only, and is the same program with the same values whenever it is given the same: so
several processes that follow one stream of commands, each with its own devices, run as one (see `leader`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..cache.device_pool import DevicePool
from ..models.transformer import Params
from .programs import like
from .sampler import SampleOutput, ScoreOutput
from .sampler_rows import SamplingRows
from .sampler_state import UPDATES, SamplerState, init_state
from .step import StepFunctions


class StepDevice:
    """Commands are dispatched in order, and return while the device works. What a forward leaves is kept until the next
    one, for `sample` and for those who read prompts."""

    def __init__(
        self,
        params: Params,
        pool: DevicePool,
        functions: StepFunctions,
        *,
        num_slots: int,
        vocab_size: int,
        everywhere: NamedSharding | None = None,
        device: Any = None,
        announce: Callable[..., None] = lambda command, *arguments: None,
    ) -> None:
        """everywhere: where the sampler's state lies, if there are several devices: all of it on each.
        device: where it lies, if there is one that is not the default device.
        announce: told of every command, by name and arguments, before it is carried out."""
        self.vocab_size = vocab_size
        self.params = params
        # A program is called with all leaves that it is given, used or not: those of layers alone take 0.1 ms and more.
        self._top = {name: leaf for name, leaf in params.items() if name != "layers"}
        self._pool = pool
        self._functions = functions
        self._num_slots = num_slots
        self._everywhere = everywhere
        self._device = device
        self.announce = announce
        self._state = self._new_state()
        self._kept: jax.Array | None = None
        self._hidden: jax.Array | None = None
        self._no_masks: dict[int, jax.Array] = {}
        """Row bucket -> masks on the device that allow everything."""

    def forward(self, vector: np.ndarray, table: np.ndarray, tokens: int) -> None:
        """Computes a step that `StepShapes` has packed, padded to so many tokens."""
        self.announce("forward", vector, table, tokens)
        inputs = self._inputs(vector, table)
        self._kept, self._hidden, self._pool.array = self._functions.forward(*inputs, tokens=tokens)

    def sample(self, rows: SamplingRows, mask: np.ndarray | None) -> SampleOutput:
        """Samples for rows of the last forward. mask: i32 `[rows, ceil(V / 32)]`; None allows everything."""
        self.announce("sample", rows.floats, rows.ints, rows.flags, mask)
        masks = self._no_mask(len(rows.flags)) if mask is None else mask
        output, self._state = self._functions.sample(self._top, self._kept, rows, self._state, masks)
        return output

    def update(self, name: str, arguments: tuple[Any, ...]) -> None:
        """One of `sampler_state.UPDATES`."""
        self.announce("update", name, arguments)
        self._state = UPDATES[name](self._state, *arguments)

    def score(self, at_p: np.ndarray, tokens_p: np.ndarray, wants_top_p: np.ndarray) -> ScoreOutput:
        """See `sampler.score`; of the tokens that follow those at `at_p`."""
        self.announce("score", at_p, tokens_p, wants_top_p)
        return self._functions.score(self._top, self._take(at_p), tokens_p, wants_top_p)

    def add_up(self, at_p: np.ndarray, group_p: np.ndarray, groups: int) -> jax.Array:
        """Sums f32 `[groups, D]` of the hidden states at `at_p`, by group."""
        self.announce("add_up", at_p, group_p, groups)
        return self._functions.add_up(self._take(at_p), group_p, groups=groups)

    def prepare_forward(self, vector: np.ndarray, table: np.ndarray, tokens: int) -> None:
        """Makes the program of `forward` for such arguments; so the others. All but this after some forward."""
        self.announce("prepare_forward", vector, table, tokens)
        self._functions.forward.prepare(*self._inputs(vector, table), tokens=tokens)

    def prepare_take(self, tokens: int, at_p: np.ndarray) -> None:
        """tokens: what the forward was padded to."""
        self.announce("prepare_take", tokens, at_p)
        self._functions.take.prepare(self._hidden_like(tokens), at_p)

    def prepare_score(self, tokens_p: np.ndarray, wants_top_p: np.ndarray) -> None:
        self.announce("prepare_score", tokens_p, wants_top_p)
        self._functions.score.prepare(self._top, self._hidden_like(len(tokens_p)), tokens_p, wants_top_p)

    def prepare_add_up(self, group_p: np.ndarray, groups: int) -> None:
        self.announce("prepare_add_up", group_p, groups)
        self._functions.add_up.prepare(self._hidden_like(len(group_p)), group_p, groups=groups)

    def prepare_sample(self, rows: SamplingRows) -> None:
        self.announce("prepare_sample", rows.floats, rows.ints, rows.flags)
        mask = self._no_mask(len(rows.flags))
        self._functions.sample.prepare(self._top, self._kept, rows, self._state, mask)

    def reset(self) -> None:
        """New, empty pool and state, after a fault lost the old ones."""
        self.announce("reset")
        self._kept = self._hidden = None
        self._pool.reset()
        self._state = self._new_state()

    def wait(self) -> None:
        """Until the device has come to the end of what it was told."""
        jax.block_until_ready((self._pool.array, self._state))

    def compiled(self, vector: np.ndarray, table: np.ndarray, tokens: int) -> jax.stages.Compiled:
        """The program of a forward, to be looked into."""
        return self._functions.forward.lower(*self._inputs(vector, table), tokens=tokens).compile()

    @property
    def mask_width(self) -> int:
        """i32 words of a mask."""
        return -(-self.vocab_size // 32)

    def _inputs(self, vector: np.ndarray, table: np.ndarray) -> tuple[Any, ...]:
        return self.params, self._pool.array, self._state.last_tokens, vector, table

    def _hidden_like(self, rows: int) -> jax.ShapeDtypeStruct:
        assert self._hidden is not None
        return like(self._hidden, rows)

    def _take(self, at_p: np.ndarray) -> jax.Array:
        return self._functions.take(self._hidden, at_p)

    def _new_state(self) -> SamplerState:
        if self._everywhere is not None:
            make = jax.jit(
                lambda: init_state(self._num_slots, self.vocab_size), out_shardings=self._everywhere
            )
            return make()
        state = init_state(self._num_slots, self.vocab_size)
        layout = self._pool.layout
        # A pool with a layout is bound to its device, and so is what steps make of it: a state that was not bound at first
        # would have every program compiled twice.
        home = self._device if layout is None else layout.sharding
        return state if home is None else jax.device_put(state, home)

    def _no_mask(self, size: int) -> jax.Array:
        if size not in self._no_masks:
            nothing = np.zeros((size, self.mask_width), np.int32)
            if self._everywhere is None:
                self._no_masks[size] = jax.device_put(nothing, self._device)
            else:
                self._no_masks[size] = jax.make_array_from_callback(
                    nothing.shape, self._everywhere, lambda index: nothing[index]
                )
        return self._no_masks[size]
