"""An engine that starts on a directory finds what earlier ones left there: all of it, only what is its own, and unharmed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from helpers.tiny_models import tiny_tensors
from helpers.tiny_text_model import write_tiny_text_model
from tierax import LLM, Output, SamplingParams
from tierax.engine.request import Request

PAGE = 8
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
PROMPTS = [[random.Random(name).randrange(256) for _ in range(20 + 13 * name)] for name in range(6)]
LENGTHS = [len(prompt) for prompt in PROMPTS]
NEXT_WORDS = [7, 8, 9]


def whole(tokens: int) -> int:
    """How many of a prompt's tokens can be hits."""
    return (tokens - 1) // PAGE * PAGE


class Place:
    """A model, and a disk cache under engines that come and go."""

    def __init__(self, path: Path, compiled: Path) -> None:
        self.model = path / "model"
        self.disk = path / "disk"
        self._compiled = compiled
        write_tiny_text_model(self.model)

    def engine(self, model: Path | str | None = None, **options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "served_model_name": "the-same-for-all",
            "host_disk_cache_dir": str(self.disk),
            "page_size": PAGE,
            "context_length": 128,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 16,
            "device_cache_size": "1MiB",
            "host_cache_size": "2MiB",
            "prefetch_policy": "wait_complete",
            "skip_warmup": True,
            "compile_cache_dir": str(self._compiled),
        }
        return LLM(str(model or self.model), **defaults | options)

    def files(self) -> dict[str, tuple[int, int]]:
        """Size and time of change of every file."""
        return {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in self.disk.rglob("*")
            if path.is_file()
        }

    def pages(self) -> int:
        return sum(path.name.count(".") == 2 for path in self.disk.rglob("*"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def place(tmp_path: Path, compiled: Path) -> Place:
    return Place(tmp_path, compiled)


@pytest.fixture
def filled(place: Place) -> tuple[Place, list[Output]]:
    """With the answers to all prompts in its disk cache, and the answers."""
    with place.engine() as llm:
        answers = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [answer.cached_tokens for answer in answers] == [0] * 6
    return place, answers


def by_tier(answers: list[Output], tier: str) -> list[int]:
    return [answer.cached_by_tier[tier] for answer in answers]


def test_all_that_was_written_is_hit_to_the_last_whole_page(filled: tuple[Place, list[Output]]) -> None:
    place, before = filled
    # The KV of an answer's last token is never computed.
    assert place.pages() == sum((length + 9 - 1) // PAGE for length in LENGTHS)
    write_tiny_text_model(place.model.parent / "copy")
    with place.engine(place.model.parent / "copy", served_model_name="another name") as llm:
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert by_tier(again, "disk") == [whole(length) for length in LENGTHS], "the same model elsewhere"
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in before]
    turns = [prompt + answer.token_ids + NEXT_WORDS for prompt, answer in zip(PROMPTS, before, strict=True)]
    with place.engine() as llm:
        found = llm.generate(turns, GREEDY, use_tqdm=False)
    assert by_tier(found, "disk") == [(length + 9 - 1) // PAGE * PAGE for length in LENGTHS]
    with place.engine(disable_radix_cache=True, host_cache_size=0) as llm:
        cold = llm.generate(turns, GREEDY, use_tqdm=False)
    assert [answer.cached_tokens for answer in cold] == [0] * 6
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in cold]


def other_weights(place: Place, model: Path) -> None:
    config = json.loads((place.model / "config.json").read_text())
    save_file(tiny_tensors(config, seed=1), model / "model.safetensors", metadata={"format": "pt"})


def other_rope(place: Place, model: Path) -> None:
    config = json.loads((place.model / "config.json").read_text())
    config["rope_scaling"]["factor"] = 4.0
    (model / "config.json").write_text(json.dumps(config))


def test_what_would_make_other_pages_shares_nothing(
    filled: tuple[Place, list[Output]], tmp_path: Path
) -> None:
    place, before = filled
    variants: list[tuple[Any, dict[str, Any]]] = [
        (other_weights, {}),
        (other_rope, {}),
        (None, {"page_size": 16}),
        (None, {"kv_cache_dtype": "fp8"}),
    ]
    for number, (change, options) in enumerate(variants):
        model = tmp_path / str(number)
        write_tiny_text_model(model)
        if change is not None:
            change(place, model)
        with place.engine(model, **options) as llm:
            answer = llm.generate(PROMPTS[4], GREEDY, use_tqdm=False)[0]
            assert answer.cached_tokens == 0, variants[number]
            assert llm.generate(PROMPTS[4], GREEDY, use_tqdm=False)[0].cached_tokens > 0, "a cache it has"
    with place.engine() as llm:
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert by_tier(again, "disk") == [whole(length) for length in LENGTHS], "what was there before is there"
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in before]


def serve(llm: LLM, prompt: list[int], salt: bytes, name: str) -> Request:
    """One request of a tenant, through the engine's own loop."""
    engine = llm.engine
    (request,) = engine.make_requests(prompt, GREEDY, request_id=name, namespace=salt)
    engine.loop.add(request)
    while not engine.loop.idle:
        engine.loop.step()
    assert request.finish_reason == "length"
    return request


def test_tenants_share_nothing_across_a_restart(place: Place) -> None:
    prompt = PROMPTS[3]
    with place.engine() as llm:
        found = [
            serve(llm, prompt, salt, f"a{n}").cached_tokens for n, salt in enumerate([b"s1", b"s1", b"s2"])
        ]
    assert found == [0, whole(len(prompt)), 0], "the second is the control: sharing does work"
    with place.engine() as llm:
        requests = [
            serve(llm, prompt, salt, f"b{n}") for n, salt in enumerate([b"s3", b"", b"s1", b"s2", b"s"])
        ]
    hits = whole(len(prompt))
    assert [request.cached_by_tier["disk"] for request in requests] == [0, 0, hits, hits, 0]
    assert [request.cached_tokens for request in requests] == [0, 0, hits, hits, 0]
    assert len({tuple(request.tokens) for request in requests}) == 1


def test_a_read_only_directory_is_used_and_left_as_it_is(filled: tuple[Place, list[Output]]) -> None:
    place, before = filled
    files = place.files()
    with place.engine(disk_cache_read_only=True) as llm:
        again = llm.generate([*PROMPTS, [1] * 60], GREEDY, use_tqdm=False)
    assert by_tier(again, "disk") == [*(whole(length) for length in LENGTHS), 0]
    assert [answer.token_ids for answer in again[:6]] == [answer.token_ids for answer in before]
    assert place.files() == files


def test_read_only_and_a_page_is_gone(filled: tuple[Place, list[Output]]) -> None:
    """What its owner has deleted is missed once, and then not asked for again."""
    place, before = filled
    with place.engine(disk_cache_read_only=True) as llm:
        for path in place.disk.rglob("*.*.2"):
            path.unlink()
        for _ in range(2):
            again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [answer.token_ids for answer in again] == [answer.token_ids for answer in before]
            assert all(tokens <= 2 * PAGE for tokens in by_tier(again, "disk"))
            llm.engine.cache.clear()
        tiers = llm.engine.tiers
        assert tiers is not None
        failed = tiers.transfers.prefetcher.stats.failed_pages
        assert failed == {"missing": sum(length > 3 * PAGE for length in LENGTHS)}


def test_two_engines_at_once_on_one_directory(place: Place) -> None:
    with place.engine(disable_radix_cache=True, host_cache_size=0) as llm:
        right = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    with place.engine(disk_cache_size="60KiB") as one, place.engine(disk_cache_size="400KiB") as two:
        for turn in range(3):
            for llm in (one, two):
                chosen = [(turn * 2 + n) % 6 for n in range(4)]
                answers = llm.generate([PROMPTS[n] for n in chosen], GREEDY, use_tqdm=False)
                assert [answer.token_ids for answer in answers] == [right[n] for n in chosen]
                llm.engine.cache.clear()
    with place.engine() as llm:
        answers = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [answer.token_ids for answer in answers] == right
        assert sum(by_tier(answers, "disk")) > 0


@pytest.mark.slow
def test_the_demo_model_after_a_restart(place: Place) -> None:
    prompts = [[random.Random(name).randrange(40_000) for _ in range(100 + 60 * name)] for name in range(4)]
    options: dict[str, Any] = {
        "page_size": 16,
        "context_length": 1024,
        "max_num_batched_tokens": 128,
        "device_cache_size": "128MiB",
        "host_cache_size": "256MiB",
    }
    with place.engine("demo", **options) as llm:
        before = llm.generate(prompts, GREEDY, use_tqdm=False)
    with place.engine("demo", **options) as llm:
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert by_tier(again, "disk") == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in before]
    with place.engine("demo", **options | {"kv_cache_dtype": "fp8"}) as llm:
        assert llm.generate(prompts[0], GREEDY, use_tqdm=False)[0].cached_tokens == 0
