"""The offline face as an object: settings, progress, Ctrl-C, threads, faults, its disk, its end."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from helpers.offline_llm import GREEDY, OPTIONS, numbers
from tierax import LLM, ConfigError, EngineConfig, SamplingParams
from tierax.engine.validate import ParameterError

A_TO_Z = "abcdefghijklmnopqrstuvwxyz"


def test_engine_config_or_keywords(model: Path) -> None:
    config = EngineConfig(model_path=str(model), **OPTIONS)
    with LLM(config) as llm:
        assert llm.engine.config is config
    with pytest.raises(TypeError, match="page_size"):
        LLM(config, page_size=4)
    with pytest.raises(ConfigError, match="did you mean page_size"):
        LLM(model, pagesize=4)


def test_closed(model: Path) -> None:
    llm = LLM(model, **OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(["a"])


class Bar(tqdm):
    """Writes into `text` instead of stderr."""

    text = io.StringIO()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, file=Bar.text, mininterval=0, ncols=120)


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "the bar shows this"
    llm.generate([prompt, "", prompt], GREEDY, use_tqdm=Bar)
    last = Bar.text.getvalue().split("\r")[-1]
    assert "3/3" in last
    assert "tok/s" in last
    assert f"{16 / 36:.0%} cached" in last
    llm.generate([prompt], GREEDY)
    assert capsys.readouterr().err == "", "stderr is no terminal here"


@pytest.fixture
def python_interrupts() -> Iterator[None]:
    """Ctrl-C does what it does in a terminal: a process in the background of a shell starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupts")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_leaves_an_engine_that_works(llm: LLM, presses: int) -> None:
    class Ring(tqdm):
        """Presses Ctrl-C when it is first refreshed."""

        left = presses

        def update(self, n: float | None = 1) -> bool | None:
            while Ring.left:
                Ring.left -= 1
                os.kill(os.getpid(), signal.SIGINT)
            return super().update(n)

    (before,) = llm.generate(["interrupt"], GREEDY)
    endless = SamplingParams(max_tokens=100, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([f"interrupt {i}" for i in range(20)], endless, use_tqdm=Ring)
    loop = llm.engine.loop
    assert loop.idle
    loop.scheduler.check()
    assert llm.engine.cache.in_use == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (after,) = llm.generate(["interrupt"], GREEDY)
    assert numbers(after) == numbers(before)


def test_a_failing_device_is_an_error_of_the_items_it_hit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "collect", lambda: (_ for _ in ()).throw(MemoryError("all gone")))
        outputs = llm.generate(["a", "b"], GREEDY)
    assert ["MemoryError: all gone" in (output.error or "") for output in outputs] == [True, True]
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert llm.generate(["a"], GREEDY)[0].error is None


def test_threads_take_turns(llm: LLM) -> None:
    expected = [numbers(output) for output in llm.generate(list("abc"), GREEDY)]
    results: list[Any] = [None] * 4

    def work(i: int) -> None:
        results[i] = [numbers(output) for output in llm.generate(list("abc"), GREEDY)]

    threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_a_disk_keeps_what_a_script_computed(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = OPTIONS | {
        "host_cache_size": "4MiB",
        "host_disk_cache_dir": str(tmp_path / "kv"),
    }
    prompt = A_TO_Z * 2
    with LLM(model, **options) as first:
        cold = first.generate(prompt, GREEDY, prefetch_policy="wait_complete")[0]
        warm = first.generate(prompt, GREEDY)[0]
    assert cold.cached_by_tier == {"device": 0, "host": 0, "disk": 0}
    assert warm.cached_by_tier == {"device": 48, "host": 0, "disk": 0}
    with LLM(model, **options) as second:
        again = second.generate(prompt, GREEDY, prefetch_policy="wait_complete")[0]
        assert again.cached_by_tier == {"device": 0, "host": 0, "disk": 48}
        assert again.cached_tokens == 48
    assert numbers(again) == numbers(cold)


def test_a_bad_prefetch_policy(llm: LLM) -> None:
    for call in (llm.generate, llm.chat):
        with pytest.raises(ParameterError, match="prefetch_policy: 'soon' must be best_effort"):
            call([], prefetch_policy="soon")


def test_a_stalled_disk_does_not_keep_the_outputs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierax.engine.offline.DRAIN_TIMEOUT", 0.2)
    monkeypatch.setattr(type(llm.engine.loop._transfers), "busy", True)
    started = time.monotonic()
    assert len(llm.generate("abc", GREEDY)[0].token_ids) == 8
    assert time.monotonic() - started < 5
