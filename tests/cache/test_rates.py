"""Loading held against computing, with both queues."""

from __future__ import annotations

from tierax.cache.rates import LoadOrRecompute, Pages

TEN = Pages(10, bytes=100, tokens=16)


def known(load: float, compute: float) -> LoadOrRecompute:
    """Seconds that a page takes."""
    choice = LoadOrRecompute(retry=10.0)
    choice.read.measure(TEN.bytes, load, 0.0)
    choice.prefill.measure(TEN.tokens, compute, 0.0)
    return choice


def test_what_nothing_is_known_of_is_read() -> None:
    assert LoadOrRecompute().pages_to_read(TEN, reading=100, turn=0.0, now=0.0) == 10


def test_a_fast_disk_is_not_waited_for_behind_a_long_queue() -> None:
    choice = known(load=0.5, compute=1.0)
    assert choice.pages_to_read(TEN, reading=10, turn=0.0, now=0.0) == 10, "5 + 5 s for 10 s"
    assert choice.pages_to_read(TEN, reading=11, turn=0.0, now=0.0) == 0
    assert choice.pages_to_read(TEN, reading=12, turn=1.0, now=0.0) == 10, "the device has a queue, too"
    assert choice.pages_to_read(TEN, reading=13, turn=1.0, now=0.0) == 0


def test_a_slow_disk_is_read_as_far_as_it_costs_no_wait() -> None:
    choice = known(load=2.0, compute=1.0)
    assert [
        choice.pages_to_read(TEN, reading=reading, turn=turn, now=0.0)
        for reading, turn in ((0, 0.0), (0, 1.9), (0, 4.5), (2, 4.5), (1, 4.5), (0, 99.0))
    ] == [0, 0, 2, 0, 1, 10]


def test_a_turn_is_as_far_as_the_tokens_before_it() -> None:
    choice = LoadOrRecompute()
    assert choice.turn(1000) == 0.0
    choice.prefill.measure(100, 1.0, 0.0)
    assert choice.turn(1000) == 10.0


def test_a_slow_disk_is_tried_now_and_then_by_one_and_a_little() -> None:
    choice = known(load=0.02, compute=0.01)
    assert choice.pages_to_read(TEN, reading=0, turn=0.0, now=9.0) == 0
    assert choice.pages_to_read(TEN, reading=0, turn=0.0, now=10.0) == 5, "a hundredth of the 10 s"
    assert choice.pages_to_read(TEN, reading=5, turn=0.0, now=10.05) == 0, "somebody tries it already"
    choice.read.measure(TEN.bytes, 0.001, 10.1)
    assert choice.pages_to_read(TEN, reading=0, turn=0.0, now=10.1) == 10, "what was once counts no more"


def test_a_trial_that_stalls_keeps_nobody_from_the_next() -> None:
    choice = known(load=0.02, compute=0.01)
    assert choice.pages_to_read(TEN, reading=2, turn=0.0, now=10.0) > 0, (
        "what stalls has not been seen to be slow"
    )
    assert choice.pages_to_read(TEN, reading=7, turn=0.0, now=19.9) == 0
    assert choice.pages_to_read(TEN, reading=7, turn=0.0, now=20.0) > 0
