"""How requests end: stops, lengths, aborts in every state, and faults of the device."""

from __future__ import annotations

import logging

import pytest

from helpers.byte_tokenizer import byte_tokenizer
from helpers.fake_executor import Model, solo
from helpers.fake_rig import FakeTransfers, Rig
from tierax.engine.plan import StepPlan
from tierax.engine.request import Delta, Request, Status
from tierax.engine.text import IncrementalText

PROMPT = list(range(1, 14))


def says(text: str) -> Model:
    """A model that spells a text after a prompt of `PROMPT`'s length, whatever the prompt is."""
    return lambda history, seed, position: text.encode()[(position - len(PROMPT)) % len(text.encode())]


def text_of(rig: Rig, request: Request) -> str:
    return "".join(delta.text for delta in rig.deltas[request.id])


# --- stops and lengths


def test_an_end_token_stops_and_is_no_part_of_the_text() -> None:
    rig = Rig(model=says("abcdef"))
    request = rig.add(PROMPT, 20, stop_ids=[ord("d")], text=IncrementalText(byte_tokenizer()), logprobs=0)
    rig.run()
    assert rig.output(request) == list(b"abcd")
    assert text_of(rig, request) == "abc"
    assert request.finish_reason == "stop"
    assert sum(len(delta.logprobs) for delta in rig.deltas[request.id]) == 3


def test_min_tokens_come_before_an_end_token_counts() -> None:
    rig = Rig(model=says("dd"))
    request = rig.add(PROMPT, 20, stop_ids=[ord("d")], min_tokens=4)
    rig.run()
    assert rig.output(request) == list(b"ddddd"), "four, then the one that ends it"
    assert request.finish_reason == "stop"


def test_without_end_tokens_it_runs_to_its_length() -> None:
    rig = Rig(model=says("abcd"))
    request = rig.add(PROMPT, 7, ignore_eos=True)
    rig.run()
    assert rig.output(request) == list(b"abcdabc")
    assert request.finish_reason == "length"


def test_a_stop_string_ends_the_request_in_the_middle_of_a_token() -> None:
    rig = Rig(model=says("one two three"))
    text = IncrementalText(byte_tokenizer(), stop=["wo t", "never"])
    request = rig.add(PROMPT, 50, text=text)
    rig.run()
    assert text_of(rig, request) == "one t"
    assert request.finish_reason == "stop"
    assert rig.output(request) == list(b"one two t")


def test_a_held_back_beginning_of_a_stop_string_comes_with_the_end() -> None:
    rig = Rig(model=says("one two"))
    request = rig.add(PROMPT, 5, text=IncrementalText(byte_tokenizer(), stop=["twelve"]))
    rig.run()
    assert text_of(rig, request) == "one t"
    assert rig.deltas[request.id][-1].text == "t"


def test_exactly_one_delta_says_how_it_ended_and_it_is_the_last() -> None:
    rig = Rig()
    requests = [rig.add(PROMPT, n, seed=n) for n in (1, 2, 9)]
    rig.step()
    aborted = rig.add(PROMPT, 50)
    rig.step()
    rig.loop.abort(aborted.id)
    rig.loop.abort(aborted.id)
    rig.loop.abort("unknown")
    rig.run()
    for request in (*requests, aborted):
        reasons = [delta.finish_reason for delta in rig.deltas[request.id]]
        assert reasons[-1] == request.finish_reason
        assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert rig.loop.stats.finished == {"length": 3, "abort": 1}


def test_log_probs_are_as_many_as_were_asked_for() -> None:
    rig = Rig()
    none, chosen, top = (rig.add(PROMPT, 3, logprobs=count) for count in (None, 0, 1))
    rig.run()
    assert [len(d.logprobs) for d in rig.deltas[none.id]] == [0, 0, 0]
    assert [d.logprobs[0].top for d in rig.deltas[chosen.id]] == [(), (), ()]
    assert [len(d.logprobs[0].top) for d in rig.deltas[top.id]] == [1, 1, 1]


def test_times_and_counters_follow_the_clock() -> None:
    rig = Rig(seqs=1)
    rig.clock.advance(5)
    first, second = rig.add(PROMPT, 4, seed=1), rig.add(PROMPT, 4, seed=2)
    rig.run()
    for request in (first, second):
        assert request.first_scheduled is not None
        assert request.first_token is not None
        assert request.finished_at is not None
        assert 5 == request.arrival <= request.first_scheduled < request.first_token < request.finished_at
    stats = rig.loop.stats
    assert stats.generated_tokens == 8
    assert stats.prompt_tokens == 26
    assert stats.cached_tokens == second.cached_tokens == 12
    assert stats.steps == len(rig.device.plans)
    assert stats.device_busy_seconds == pytest.approx(stats.computed_tokens * 0.001)
    assert (stats.pages_total, stats.pages_in_use, stats.running, stats.waiting) == (64, 0, 0, 0)


def test_an_id_in_use_is_refused_and_may_come_again_later() -> None:
    rig = Rig()
    rig.add(PROMPT, 3, id="a")
    with pytest.raises(ValueError, match="'a'"):
        rig.add(PROMPT, 3, id="a")
    rig.run()
    again = rig.add(PROMPT, 3, id="a")
    rig.run()
    rig.expect_solo(again)


# --- whatever ended the earlier request, the cache is invisible


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("ending", ["token", "string", "length", "abort", "abort at once"])
def test_an_earlier_request_leaves_no_trace_in_later_answers(ending: str, page_size: int) -> None:
    rig = Rig(page_size=page_size)
    tokens = solo(rig.request(PROMPT, 12, id="probe"))
    del rig.deltas["probe"]
    options: dict[str, object] = {}
    if ending == "token":
        options["stop_ids"] = [tokens[5]]
    elif ending == "string":
        options["text"] = IncrementalText(byte_tokenizer(), stop=[chr(tokens[4])])
    first = rig.add(PROMPT, 12, **options)
    if ending.startswith("abort"):
        while ending == "abort" and first.num_output < 3:
            rig.step()
        rig.step()
        rig.loop.abort(first.id)
    rig.run()
    later = [
        rig.add([*PROMPT[:9], 77], 8),
        rig.add(PROMPT, 12),
        rig.add(first.tokens, 8),
        rig.add([*first.tokens[:-1], 55, 66], 8),
    ]
    rig.run()
    assert later[1].cached_tokens > 0 or page_size == 16
    for request in later:
        rig.expect_solo(request)


# --- aborts


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("state", ["waiting", "prefilling", "first token in flight", "decoding", "retracted"])
def test_an_abort_gives_everything_back_in_every_state(state: str, page_size: int) -> None:
    rig = Rig(page_size=page_size, pages=28 // page_size, seqs=2, budget=8)
    victim = rig.request(range(100, 112), 12, id="victim")
    other = rig.request(PROMPT[:4], 16, id="other")
    for request in (other, victim):
        rig.loop.add(request)

    def reached() -> bool:
        match state:
            case "waiting":
                return True
            case "prefilling":
                return 0 < victim.num_computed < 12
            case "first token in flight":
                return victim.in_flight == 1 and victim.num_output == 0
            case "decoding":
                return victim.num_output == 2 and victim.in_flight == 1
            case _:
                return victim.status is Status.WAITING and victim.residency == 1

    while not reached():
        rig.step()
        assert not rig.loop.idle, "the state never came"
    kept = victim.num_output
    rig.loop.abort("victim")
    rig.loop.scheduler.check()
    assert victim.finish_reason == "abort"
    rig.run()
    assert victim.num_output == kept, "a token in flight is dropped"
    assert rig.output(victim) == solo(victim)[:kept]
    rig.expect_solo(other)
    again = rig.add(range(100, 112), 12)
    rig.run()
    rig.expect_solo(again)


def test_a_callback_may_abort_others_and_add_new_ones() -> None:
    rig = Rig()
    second = rig.request(PROMPT, 9, id="second", seed=1)
    third = rig.request(PROMPT, 4, id="third", seed=2)
    first = rig.request(PROMPT, 9, id="first")
    seen: list[Delta] = []

    def on_delta(delta: Delta) -> None:
        seen.append(delta)
        if len(seen) == 2:
            rig.loop.abort("second")
            rig.loop.abort("first")
            rig.loop.add(third)

    first.on_delta = on_delta
    rig.loop.add(first)
    rig.loop.add(second)
    rig.run()
    assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
    rig.expect_solo(third)


# --- faults


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR)
    return caplog


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_fault_ends_the_running_and_spares_the_waiting(where: str, quiet: pytest.LogCaptureFixture) -> None:
    rig = Rig(seqs=2, budget=16)
    running = [rig.add(PROMPT, 10, seed=1), rig.add(PROMPT[:5], 10, seed=2)]
    waiting = rig.add(PROMPT, 10, seed=3)
    for _ in range(3):
        rig.step()
    fault = RuntimeError("out of memory")
    setattr(rig.device, f"{where}_error", fault)
    rig.step()
    assert rig.device.resets == 1
    assert rig.cache.free == rig.cache.num_pages or waiting.status is Status.RUNNING
    for request in running:
        assert request.finish_reason == "error"
        last = rig.deltas[request.id][-1]
        assert last.error is not None
        assert "RuntimeError: out of memory" in last.error
        assert rig.output(request) == solo(request)[: request.num_output]
    rig.run()
    rig.expect_solo(waiting)
    assert waiting.cached_tokens == 0, "what was cached is lost"
    follower = rig.add(PROMPT, 10)
    rig.run()
    rig.expect_solo(follower)
    assert follower.cached_tokens == 12
    assert rig.loop.stats.faults == 1
    assert rig.loop.stats.finished == {"error": 2, "length": 2}
    assert "out of memory" in quiet.text


def test_a_fault_while_a_retracted_request_has_a_token_in_flight(quiet: pytest.LogCaptureFixture) -> None:
    rig = Rig(page_size=1, pages=12, seqs=2, budget=16)
    old, young = rig.add([1, 2, 3, 4], 8), rig.add([5, 6, 7], 8)
    plan = rig.loop.scheduler.plan
    known = -1

    def plan_then_fail(now: float) -> StepPlan | None:
        nonlocal known
        result = plan(now)
        if known < 0 and young.status is Status.WAITING and young.in_flight:
            known = young.num_output
            rig.device.collect_error = RuntimeError("lost")
        return result

    rig.loop.scheduler.plan = plan_then_fail  # pyright: ignore[reportAttributeAccessIssue]
    rig.run()
    assert known >= 0, "it was never caught with a token in flight"
    assert old.finish_reason == "error"
    rig.expect_solo(young)


def test_a_callback_may_abort_the_other_victims_of_a_fault(quiet: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    first, second = rig.request(PROMPT, 9, id="first"), rig.request(PROMPT, 9, id="second", seed=1)
    first.on_delta = lambda delta: rig.loop.abort("second") if delta.finish_reason else None
    rig.loop.add(first)
    rig.loop.add(second)
    rig.step()
    rig.device.submit_error = RuntimeError("lost")
    rig.run()
    assert (first.finish_reason, second.finish_reason) == ("error", "abort")


def test_faults_in_a_row_end_no_more_than_what_runs(quiet: pytest.LogCaptureFixture) -> None:
    rig = Rig(seqs=1)
    requests = [rig.add(PROMPT, 4, seed=n) for n in range(5)]
    for _ in range(3):
        rig.device.submit_error = RuntimeError("again")
        rig.step()
    rig.run()
    assert [r.finish_reason for r in requests] == ["error"] * 3 + ["length"] * 2
    rig.expect_solo(requests[-1])


def test_transfers_end_with_their_requests_in_a_fault(quiet: pytest.LogCaptureFixture) -> None:
    transfers = FakeTransfers()
    rig = Rig(transfers=transfers)
    rig.add(PROMPT, 4, id="a")
    rig.step()
    rig.device.collect_error = RuntimeError("lost")
    rig.run()
    assert transfers.ended == ["a"]
