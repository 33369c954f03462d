"""The command line: every spelling fills its setting, and every mistake is one line and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.cli_calls import fake_module, mistake
from tierax import __version__
from tierax.cli.main import COMMANDS, main
from tierax.cli.options import ENGINE_OPTIONS
from tierax.cli.options_of_server import SERVER_OPTIONS
from tierax.cli.options_of_tiers import TIER_OPTIONS
from tierax.engine.config import ConfigError, EngineConfig
from tierax.engine.validate import ParameterError
from tierax.models.errors import ModelError
from tierax.serving.config import ServerConfig

SRC = Path(__file__).resolve().parents[1] / "src"


@dataclass
class Started:
    """What `tierax serve` would have started."""

    config: EngineConfig
    server: ServerConfig


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    """Runs `tierax serve ARGS…` up to the point where the server would start."""
    started: list[Started] = []

    def run(config: EngineConfig, server: ServerConfig) -> int:
        started.append(Started(config, server))
        return 0

    monkeypatch.setitem(sys.modules, "tierax.serving.server", fake_module(run=run))

    def call(*args: str) -> Started:
        assert main(["serve", *args]) == 0
        return started.pop()

    return call


def test_serve_without_flags_is_the_demo_on_port_30000(serve: Callable[..., Started]) -> None:
    started = serve()
    assert started.config == EngineConfig(model_path="demo")
    assert started.server == ServerConfig()
    assert (started.server.host, started.server.port) == ("127.0.0.1", 30000)


ALIASES = [
    (["--model-path", "m"], {"model_path": "m"}),
    (["--model", "m"], {"model_path": "m"}),
    (["m"], {"model_path": "m"}),
    (["--served-model-name", "n"], {"served_model_name": "n"}),
    (["--dtype", "bf16"], {"dtype": "bf16"}),
    (["--dtype", "float32"], {"dtype": "f32"}),
    (["--quantization", "int8"], {"quantization": "int8"}),
    (["--kv-cache-dtype", "auto"], {"kv_cache_dtype": "auto"}),
    (["--kv-cache-dtype", "bfloat16"], {"kv_cache_dtype": "bf16"}),
    (["--kv-cache-dtype", "fp8_e4m3"], {"kv_cache_dtype": "fp8"}),
    (["--page-size", "4"], {"page_size": 4}),
    (["--block-size", "4"], {"page_size": 4}),
    (["--device-cache-size", "2GiB"], {"device_cache_size": "2GiB"}),
    (["--device-cache-size", "40%"], {"device_cache_size": "40%"}),
    (["--mem-fraction-static", "0.4"], {"device_cache_size": "40%"}),
    (["--gpu-memory-utilization", "0.875"], {"device_cache_size": "87.5%"}),
    (["--max-num-seqs", "256"], {"max_num_seqs": 256}),
    (["--max-running-requests", "256"], {"max_num_seqs": 256}),
    (["--max-num-batched-tokens", "512"], {"max_num_batched_tokens": 512}),
    (["--chunked-prefill-size", "512"], {"max_num_batched_tokens": 512}),
    (["--shared-step-tokens", "64"], {"shared_step_tokens": 64}),
    (["--context-length", "1024"], {"context_length": 1024}),
    (["--max-model-len", "1024"], {"context_length": 1024}),
    (["--attention-backend", "xla"], {"attention_backend": "xla"}),
    (["--schedule-policy", "lpm"], {"schedule_policy": "lpm"}),
    (["--schedule-policy", "priority"], {"schedule_policy": "fcfs"}),
    (["--scheduling-policy", "priority"], {"schedule_policy": "fcfs"}),
    (["--eviction-policy", "mine.policies:Mine"], {"eviction_policy": "mine.policies:Mine"}),
    (["--radix-eviction-policy", "lru"], {"eviction_policy": "lru"}),
    (["--disable-radix-cache"], {"disable_radix_cache": True}),
    (["--no-enable-prefix-caching"], {"disable_radix_cache": True}),
    (["--enable-prefix-caching"], {"disable_radix_cache": False}),
    (["--disable-radix-cache", "--enable-prefix-caching"], {"disable_radix_cache": False}),
    (["--seed", "7"], {"seed": 7}),
    (["--random-seed", "7"], {"seed": 7}),
    (["--skip-warmup"], {"skip_warmup": True}),
    (["--skip-server-warmup"], {"skip_warmup": True}),
    (["--compile-cache-dir", "none"], {"compile_cache_dir": "none"}),
    (["--trace-out", "served.jsonl"], {"trace_out": "served.jsonl"}),
    (["--tp-size", "2"], {"tp_size": 2}),
    (["--tensor-parallel-size", "4"], {"tp_size": 4}),
    (["--tp", "8"], {"tp_size": 8}),
    (["--coordinator-address", "a:1"], {"coordinator_address": "a:1"}),
    (["--dist-init-addr", "[::1]:1"], {"coordinator_address": "[::1]:1"}),
    (["--num-processes", "1"], {"num_processes": 1}),
    (["--nnodes", "1"], {"num_processes": 1}),
    (["--process-id", "0"], {"process_id": 0}),
    (["--node-rank", "0"], {"process_id": 0}),
    (["--dp-size", "2"], {"dp_size": 2}),
    (["--data-parallel-size", "3"], {"dp_size": 3}),
    (["--dp", "4"], {"dp_size": 4}),
    (["--host-cache-size", "0"], {"host_cache_size": "0"}),
    (["--host-cache-size", "40%"], {"host_cache_size": "40%"}),
    (["--hicache-ratio", "2.5"], {"host_cache_size": "2.5x"}),
    (["--hicache-size", "30"], {"host_cache_size": 30_000_000_000}),
    (["--hicache-size", "30GiB"], {"host_cache_size": 30 * 2**30}),
    (["--kv-offloading-size", "1.5"], {"host_cache_size": 3 * 2**29}),
    (["--enable-hierarchical-cache"], {"host_cache_size": "2x"}),
    (["--hicache-ratio", "3", "--enable-hierarchical-cache"], {"host_cache_size": "3x"}),
    (["--enable-hierarchical-cache", "--hicache-size", "1GB"], {"host_cache_size": 10**9}),
    (["--host-disk-cache-dir", "s3://bucket/kv"], {"host_disk_cache_dir": "s3://bucket/kv"}),
    (["--disk-cache-size", "5GiB"], {"disk_cache_size": "5GiB"}),
    (["--disk-free-space", "2GiB"], {"disk_free_space": "2GiB"}),
    (["--disk-cache-read-only"], {"disk_cache_read_only": True}),
    (["--disk-cache-refresh", "0"], {"disk_cache_refresh": 0.0}),
    (["--disk-cache-shared"], {"disk_cache_shared": True}),
    (["--disk-cache-lease", "5"], {"disk_cache_lease": 5.0}),
    (["--host-eviction-policy", "s3fifo"], {"host_eviction_policy": "s3fifo"}),
    (["--disk-eviction-policy", "ttl=1h"], {"disk_eviction_policy": "ttl=1h"}),
    (["--write-policy", "write_back"], {"write_policy": "write_back"}),
    (["--hicache-write-policy", "write_through_selective"], {"write_policy": "write_through_selective"}),
    (["--prefetch-policy", "timeout=500ms"], {"prefetch_policy": "timeout=500ms"}),
    (["--prefill-priority", "wait_complete"], {"prefetch_policy": "wait_complete"}),
    (["--hicache-storage-prefetch-policy", "best_effort"], {"prefetch_policy": "best_effort"}),
    (["--hicache-storage-prefetch-policy", "timeout"], {"prefetch_policy": "timeout=300ms"}),
    (["--prefetch-max-wait", "2.5"], {"prefetch_max_wait": 2.5}),
    (["--disable-prefetch"], {"disable_prefetch": True}),
    (["--disable-prefill-preemption"], {"disable_prefetch": True}),
]
SERVER_ALIASES = [
    (["--host", "0.0.0.0"], {"host": "0.0.0.0"}),
    (["--port", "8080"], {"port": 8080}),
    (["--api-key", "k"], {"api_key": ("k",)}),
    (["--api-key", "k", "--api-key", "l"], {"api_key": ("k", "l")}),
    (["--api-key-file", "keys"], {"api_key_file": "keys"}),
    (["--admin-key", "a"], {"admin_key": "a"}),
    (["--admin-api-key", "a"], {"admin_key": "a"}),
    (["--metrics-key", "m"], {"metrics_key": "m"}),
    (["--ssl-certfile", "c", "--ssl-keyfile", "k"], {"ssl_certfile": "c", "ssl_keyfile": "k"}),
    (["--cors-origin", "http://a", "--cors-origin", "*"], {"cors_origin": ("http://a", "*")}),
    (["--max-queued-requests", "0"], {"max_queued_requests": 0}),
    (["--request-timeout", "90"], {"request_timeout": 90.0}),
    (["--read-timeout", "5"], {"read_timeout": 5.0}),
    (["--write-timeout", "5"], {"write_timeout": 5.0}),
    (["--idle-timeout", "5"], {"idle_timeout": 5.0}),
    (["--disk-drain-timeout", "5"], {"disk_drain_timeout": 5.0}),
    (["--warmup-file", "prompts.jsonl"], {"warmup_file": "prompts.jsonl"}),
    (["--pin-quota", "25%"], {"pin_quota": "25%"}),
    (["--tool-call-parser", "hermes"], {"tool_call_parser": "hermes"}),
    (["--reasoning-parser", "think"], {"reasoning_parser": "think"}),
    (["--otlp-endpoint", "http://localhost:4318"], {"otlp_endpoint": "http://localhost:4318"}),
    (["--metrics-alias", "vllm"], {"metrics_alias": "vllm"}),
    (["--metrics-compat", "sglang"], {"metrics_alias": "sglang"}),
    (["--kv-events", "tcp://*:5557"], {"kv_events": "tcp://*:5557"}),
    (["--kv-events-config", '{"publisher": "zmq"}'], {"kv_events": '{"publisher": "zmq"}'}),
    (["--data-dir", "kept"], {"data_dir": "kept"}),
    (["--data-quota", "5GiB"], {"data_quota": 5 * 2**30}),
    (["--max-file-size", "1GiB"], {"max_file_size": 2**30}),
    (["--batch-concurrency", "4"], {"batch_concurrency": 4}),
    (["--log-level", "warning"], {"log_level": "warning"}),
    (["--log-level", "WARNING"], {"log_level": "warning"}),
    (["--max-body-size", "1MiB"], {"max_body_size": 2**20}),
    (["--shutdown-timeout", "2.5"], {"shutdown_timeout": 2.5}),
]


@pytest.mark.parametrize(("args", "expected"), ALIASES)
def test_engine_flag(
    args: list[str],
    expected: dict[str, Any],
    serve: Callable[..., Started],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve(*args).config == EngineConfig(**{"model_path": "demo", **expected})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("args", "expected"), SERVER_ALIASES)
def test_server_flag(args: list[str], expected: dict[str, Any], serve: Callable[..., Started]) -> None:
    assert serve(*args).server == ServerConfig(**expected)


def test_secrets_come_from_the_environment_unless_flags_give_them(
    serve: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERAX_API_KEY", "env-key")
    monkeypatch.setenv("TIERAX_ADMIN_KEY", "env-admin")
    monkeypatch.setenv("TIERAX_METRICS_KEY", "")
    assert serve().server == ServerConfig(api_key=("env-key",), admin_key="env-admin")
    assert serve("--api-key", "flag").server == ServerConfig(api_key=("flag",), admin_key="env-admin")


def test_every_spelling_is_tested() -> None:
    tried = {arg for args, _ in ALIASES + SERVER_ALIASES for arg in args}
    assert {
        flag for option in (*ENGINE_OPTIONS, *TIER_OPTIONS, *SERVER_OPTIONS) for flag in option.flags
    } <= tried


def test_every_setting_has_a_flag() -> None:
    filled = {option.field for option in (*ENGINE_OPTIONS, *TIER_OPTIONS)} | {"served_model_name"}
    assert filled - {"hierarchical"} == set(EngineConfig.__dataclass_fields__)
    assert {option.field for option in SERVER_OPTIONS} == set(ServerConfig.__dataclass_fields__)


ARTICLE_LINE = (
    "--model-path /models/Qwen3-8B --host 0.0.0.0 --port 30000 --kv-cache-dtype fp8 "
    "--host-disk-cache-dir /data/kvcache --max-num-seqs 256 --log-level warning"
).split()


def test_the_articles_launch_line(serve: Callable[..., Started], capsys: pytest.CaptureFixture[str]) -> None:
    started = serve(*ARTICLE_LINE)
    assert started.config == EngineConfig(
        model_path="/models/Qwen3-8B",
        kv_cache_dtype="fp8",
        host_disk_cache_dir="/data/kvcache",
        max_num_seqs=256,
    )
    assert started.server == ServerConfig(host="0.0.0.0", port=30000, log_level="warning")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--page-size", "0"], "--page-size: 0 must be a whole number of at least 1"),
        (["--page-size", "four"], "argument --page-size/--block-size: invalid int value: 'four'"),
        (["--dtype", "f16"], "--dtype: 'f16' must be auto, f32 or bf16"),
        (["--kv-cache-dtype", "q8"], "--kv-cache-dtype: 'q8' must be"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype: there is no int8 KV; the 8-bit kind is fp8"),
        (["--mem-fraction-static", "2"], "'2' must be a number above 0 and at most 1"),
        (["--mem-fraction-static", "nan"], "'nan' must be a number above 0"),
        (["--device-cache-size", "big"], "--device-cache-size: 'big' is not a size"),
        (["--chunked-prefill-size", "-1"], "--max-num-batched-tokens: -1 must be"),
        (["--attention-backend", "cuda"], "--attention-backend: 'cuda' must be"),
        (["--schedule-policy", "sjf"], "--schedule-policy: 'sjf' must be fcfs or lpm"),
        (["--eviction-policy", "mru"], "--eviction-policy: 'mru' must be"),
        (["--port", "99999"], "--port: 99999 must be a number from 0 to 65535"),
        (["--log-level", "loud"], "--log-level: 'loud' must be one of"),
        (["--max-body-size", "x"], "'x' is not a size"),
        (["--api-key", ""], "--api-key: an empty key"),
        (["--host-cache-size", "lots"], "--host-cache-size: 'lots' is not a size"),
        (["--hicache-size", "0"], "'0' must be above 0; --host-cache-size 0 is for no host cache"),
        (["--hicache-size", "x"], "'x' is not a size"),
        (["--hicache-ratio", "-1"], "'-1' must be a number above 0"),
        (["--disk-cache-size", "20 apples"], "--disk-cache-size: '20 apples' is not a size"),
        (
            ["--write-policy", "later"],
            "--write-policy: 'later' must be write_through, write_through_selective or",
        ),
        (
            ["--prefetch-policy", "soon"],
            "--prefetch-policy: 'soon' must be best_effort, wait_complete or timeout=",
        ),
        (["--prefetch-max-wait", "-1"], "--prefetch-max-wait: -1.0 must be seconds"),
        (["--disk-eviction-policy", "mru"], "--disk-eviction-policy: 'mru' must be lru"),
        (["--disk-drain-timeout", "nan"], "--disk-drain-timeout: nan must be seconds"),
        (["--pin-quota", "150%"], "--pin-quota: '150%' must be a share from 0% to 100%"),
        (
            ["--tool-call-parser", "xml"],
            "--tool-call-parser: 'xml' must be one of auto, hermes, llama3, none",
        ),
        (["--reasoning-parser", "xml"], "--reasoning-parser: 'xml' must be one of auto, think, none"),
        (["--num-processes", "2"], "--coordinator-address: several processes need host:port of process 0"),
        (["--process-id", "1"], "--process-id: 1 must be a whole number from 0 to 0"),
        (["--dp-size", "0"], "--dp-size: 0 must be a whole number of at least 1"),
        (
            ["--dp-size", "2", "--num-processes", "2", "--tp-size", "2", "--coordinator-address", "a:1"],
            "--dp-size: 2 copies of the model are for one process",
        ),
        (["--tp-size", "0"], "--tp-size: 0 must be a whole number of at least 1"),
        (["--model-pat", "x"], "unrecognized arguments: --model-pat"),
        (["--model-path"], "expected one argument"),
        (["a", "--model-path", "b"], "two models given: a and b"),
    ],
)
def test_mistakes_in_flags(
    args: list[str], complaint: str, serve: object, capsys: pytest.CaptureFixture[str]
) -> None:
    line = mistake(capsys, "serve", *args)
    assert line.startswith("tierax serve: error: ")
    assert complaint in line


def test_mistakes_in_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, "srve") == "tierax: error: no command 'srve'; did you mean serve?"
    assert f"commands: {', '.join(COMMANDS)}" in mistake(capsys, "xyz")
    assert "no benchmark 'oflline'; did you mean offline?" in mistake(capsys, "bench", "oflline")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("page_size: 7 does not divide the context"),
        ModelError("no such file:\n  /nowhere"),
        ParameterError("temperature", "temperature must not be negative"),
        FileNotFoundError(2, "No such file or directory", "/nowhere"),
    ],
)
def test_mistakes_found_later_are_one_line_too(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: EngineConfig, server: ServerConfig) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "tierax.serving.server", fake_module(run=run))
    assert mistake(capsys, "serve", "demo").startswith("tierax serve: error: ")


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: EngineConfig, server: ServerConfig) -> int:
        raise ZeroDivisionError

    monkeypatch.setitem(sys.modules, "tierax.serving.server", fake_module(run=run))
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


def test_convert_refuses_what_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = mistake(capsys, "convert", str(tmp_path / "none"), str(tmp_path / "out"))
    assert "no such file or directory" in line
    assert not (tmp_path / "out").exists()
    assert "invalid choice: 'f8'" in mistake(capsys, "convert", "demo", "out", "--dtype", "f8")


def test_bench_hands_on_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in (("offline", 0), ("radix", 3)):
        seen: list[list[str]] = []
        monkeypatch.setitem(
            sys.modules,
            f"tierax.bench.{name}",
            fake_module(main=lambda argv, seen=seen, code=code: seen.append(argv) or code),
        )
        assert main(["bench", name, "--json", "-"]) == code
        assert seen == [["--json", "-"]]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tierax {__version__}\n"
    assert main([]) == 2
    assert capsys.readouterr().out == ""
    for name in ("serve", "generate", "convert"):
        with pytest.raises(SystemExit) as done:
            main([name, "--help"])
        assert done.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: tierax {name} ")


@pytest.mark.parametrize(
    ("module", "args", "code", "expected"),
    [
        ("tierax", ["--version"], 0, f"tierax {__version__}"),
        (
            "tierax",
            ["serve", "--port", "x"],
            2,
            "tierax serve: error: argument --port: invalid int value: 'x'",
        ),
        ("tierax.launch_server", ["--help"], 0, "usage: tierax serve"),
        ("tierax.launch_server", ["--port", "-1"], 2, "tierax serve: error: --port: -1 must be"),
        (
            "tierax.launch_server",
            ["--model-path", "/nowhere"],
            2,
            "tierax serve: error: /nowhere: no such file",
        ),
    ],
)
def test_python_dash_m(module: str, args: list[str], code: int, expected: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stderr
    assert (done.stdout + done.stderr).startswith(expected)
    assert "Traceback" not in done.stderr
