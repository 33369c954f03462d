"""Two servers over one store: conversations move between them, both write at once, and one is killed at it."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.serve_process import ServeProcess
from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, SamplingParams
from tierax.cli import cache as cache_command

PAGE = 16
ANSWER = 24
LAG_S = 1.0
"""Between the end of a turn and the next one elsewhere."""
FLAGS: dict[str, Any] = {
    "page_size": PAGE,
    "context_length": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "device_cache_size": "4MiB",
    "host_cache_size": "8MiB",
}


@dataclass
class Turn:
    prompt: list[int]
    answer: list[int]

    @property
    def next(self) -> list[int]:
        """What the user says then."""
        return [*self.prompt, *self.answer, 7, 8, 9]

    @property
    def stored(self) -> int:
        """Tokens of it in whole pages; the KV of an answer's last token is never computed."""
        return (len(self.prompt) + len(self.answer) - 1) // PAGE * PAGE


@dataclass
class House:
    model: Path
    compiled: Path
    url: str
    right: LLM

    def serve(self, *more: str) -> ServeProcess:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
        return ServeProcess(
            self.model,
            *flags,
            f"--host-disk-cache-dir={self.url}",
            "--disk-cache-shared",
            "--disk-cache-lease=6",
            f"--compile-cache-dir={self.compiled}",
            "--skip-warmup",
            *more,
        )

    def check(self, turns: list[Turn]) -> None:
        """Asserts that every answer is that of an engine without a cache, up to where two tokens are equally good."""
        options = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, logprobs=2)
        answers = self.right.generate([turn.prompt for turn in turns], options, use_tqdm=False)
        for turn, right in zip(turns, answers, strict=True):
            assert right.logprobs is not None
            for token, entry in zip(turn.answer, right.logprobs, strict=True):
                if token != entry.token_id:
                    assert entry.top[0][1] - entry.top[1][1] < 1e-3, f"{turn.answer}, not {right.token_ids}"
                    break

    def stat(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        capsys.readouterr()
        assert cache_command.run(["stat", self.url, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def verify(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        capsys.readouterr()
        assert cache_command.run(["verify", self.url, "--json"]) == 0
        return json.loads(capsys.readouterr().out)


@pytest.fixture(params=["directory", "s3"])
def house(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    write_tiny_text_model(tmp_path / "model")
    with ExitStack() as stack:
        if request.param == "directory":
            url = str(tmp_path / "kv")
        else:
            url = bucket(stack, monkeypatch)
        options = FLAGS | {"host_cache_size": 0, "compile_cache_dir": str(tmp_path / "compiled")}
        right = LLM(str(tmp_path / "model"), disable_radix_cache=True, skip_warmup=True, **options)
        stack.callback(right.close)
        yield House(tmp_path / "model", tmp_path / "compiled", url, right)


def bucket(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> str:
    """An S3 server in this process; the spec of a store in a bucket of it."""
    moto_server = pytest.importorskip("moto.server", reason="moto, which stands for S3, is not installed")
    boto3 = pytest.importorskip("boto3")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    stack.callback(server.stop)
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="pages")
    spec = {"driver": "s3", "bucket": "pages", "path": "kv/", "endpoint": endpoint, "aws_region": "us-east-1"}
    return json.dumps(spec)


def ask(server: ServeProcess, prompt: list[int]) -> tuple[Turn, dict[str, int]]:
    """A greedy answer, and where its prefix came from."""
    answer = server.post(
        "/v1/completions",
        prompt=prompt,
        max_tokens=ANSWER,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
        prefetch_policy="wait_complete",
    )
    turn = Turn(prompt, answer["choices"][0]["token_ids"])
    return turn, answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]


def new_prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(rng.randrange(60, 140))]


def ask_all(jobs: list[tuple[ServeProcess, list[int]]]) -> list[tuple[Turn, dict[str, int]]]:
    """All at once."""
    answers: list[Any] = [None] * len(jobs)

    def run(at: int, server: ServeProcess, prompt: list[int]) -> None:
        answers[at] = ask(server, prompt)

    threads = [threading.Thread(target=run, args=(at, *job)) for at, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers), "some got no answer"
    return answers


@pytest.mark.slow
def test_two_servers_over_one_store(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    with house.serve() as first, house.serve() as second:
        # A conversation that begins at one goes on at the other, and back.
        turns = []
        prompt, stored = new_prompt(0), 0
        for server in (first, second, first, second):
            turn, tiers = ask(server, prompt)
            assert sum(tiers.values()) == stored
            if server is second and len(turns) == 1:
                assert tiers == {"device": 0, "host": 0, "disk": stored}
            turns.append(turn)
            prompt, stored = turn.next, turn.stored
            time.sleep(LAG_S)
        house.check(turns)

        # Both write at once, the same pages among others; nothing is lost.
        prompts = [new_prompt(1 + at // 2) for at in range(12)]
        began = [turn for turn, _ in ask_all([((first, second)[at % 2], p) for at, p in enumerate(prompts)])]
        time.sleep(2 * LAG_S)
        went_on = ask_all([((second, first)[at % 2], turn.next) for at, turn in enumerate(began)])
        for turn, (_, tiers) in zip(began, went_on, strict=True):
            assert sum(tiers.values()) == turn.stored
        house.check([*began, *(turn for turn, _ in went_on)])
        assert house.verify(capsys)["bad"] == []

        # One is killed while it writes; the other one goes on, with what the dead one had stored.
        last = [turn for turn, _ in ask_all([(second, new_prompt(100 + at)) for at in range(4)])]
        busy = threading.Thread(target=answer_until_killed, args=(second,))
        busy.start()
        time.sleep(LAG_S)
        second.kill()
        busy.join()
        for turn in last:
            after, tiers = ask(first, turn.next)
            assert tiers["disk"] == turn.stored
            house.check([after])
        found = house.verify(capsys)
        assert found["bad"] == []
        assert found["pages"] > 100

        # Whoever comes new finds it all; the dead one is not counted for longer than a lease.
        with house.serve() as third:
            _, tiers = ask(third, turns[-1].next)
            assert tiers["disk"] == turns[-1].stored
            time.sleep(8)
            assert len(house.stat(capsys)["replicas"]) == 2
            assert third.stop() == 0
        assert first.stop() == 0
    assert house.verify(capsys)["bad"] == []


@pytest.mark.slow
@pytest.mark.parametrize("house", ["directory"], indirect=True)
def test_two_servers_stay_within_the_size_together(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    page_bytes, pages = 12288, 60
    flags = (f"--disk-cache-size={pages * page_bytes}", "--disk-cache-lease=2", "--disk-free-space=0")
    favourite = new_prompt(0)
    with house.serve(*flags) as first, house.serve(*flags) as second:
        most, seed = 0, 1
        both = [server.metrics() for server in (first, second)]
        while sum(found["tierax_disk_cache_deleted_pages_total"] for found in both) < pages:
            seed += 1
            assert seed < 200, "too little is deleted"
            turns = ask_all([(first, new_prompt(2 * seed)), (second, new_prompt(2 * seed + 1))])
            house.check([turn for turn, _ in turns])
            ask(second, favourite)
            time.sleep(0.3)
            stat = house.stat(capsys)
            assert stat["bytes"] == page_bytes * stat["pages"]
            most = max(most, stat["pages"])
            both = [server.metrics() for server in (first, second)]
        # What either had written before it heard of the other one.
        assert pages * 0.7 < most <= pages + 20
        assert sum(found["tierax_disk_cache_collects"] for found in both) == 1
        # What was used all the time was never deleted: a server that has not seen it yet finds it.
        with house.serve(*flags) as third:
            _, tiers = ask(third, favourite)
            assert tiers["disk"] == (len(favourite) - 1) // PAGE * PAGE
    assert house.verify(capsys)["bad"] == []


def answer_until_killed(server: ServeProcess) -> None:
    seed = 1000
    try:
        while True:
            seed += 1
            ask(server, new_prompt(seed))
    except (OSError, ValueError):
        assert server.killed
    except Exception:
        # A connection that breaks in the middle of an answer.
        assert server.killed
