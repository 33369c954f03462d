"""Where API keys come from, and the namespaces that salts make."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from helpers.live_server import Live
from tierax.engine.config import ConfigError
from tierax.serving.config import ServerConfig
from tierax.serving.http.auth import ApiKey, load_keys, salted


def test_keys_of_flags_and_files(tmp_path: Path) -> None:
    lines, table = tmp_path / "lines", tmp_path / "table.json"
    lines.write_text("# who may\n\n a\tred\nb\n")
    table.write_text('{"c": "blue", "d": null}')
    assert load_keys(ServerConfig()) == ()
    assert load_keys(ServerConfig(api_key="k")) == (ApiKey("k"),)
    assert load_keys(ServerConfig(api_key=["k", "l"], api_key_file=str(lines))) == (
        ApiKey("k"),
        ApiKey("l"),
        ApiKey("a", "red"),
        ApiKey("b"),
    )
    assert load_keys(ServerConfig(api_key_file=str(table))) == (ApiKey("c", "blue"), ApiKey("d"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ("a b c\n", "line 1: write KEY, or KEY TENANT"),
        ("a red\na blue\n", "a key is given twice"),
        ("{broken", "is not valid JSON"),
        ('{"a": 5}', 'write {"KEY": "TENANT"}'),
        ('{"a": ""}', 'write {"KEY": "TENANT"}'),
        ("{}", "holds no key"),
    ],
)
def test_files_that_cannot_be_used(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_keys(ServerConfig(api_key_file=str(path)))
    assert complaint in str(refused.value)
    with pytest.raises(ConfigError, match="No such file"):
        load_keys(ServerConfig(api_key_file=str(tmp_path / "none")))


def test_no_two_pairs_of_salts_make_one_namespace() -> None:
    salts = [None, "a", "b", "ab", "salt:\x00\x00\x00\x01a", "a" + "salt:\x00\x00\x00\x01b", "key", ""]
    pairs = list(itertools.product(salts, salts))
    assert len({salted(*pair) for pair in pairs}) == len(pairs)
    assert salted(None, None) == b""


@pytest.mark.asyncio
async def test_any_of_several_keys_opens(serve) -> None:
    live: Live = await serve(api_key=("one", "two"))
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("one two", 401)):
        assert (await live.get("/v1/models", headers={"Authorization": f"Bearer {key}"}))[0] == status
    assert (await live.get("/cache/stat", headers={"Authorization": "Bearer two"}))[0] == 200
