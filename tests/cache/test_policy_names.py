"""How a name finds an eviction policy, a user's own too, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.flat_cache import FlatCache, Item
from tierax.cache.policies.adaptive import Adaptive
from tierax.cache.policies.fifo import FIFO
from tierax.cache.policies.greedy_dual import GDSF, LFU
from tierax.cache.policies.hazard import Hazard
from tierax.cache.policies.lru import LRU
from tierax.cache.policies.registry import POLICIES, EvictionPolicy, Use, load_policy
from tierax.cache.policies.s3fifo import S3FIFO
from tierax.cache.policies.slru import SLRU
from tierax.cache.policies.ttl import TTL

OWN = '''
from tierax.cache.policies.registry import EvictionPolicy

class LeastUsed(EvictionPolicy):
    """Counts uses."""

    def touch(self, item, use):
        item.rank = (item.rank or 0) + 1

    def priority(self, item):
        return item.rank

class Needy(LeastUsed):
    def __init__(self, size):
        self.size = size

class Half(EvictionPolicy):
    def touch(self, item, use):
        pass

class Stranger:
    def touch(self, item, use): ...
    def priority(self, item): ...

NUMBER = 3
'''


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_policies.py").write_text(OWN)
    (tmp_path / "broken_policies.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_registered_names() -> None:
    assert {name: type(load_policy(name if name != "ttl" else "ttl=1s")) for name in POLICIES} == {
        "lru": LRU,
        "lfu": LFU,
        "fifo": FIFO,
        "slru": SLRU,
        "s3fifo": S3FIFO,
        "gdsf": GDSF,
        "ttl": TTL,
        "hazard": Hazard,
        "adaptive": Adaptive,
    }
    assert load_policy("lru") is not load_policy("lru")


def test_gdsf_takes_its_depth() -> None:
    def priority(name: str) -> float:
        policy, item = load_policy(name), Item("a", end=64)
        policy.touch(item, Use(1, 0.0))
        return policy.priority(item)[0]

    assert (priority("gdsf"), priority("gdsf=64"), priority("gdsf=32")) == (1.25, 2.0, 3.0)


@pytest.mark.parametrize("module", ["own_policies", "own_policies.py", "{}/own_policies.py"])
def test_a_users_own_policy(workdir: Path, module: str) -> None:
    cache = FlatCache(load_policy(module.format(workdir) + ":LeastUsed"), capacity=3)
    cache.run([1, 1, 1, 2, 2, 3, 3, 4])
    assert set(cache.items) == {1, 3, 4}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lfru",
            "unknown eviction policy 'lfru': choose one of adaptive, fifo, gdsf, hazard, lfu, lru, s3fifo, slru, ttl, or give",
        ),
        ("lfru=3", "unknown eviction policy 'lfru=3'"),
        ("lru=3", "eviction policy 'lru=3': it takes no option"),
        ("lru=", "eviction policy 'lru=': it takes no option"),
        ("ttl", "'ttl': the time without use is a number and one of s, m, h, d, as in ttl=3600s or ttl=1h"),
        ("ttl=", "the time without use"),
        ("ttl=60", "the time without use"),
        ("ttl=0s", "the time without use"),
        ("ttl=-5s", "the time without use"),
        ("ttl=5 s", "the time without use"),
        ("gdsf=deep", "'gdsf=deep': the option is the depth in pages at which attention costs as much"),
        ("gdsf=0", "the option is the depth in pages"),
        ("gdsf=", "the option is the depth in pages"),
        ("hazard=warm", "'hazard=warm': the only option is cold"),
        ("absent:Policy", "no module or file 'absent.py'"),
        ("absent/dir/file.py:Policy", "no module or file 'absent/dir/file.py'"),
        (":Policy", "not the name of a module"),
        (".own_policies:LeastUsed", "not the name of a module"),
        ("own_policies:Missing", "own_policies has no class 'Missing'"),
        ("own_policies:NUMBER", "own_policies has no class 'NUMBER'"),
        ("own_policies:Needy", "cannot be made without arguments: .*size"),
        ("own_policies:Half", "cannot be made without arguments: .*Half.*priority"),
        (
            "own_policies:Stranger",
            r"Stranger is no subclass of tierax\.cache\.policies\.registry\.EvictionPolicy",
        ),
    ],
)
def test_what_is_wrong_with_a_name_is_said(workdir: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(name)


def test_a_missing_import_inside_a_users_file_is_shown_as_it_is(workdir: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_policy("broken_policies:Policy")


def test_the_base_alone_is_no_policy() -> None:
    with pytest.raises(ValueError, match=r"cannot be made without arguments: .*abstract"):
        load_policy("tierax.cache.policies.registry:EvictionPolicy")
    assert EvictionPolicy.lanes == 1
