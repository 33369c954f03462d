"""Compiled programs on disk: found again by what they were made from, and never trusted further than that."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tierax.engine.programs import KEPT, Program, ProgramStore


class Pair(NamedTuple):
    total: jax.Array
    rest: tuple[jax.Array, ...]


def calculate(pool: jax.Array, vector: jax.Array, *, times: int) -> tuple[Pair, jax.Array]:
    return Pair(vector.sum() * times, (vector + 1,)), pool.at[0].add(vector)


class Traced:
    """A store below a directory, a program out of it, and how often it was loaded and traced."""

    def __init__(self, directory: Path | None, *made_from: object) -> None:
        self.loaded = self.traced = 0
        store = ProgramStore(directory, made_from, jax.devices()[:1], self._on_load)
        function = jax.jit(self._calculate, static_argnames="times", donate_argnames="pool")
        self.program = Program(
            store, "calculate", function, lambda _, vector, times: (vector.shape[0], times)
        )

    def __call__(self, width: int = 4, times: int = 3) -> tuple[list[float], bool]:
        pool = jnp.zeros((2, width))
        pair, changed = self.program(pool, np.arange(width, dtype=np.float32), times=times)
        return [float(pair.total), *pair.rest[0].tolist(), *changed[0].tolist()], pool.is_deleted()

    def _on_load(self) -> None:
        self.loaded += 1

    def _calculate(self, pool: jax.Array, vector: jax.Array, *, times: int) -> tuple[Pair, jax.Array]:
        self.traced += 1
        return calculate(pool, vector, times=times)


EXPECTED = [18.0, 1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 2.0, 3.0], True


def test_a_second_store_loads_without_tracing(tmp_path: Path) -> None:
    first, second = Traced(tmp_path, "model"), Traced(tmp_path, "model")
    assert first() == EXPECTED
    assert second() == EXPECTED
    assert second() == EXPECTED
    assert (first.traced, first.loaded, second.traced, second.loaded) == (1, 0, 0, 1)


def test_programs_differ_by_shapes_statics_and_what_they_are_made_from(tmp_path: Path) -> None:
    first, second = Traced(tmp_path, "model"), Traced(tmp_path, "other model")
    assert first(4, 3)[0][0] == 18
    assert first(4, 2)[0][0] == 12
    assert first(3, 3)[0][0] == 9
    assert first.traced == 3
    assert second(4, 3)[0][0] == 18
    assert (second.traced, second.loaded) == (1, 0)
    again = Traced(tmp_path, "model")
    assert (again(4, 2)[0][0], again(3, 3)[0][0], again.loaded) == (12, 9, 2)


def test_prepared_for_shapes_it_runs_on_arrays(tmp_path: Path) -> None:
    made = Traced(tmp_path)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 4), (4,))]
    made.program.prepare(*shapes, times=3)
    made.program.prepare(*shapes, times=3)
    assert made() == EXPECTED
    assert made.traced == 1


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"no program", lambda data: b""]
)
def test_a_damaged_file_costs_a_compilation(
    tmp_path: Path, damage: partial[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    assert Traced(tmp_path)() == EXPECTED
    (path,) = (path for path in tmp_path.rglob("calculate-*") if path.is_file())
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        second = Traced(tmp_path)
        assert second() == EXPECTED
    assert (second.traced, second.loaded) == (1, 0)
    assert "made anew" in caplog.text
    third = Traced(tmp_path)
    assert third() == EXPECTED
    assert third.loaded == 1, "written again"


def test_a_directory_that_others_may_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Traced(tmp_path)()
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        second = Traced(tmp_path)
    assert second() == EXPECTED
    assert (second.traced, second.loaded) == (1, 0)
    assert "not this user's alone" in caplog.text


def test_without_a_directory_nothing_is_kept() -> None:
    made = Traced(None)
    assert made() == EXPECTED
    assert made() == EXPECTED
    assert (made.traced, made.loaded) == (1, 0)


def test_sets_not_used_for_long_are_forgotten(tmp_path: Path) -> None:
    Traced(tmp_path, "kept")()
    (kept,) = tmp_path.iterdir()
    for number in range(KEPT + 3):
        old = tmp_path / f"set {number}"
        old.mkdir()
        os.utime(old, (number, number))
    Traced(tmp_path, "kept")
    assert kept.exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path != kept) == sorted(
        f"set {number}" for number in range(4, KEPT + 3)
    )
