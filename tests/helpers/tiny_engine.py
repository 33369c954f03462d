"""The real executor on a tiny random model, without tokenizer or config: few programs, many pools over them."""

from __future__ import annotations

import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from helpers.fake_executor import ManualClock
from helpers.tiny_models import write_tiny_checkpoint
from helpers.tiny_tiers import TinyTiers
from tierax.cache.device_pool import DevicePool
from tierax.cache.manager import CacheManager
from tierax.engine.constraint import Matcher
from tierax.engine.jax_executor import JaxExecutor
from tierax.engine.loop import EngineLoop
from tierax.engine.plan import Limits
from tierax.engine.platform import device_target
from tierax.engine.reading import Reading
from tierax.engine.request import Delta, Request, SamplingParams
from tierax.engine.schedule_policy import FCFS, SchedulePolicy
from tierax.engine.step import StepFunctions, StepShapes
from tierax.engine.step_device import StepDevice
from tierax.models.source import resolve_model
from tierax.models.transformer import Decoder, Params, attention_shape
from tierax.models.weights.loader import load_params
from tierax.pallas_kernels import attention
from tierax.pallas_kernels.pages import PoolShape


class TinyModel:
    """Parameters and structure of one of `TINY_MODELS`, in f32."""

    def __init__(self, family: str = "llama3", *, stacked: bool = False, quantization: str = "none") -> None:
        """quantization: as `load_params` calls it."""
        with tempfile.TemporaryDirectory() as directory:
            write_tiny_checkpoint(directory, family)
            source = resolve_model(directory)
            self.config = source.config
            self.params: Params = load_params(
                source, source.config, stacked=stacked, quantization=quantization
            )
        shape = attention_shape(self.config, 16, "f32", "f32")
        self.decoder = Decoder(self.config, jnp.dtype(jnp.float32), attention.select(device_target(), shape))


class TinyDevice:
    """An executor with a pool of its own. Loops are made over it one after the other, each with a fresh cache."""

    def __init__(
        self,
        model: TinyModel,
        page_size: int,
        *,
        tokens_in_pool: int = 512,
        seqs: int = 4,
        budget: int = 16,
        context: int = 128,
        coarse: bool = False,
        functions: Callable[[Decoder, StepShapes], StepFunctions] = StepFunctions,
        kv_fp8: bool = False,
    ) -> None:
        """`coarse` pads to two token buckets and one row bucket, for tests that run much and compile little.

        Devices that differ in their pages only may have the same functions: what can be shared is compiled once.
        """
        config = model.config
        self.model = model
        self.page_size = page_size
        self.limits = Limits(seqs, budget)
        self.context = context
        self.pages = tokens_in_pool // page_size
        shape = PoolShape(self.pages, config.num_layers, page_size, config.num_kv_heads, config.head_dim)
        shape = shape._replace(quantized=kv_fp8)
        self.pool = DevicePool(shape, jnp.dtype(jnp.uint8 if kv_fp8 else jnp.float32))
        shapes = StepShapes(seqs, budget, -(-context // page_size), page_size, self.pages)
        if coarse:
            shapes.token_buckets, shapes.row_buckets = (seqs, budget), (seqs,)
        step_device = StepDevice(
            model.params,
            self.pool,
            functions(model.decoder, shapes),
            num_slots=seqs,
            vocab_size=config.vocab_size,
        )
        self.executor = JaxExecutor(step_device, shapes)

    def run(self, *, pages: int | None = None, **options: object) -> Run:
        """A new loop with an empty cache of `pages` pages (all of the pool's by default)."""
        return Run(self, pages or self.pages, **options)  # pyright: ignore[reportArgumentType]


class Run:
    """One loop and its requests; `check()` holds after every step."""

    def __init__(
        self,
        device: TinyDevice,
        pages: int,
        *,
        enabled: bool = True,
        seqs: int | None = None,
        budget: int | None = None,
        policy: SchedulePolicy | None = None,
        host_pages: int = 0,
        write_policy: str = "write_through",
        **tiers: Any,
    ) -> None:
        """`tiers` are options of `TinyTiers`, which exist when there are host pages; `close` ends their threads."""
        self.cache = CacheManager(
            pages, device.page_size, enabled=enabled, host_pages=host_pages, write_policy=write_policy
        )
        self.clock = ManualClock()
        self.tiers = TinyTiers(self.cache, device.pool, self.clock, **tiers) if host_pages else None
        limits = Limits(seqs or device.limits.max_num_seqs, budget or device.limits.max_num_batched_tokens)
        self.loop = EngineLoop(
            self.cache,
            device.executor,
            limits,
            policy or FCFS(),
            clock=self.clock,
            transfers=self.tiers.transfers if self.tiers else None,
        )
        self.deltas: dict[str, list[Delta]] = {}
        self._most = min(device.context, self.cache.capacity_tokens)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        namespace: bytes = b"",
        reading: Reading | None = None,
        matcher: Matcher | None = None,
    ) -> Request:
        params = params or SamplingParams(max_tokens=8, temperature=0.0)
        name = f"r{len(self.deltas)}"
        deltas = self.deltas[name] = []
        request = Request(
            id=name,
            tokens=array("i", prompt),
            num_prompt=len(prompt),
            params=params,
            seed=seed,
            stop_ids=frozenset(stop_ids),
            max_total=min(len(prompt) + params.max_tokens, self._most),
            namespace=namespace,
            reading=reading,
            matcher=matcher,
            on_delta=deltas.append,
        )
        self.loop.add(request)
        return request

    def step(self) -> None:
        if not self.loop.step() and self.tiers:
            # The threads that copy need time of the world's own.
            time.sleep(0.0005)
        self.clock.advance(0.01)
        self.loop.scheduler.check()

    def close(self) -> None:
        """Ends the threads of the tiers."""
        if self.tiers:
            self.tiers.close()

    def finish(self, most_steps: int = 20_000) -> None:
        """Steps until nothing is left to do, and checks that nothing is held then."""
        for _ in range(most_steps):
            if self.loop.idle:
                self.cache.check()
                assert self.cache.in_use == self.cache.host.in_use == 0
                return
            self.step()
        raise AssertionError(f"not idle after {most_steps} steps: {self.loop.request_ids}")


def output(request: Request) -> list[int]:
    """The generated tokens."""
    return list(request.tokens[request.num_prompt :])
