"""`tierax chat`: turns, commands and reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.chat_session import Scripted, converse
from tierax.cli.chat_backends import ChatError, Message, Turn

SRC = Path(__file__).resolve().parents[1] / "src"


def test_a_conversation_grows_and_every_turn_reports() -> None:
    backend = Scripted()
    code, out, err = converse(backend, "Hi", "", "and \\", "more", "/exit", "never")
    assert (code, out) == (0, "got 1\ngot 3\n")
    assert backend.asked[1] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "got 1"},
        {"role": "user", "content": "and \nmore"},
    ]
    line = (
        "[250 ms to the first token, 10.0 tok/s, 5 tokens; 24 of 40 prompt tokens cached (device 8, host 16)]"
    )
    assert err.splitlines() == [line, line]


def test_commands(tmp_path: Path) -> None:
    backend = Scripted()
    file = tmp_path / "talk.json"
    code, out, err = converse(
        *(backend, "/system Be brief.", "Hi", f"/save {file}", "/reset", "Again", "/stats", f"/load {file}"),
        *("More", "/system", "//slash", "/help"),
    )
    assert code == 0
    assert out == "got 2\ngot 2\ngot 4\ngot 1\n"
    assert [message["role"] for message in backend.asked[2]] == ["system", "user", "assistant", "user"]
    assert backend.asked[2][0]["content"] == "Be brief."
    assert backend.asked[3] == [{"role": "user", "content": "/slash"}]
    saved = json.loads(file.read_text())
    assert saved["model"] == "scripted"
    assert [message["content"] for message in saved["messages"]] == ["Be brief.", "Hi", "got 2"]
    assert f"[3 messages written to {file}]" in err
    assert (
        "[2 turns, 250 ms to the first token; 80 prompt tokens, 48 of them from the cache (60%)"
        " (device 16, host 32); 10 tokens of answers]"
    ) in err
    assert "/load    FILE: go on with a conversation that was saved" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rest", "no command /rest; did you mean /reset?"),
        ("/xyzzy", "no command /xyzzy; /help lists them"),
        ("/save", "/save FILE: which file?"),
        ("/save none/there.json", "none/there.json: No such file or directory"),
        ("/load none.json", "none.json: No such file or directory"),
        ("/load bad.json", "bad.json holds no conversation that /save wrote"),
        ("/load odd.json", "odd.json holds no conversation that /save wrote"),
    ],
)
def test_wrong_commands_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_bytes(b"\xff{")
    Path("odd.json").write_text('{"messages": [{"role": "user", "content": [1]}]}')
    code, out, err = converse(Scripted(), "Hi", line, "More")
    assert (code, out) == (1, "got 1\ngot 3\n")
    assert f"[error: {message}]" in err


def test_a_turn_that_fails_leaves_the_conversation_as_it_was() -> None:
    class Failing(Scripted):
        def answer(self, messages: Sequence[Message], turn: Turn) -> None:
            if len(self.asked) == 1:
                self.asked.append([])
                raise ChatError("the server is full")
            super().answer(messages, turn)

    backend = Failing()
    code, out, err = converse(backend, "Hi", "lost", "More")
    assert (code, out) == (1, "got 1\ngot 3\n")
    assert "[error: the server is full]" in err
    assert [message["content"] for message in backend.asked[2]] == ["Hi", "got 1", "More"]


def test_a_stopped_answer_stays_said() -> None:
    backend = Scripted()
    backend.fail = KeyboardInterrupt()
    code, out, err = converse(backend, "Hi", "More")
    assert (code, out) == (0, "got\ngot\n")
    assert err.count("[stopped]\n[250 ms to the first token") == 2
    assert backend.asked[1][1] == {"role": "assistant", "content": "got"}
