"""`--config`: what a file and the environment say, as the command line would have said it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.cli_calls import fake_module, mistake
from tierax import __version__
from tierax.cli.main import main
from tierax.cli.option import Option
from tierax.cli.options import ENGINE_OPTIONS, NAME_OPTION
from tierax.cli.options_of_server import SECRETS, SERVER_OPTIONS
from tierax.cli.options_of_tiers import TIER_OPTIONS
from tierax.engine.config import EngineConfig
from tierax.serving.config import ServerConfig

Serve = Callable[..., tuple[EngineConfig, ServerConfig]]


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS.values():
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`tierax serve ARGS…` up to the point where the server would start."""
    started: list[tuple[EngineConfig, ServerConfig]] = []

    def run(config: EngineConfig, server: ServerConfig) -> int:
        started.append((config, server))
        return 0

    monkeypatch.setitem(sys.modules, "tierax.serving.server", fake_module(run=run))

    def call(*args: str) -> tuple[EngineConfig, ServerConfig]:
        assert main(["serve", *args]) == 0
        return started.pop()

    return call


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a file and returns its path."""

    def file(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return file


YAML = """
# Any comment.
model-path: some/model
port: 8123
api-key: [one, two]
max_body_size: 2MiB
host-cache-size: 1GiB
kv_cache_dtype: fp8
skip-warmup: true
disable-prefetch: false
shutdown-timeout: 2.5
mem-fraction-static: 0.25
served-model-name:
"""
TOML = """
model-path = "some/model"
port = 8123
api-key = ["one", "two"]
max_body_size = "2MiB"
host-cache-size = "1GiB"
kv_cache_dtype = "fp8"
skip-warmup = true
disable-prefetch = false
shutdown-timeout = 2.5
mem-fraction-static = 0.25
"""


@pytest.mark.parametrize(("name", "text"), [("c.yaml", YAML), ("c.yml", YAML), ("c.TOML", TOML)])
def test_a_file_says_what_flags_say(serve: Serve, write: Any, name: str, text: str) -> None:
    config, server = serve("--config", write(name, text))
    same_config, same_server = serve(
        *("--model-path some/model --port 8123 --api-key one --api-key two --max-body-size 2MiB").split(),
        *("--host-cache-size 1GiB --kv-cache-dtype fp8 --skip-warmup --shutdown-timeout 2.5").split(),
        *("--mem-fraction-static", "0.25"),
    )
    assert (config, server) == (same_config, same_server)
    assert server.api_keys == ("one", "two")
    assert config.device_cache_size == "25%"
    assert config.disable_prefetch is False


def test_the_command_line_goes_first(serve: Serve, write: Any) -> None:
    path = write("c.yaml", YAML)
    config, server = serve(
        *("other --port 9 --api-key mine --device-cache-size 2GiB --disable-prefetch --config").split(), path
    )
    assert config.model_path == "other"
    assert (server.port, server.api_keys) == (9, ("mine",))
    assert config.device_cache_size == "2GiB"
    assert config.disable_prefetch is True
    assert config.skip_warmup is True
    # Also where it says what is the default.
    path = write("d.yaml", "tp-size: 2\npage-size: 32\n")
    assert serve("--tp-size", "1", f"--config={path}")[0].page_size == 32


def test_a_switch_can_be_turned_off(serve: Serve, write: Any) -> None:
    assert serve("--config", write("c.yaml", "enable-prefix-caching: false\n"))[0].disable_radix_cache is True
    assert serve("--config", write("c.yaml", "disable-radix-cache: false\n"))[0].disable_radix_cache is False
    path = write("d.yaml", "disable-radix-cache: true\n")
    assert serve("--enable-prefix-caching", "--config", path)[0].disable_radix_cache is False


def test_secrets_come_out_of_the_environment(
    serve: Serve, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("c.yaml", "api-key: from-file\n")
    monkeypatch.setenv("TIERAX_API_KEY", "first second")
    assert serve()[1].api_keys == ("first", "second")
    assert serve("--config", path)[1].api_keys == ("first", "second")
    assert serve("--config", path, "--api-key", "typed")[1].api_keys == ("typed",)
    monkeypatch.setenv("TIERAX_API_KEY", "")
    assert serve("--config", path)[1].api_keys == ("from-file",)
    assert serve()[1].locked is False


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "prot: 1\n", "unknown key 'prot'; did you mean 'port'?"),
        ("c.yaml", "zzzz: 1\n", "unknown key 'zzzz' (see tierax serve --help for what there is)"),
        ("c.yaml", "help: true\n", "unknown key 'help'"),
        ("c.yaml", "config: other.yaml\n", "unknown key 'config'"),
        ("c.yaml", "1: 2\n", "unknown key 1"),
        ("c.yaml", "port: many\n", "'port': invalid int value: 'many'"),
        ("c.yaml", "port: [1, 2]\n", "'port' must be text or a number, not list"),
        ("c.yaml", "port: true\n", "'port' must be text or a number, not bool"),
        ("c.yaml", "api-key: [{a: b}]\n", "'api-key' must be text or a number, not dict"),
        ("c.yaml", "skip-warmup: 1\n", "'skip-warmup' is a switch: write true or false, not 1"),
        ("c.yaml", "max-body-size: 0.5.1\n", "'max-body-size': "),
        ("c.yaml", "mem-fraction-static: 4\n", "must be a number above 0 and at most 1"),
        ("c.yaml", "block-size: 1\npage-size: 2\n", "'block-size' and 'page-size' are the same setting"),
        ("c.yaml", "page_size: 1\npage-size: 2\n", "'page_size' and 'page-size' are the same setting"),
        ("c.yaml", "port: 1\nport: 2\n", "not valid YAML: 'port' is given twice"),
        ("c.yaml", "port: 1\n  host: x\n", "not valid YAML in line 2: "),
        ("c.yaml", "- port\n", "write one `flag: value` a line"),
        ("c.yaml", "x: !!python/object/apply:os.getcwd []\n", "not valid YAML in line 1: "),
        ("c.toml", "port = \n", "not valid TOML: "),
        ("c.toml", "[server]\nport = 1\n", "unknown key 'server'"),
        ("c.json", "{}", "the file's name must end in .toml, .yaml or .yml"),
    ],
)
def test_mistakes_name_the_file_and_the_key(
    capsys: pytest.CaptureFixture[str], write: Any, name: str, text: str, message: str
) -> None:
    path = write(name, text)
    line = mistake(capsys, "serve", "--config", path)
    assert line.startswith(f"tierax serve: error: --config {path}: ")
    assert message in line


def test_a_file_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "none.yaml: No such file" in mistake(capsys, "serve", "--config", str(tmp_path / "none.yaml"))
    (tmp_path / "bad.toml").write_bytes(b"x = '\xff'")
    assert "not UTF-8 text: byte 5" in mistake(capsys, "serve", "--config", str(tmp_path / "bad.toml"))
    assert "expected one argument" in mistake(capsys, "serve", "--config")


def test_an_empty_file_says_nothing(serve: Serve, write: Any) -> None:
    assert serve("--config", write("c.yaml", "# nothing\n")) == serve()
    assert serve("--config", write("c.toml", "")) == serve()


@pytest.mark.parametrize(
    "option", [*SERVER_OPTIONS, NAME_OPTION, *ENGINE_OPTIONS, *TIER_OPTIONS], ids=lambda o: o.flags[0]
)
def test_every_flag_of_serve_can_stand_in_a_file(
    capsys: pytest.CaptureFixture[str], write: Any, option: Option
) -> None:
    """Each key is known: a value of the wrong kind is refused for its kind, under its own name."""
    for flag in option.flags:
        key = flag.removeprefix("--")
        line = mistake(capsys, "serve", "--config", write("c.yaml", f"{key}: {{}}\n"))
        assert f"{key!r} " in line
        assert "unknown" not in line


def test_generate_takes_a_file_too(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    line = mistake(capsys, "generate", "--config", write("c.toml", 'temperatur = 0\nprompt = "x"\n'))
    assert "unknown key 'temperatur'; did you mean 'temperature'?" in line
    # All flags are good, and so is the prompt: what fails is the model.
    text = 'temperature = 0\nprompt = ["a", "b"]\nmodel = "./nowhere"\nstop = "x"\n'
    assert "nowhere: no such file" in mistake(capsys, "generate", "--config", write("c.toml", text))


def test_the_file_in_the_docs_is_good(serve: Serve) -> None:
    config, server = serve("--config", str(Path(__file__).parents[1] / "docs" / "serve.yaml"))
    assert (config.model_path, config.host_disk_cache_dir) == ("demo", "/var/lib/tierax/kv")
    assert (server.host, server.port) == ("127.0.0.1", 30000)


def test_every_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "generate", "cache"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--version"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == f"tierax {__version__}\n"
