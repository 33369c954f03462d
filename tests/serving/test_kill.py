"""kill -9 of a busy server at random moments: what it had acknowledged is there after the restart, and nothing is wrong."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.serve_process import ServeProcess
from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, SamplingParams
from tierax.cli import cache as cache_command

PAGE = 16
LAG_S = 2.0
"""What acknowledgement may lag the end of a conversation's turn; the disk keeps up here."""
ANSWER = 24
MODEL_FLAGS: dict[str, Any] = {
    "page_size": PAGE,
    "context_length": 512,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "device_cache_size": "2MiB",
    "host_cache_size": "4MiB",
}


@dataclass
class Turn:
    """One answer of a server."""

    prompt: list[int]
    answer: list[int]
    ended: float


@dataclass
class Client:
    """Talks to a server until it is gone: conversations of a few turns, of which some share a system prompt."""

    server: ServeProcess
    rng: random.Random
    turns: list[Turn] = field(default_factory=list)
    trouble: Exception | None = None
    """What went wrong although the server was there."""

    def run(self) -> None:
        try:
            while True:
                tokens = [] if self.rng.random() < 0.5 else system_prompt(self.rng.randrange(3))
                for _ in range(self.rng.randrange(1, 4)):
                    tokens = tokens + [self.rng.randrange(256) for _ in range(self.rng.randrange(5, 60))]
                    tokens = self._turn(tokens)
        except (OSError, http.client.HTTPException) as error:
            if not self.server.killed:
                self.trouble = error

    def _turn(self, prompt: list[int]) -> list[int]:
        said = ask(self.server, [prompt])[0][0]
        self.turns.append(Turn(prompt, said, time.monotonic()))
        return prompt + said


def system_prompt(name: int) -> list[int]:
    rng = random.Random(1000 + name)
    return [rng.randrange(256) for _ in range(100)]


def ask(server: ServeProcess, prompts: list[list[int]]) -> tuple[list[list[int]], dict]:
    """Greedy answers to prompts that arrive together, and the call's usage."""
    answer = server.post(
        "/v1/completions",
        prompt=prompts,
        max_tokens=ANSWER,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
        prefetch_policy="wait_complete",
    )
    return [choice["token_ids"] for choice in answer["choices"]], answer["usage"]


class Right:
    """The answers of an engine without a cache."""

    def __init__(self, model: Path, compiled: Path) -> None:
        options: dict[str, Any] = MODEL_FLAGS | {"host_cache_size": 0, "compile_cache_dir": str(compiled)}
        self._llm = LLM(str(model), disable_radix_cache=True, skip_warmup=True, **options)

    def check(self, turns: list[Turn]) -> None:
        """Asserts that every answer is the right one, up to the first place where two tokens are equally good."""
        options = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, logprobs=2)
        for turn, right in zip(
            turns, self._llm.generate([t.prompt for t in turns], options, use_tqdm=False), strict=True
        ):
            assert right.logprobs is not None
            for token, entry in zip(turn.answer, right.logprobs, strict=True):
                if token != entry.token_id:
                    (_, best), (_, second) = entry.top
                    assert best - second < 1e-3, f"{turn.answer} instead of {right.token_ids}"
                    break

    def close(self) -> None:
        self._llm.close()


@dataclass
class House:
    """A model, what is right, and a disk cache under servers that come and go."""

    model: Path
    compiled: Path
    disk: Path
    right: Right

    def serve(self) -> ServeProcess:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in MODEL_FLAGS.items()]
        return ServeProcess(
            self.model,
            *flags,
            f"--host-disk-cache-dir={self.disk}",
            f"--compile-cache-dir={self.compiled}",
            "--skip-warmup",
        )

    def verify(self) -> None:
        assert cache_command.run(["verify", str(self.disk)]) == 0


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    write_tiny_text_model(tmp_path / "model")
    right = Right(tmp_path / "model", tmp_path / "compiled")
    yield House(tmp_path / "model", tmp_path / "compiled", tmp_path / "disk", right)
    right.close()


def check_return(house: House, server: ServeProcess, known: list[Turn]) -> None:
    """A new turn of every conversation that was acknowledged hits all of it, to its last whole page."""
    checks = [Turn([*turn.prompt, *turn.answer, 7, 8, 9], [], 0.0) for turn in known]
    answers, usage = ask(server, [check.prompt for check in checks])
    details = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    # The KV of the last token of an answer is never computed. What two share is brought up by one of them.
    expected = sum((len(turn.prompt) + len(turn.answer) - 1) // PAGE * PAGE for turn in known)
    assert sum(details.values()) >= expected, f"{details} of {expected}"
    assert details["disk"] > 0
    for check, answer in zip(checks, answers, strict=True):
        check.answer = answer
    house.right.check(checks)


def be_busy_until_killed(house: House, server: ServeProcess, rng: random.Random) -> list[Turn]:
    """Returns some turns that must have been acknowledged."""
    clients = [Client(server, random.Random(rng.random())) for _ in range(3)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    while not any(client.turns for client in clients):
        assert not any(client.trouble for client in clients), clients
        time.sleep(0.01)
    time.sleep(LAG_S + rng.uniform(0.1, 1.0))
    killed = time.monotonic()
    server.kill()
    for thread in threads:
        thread.join()
    assert not any(client.trouble for client in clients), clients
    turns = [turn for client in clients for turn in client.turns]
    house.right.check(rng.sample(turns, min(len(turns), 8)))
    in_time = [turn for turn in turns if turn.ended < killed - LAG_S]
    assert in_time
    return rng.sample(in_time, min(len(in_time), 8))


def kill_and_return(house: House, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    known: list[Turn] = []
    for _ in range(kills):
        with house.serve() as server:
            if known:
                check_return(house, server, known)
            known = be_busy_until_killed(house, server, rng)
        house.verify()
    with house.serve() as server:
        check_return(house, server, known)
        assert server.stop() == 0
    house.verify()


def test_one_kill(house: House) -> None:
    kill_and_return(house, 1, seed=1)


@pytest.mark.slow
def test_twenty_kills(house: House) -> None:
    kill_and_return(house, 20, seed=2)
