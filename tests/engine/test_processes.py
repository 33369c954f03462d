"""Several processes run one model as one, and none of them outlives another that was lost."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers.split_engine import Place, answers
from helpers.split_team import Team
from tierax.engine.channel import ChannelError, Connection, accept, connect, listen
from tierax.engine.leader import LOST_EXIT_CODE


def socket_pair() -> tuple[socket.socket, socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        theirs = connect("127.0.0.1", listener.getsockname()[1], 5)
        return accept(listener, 5), theirs


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection, list[str]]]:
    """Both ends of a connection, and what they say of losses."""
    lost: list[str] = []
    ours, theirs = socket_pair()
    here, there = Connection(ours, "there", lost.append), Connection(theirs, "here", lost.append)
    yield here, there, lost
    here.close()
    there.close()


def test_messages_arrive_in_order_and_whole(ends: tuple[Connection, Connection, list[str]]) -> None:
    here, there, lost = ends
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    here.send("forward", table, 7, None)
    here.send("update", ("set_bias", (np.int32(3), np.array([-np.inf], np.float32), np.bool_(True))))
    name, received, tokens, nothing = there.receive(5)
    assert (name, tokens, nothing) == ("forward", 7, None)
    np.testing.assert_array_equal(received, table)
    assert received.dtype == np.int32
    _, (_, (slot, values, flag)) = there.receive(5)
    assert (int(slot), slot.dtype, float(values[0]), flag.dtype) == (3, np.int32, -np.inf, np.bool_)
    there.send("long", np.zeros(3_000_000, np.uint8))
    assert here.receive(5)[1].nbytes == 3_000_000
    assert not lost


def test_an_end_that_closes_is_a_loss_to_the_other_and_a_farewell_is_none() -> None:
    lost: list[str] = []
    for farewell in (False, True):
        ours, theirs = socket_pair()
        here, there = Connection(ours, "there", lost.append), Connection(theirs, "here", lost.append)
        if farewell:
            finishing = threading.Thread(target=here.finish, args=("end",))
            finishing.start()
            assert there.receive(5) == ["end"]
            there.close()
            finishing.join(10)
            assert not finishing.is_alive()
        else:
            there.close()
            with pytest.raises(ChannelError, match="there is gone"):
                here.receive(5)
            assert lost == ["there has ended"]
            lost.clear()
        here.close()
    assert not lost


def test_who_does_not_come_or_answer_is_told_of() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ChannelError, match="no other process has come"):
            accept(listener, 0.05)
        with pytest.raises(ChannelError, match=f"127.0.0.1:{port} cannot be listened on"):
            listen("127.0.0.1", port)
    with pytest.raises(ChannelError, match=f"127.0.0.1:{port} does not answer"):
        connect("127.0.0.1", port, 0.05)


def test_a_stranger_is_no_process_of_ours() -> None:
    lost = threading.Event()
    said: list[str] = []
    ours, theirs = socket_pair()

    def hear(reason: str) -> None:
        said.append(reason)
        lost.set()

    connection = Connection(ours, "there", hear)
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert lost.wait(5)
    assert "this is no process of tierax" in said[0]
    theirs.close()
    connection.close()


@pytest.mark.slow
def test_two_processes_answer_as_one(tmp_path: Path) -> None:
    with Place(tmp_path, "llama-bias", "f32").engine(1, disk=False) as llm:
        expected = answers(llm, sampled=True)
    team = Team(tmp_path, "once")
    try:
        found = team.answers()
        for name in ("greedy", "again", "sampled"):
            assert found[name] == expected[name]
        assert found["scores"] == pytest.approx(expected["scores"], abs=1e-3)
        assert found["evicted"] > 0
        # Each process has kept its half of every page.
        assert sum(tiers["host"] for tiers in found["by_tier_again"]) > 0
        assert found["page_bytes"] * 2 == expected["page_bytes"]
        assert [process.wait(60) for process in team.processes] == [0, 0]
    finally:
        team.close()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_ends_the_other(tmp_path: Path, killed: int) -> None:
    team = Team(tmp_path, "forever")
    try:
        team.answers()
        team.processes[killed].send_signal(signal.SIGKILL)
        started = time.monotonic()
        other = team.processes[1 - killed]
        # Whichever notices first: our channel, or jax's own watch, which aborts.
        assert other.wait(30) in (LOST_EXIT_CODE, -signal.SIGABRT)
        assert time.monotonic() - started < 30
        _, errors = other.communicate()
        assert "so this process ends too" in errors or "another task died" in errors
    finally:
        team.close()
