"""Policies by name, and a user's own from their file."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from tierax.cache.manager import CacheManager
from tierax.cache.policies.lru import LRU
from tierax.cache.policies.registry import POLICIES, load_policy

USES = '''
class LeastUsed:
    """Counts uses."""

    def touch(self, node, tick):
        node.rank = (node.rank or 0) + 1

    def priority(self, node):
        return node.rank

class Needy(LeastUsed):
    def __init__(self, size):
        self.size = size

class Half:
    def touch(self, node, tick):
        pass

NUMBER = 3
'''


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_policies.py").write_text(USES)
    (tmp_path / "broken_policies.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def serve(cache: CacheManager, tokens: array[int]) -> None:
    lease = cache.open(b"", tokens, len(tokens))
    assert cache.grow(lease, len(tokens))
    cache.commit(lease, tokens, len(tokens))
    cache.release(lease)
    cache.check()


def survivors(policy_name: str) -> list[int]:
    """Which of three sequences stay when a fourth needs the room of two; the first was used most, but longest ago."""
    cache = CacheManager(num_pages=6, page_size=2, policy=load_policy(policy_name))
    sequences = [array("i", range(start, start + 4)) for start in (0, 10, 20)]
    for which in (0, 0, 0, 1, 1, 2):
        serve(cache, sequences[which])
    serve(cache, array("i", range(50, 58)))
    return [which for which in range(3) if cache.match_length(b"", sequences[which])]


def test_registered_names() -> None:
    assert list(POLICIES) == ["lru"]
    assert isinstance(load_policy("lru"), LRU)
    assert survivors("lru") == [2]


@pytest.mark.parametrize("module", ["own_policies", "own_policies.py", "{}/own_policies.py"])
def test_a_users_own_policy(workdir: Path, module: str) -> None:
    assert survivors(module.format(workdir) + ":LeastUsed") == [0]


def test_a_split_run_keeps_its_rank(workdir: Path) -> None:
    cache = CacheManager(num_pages=4, page_size=1, policy=load_policy("own_policies:LeastUsed"))
    for _ in range(2):
        serve(cache, array("i", [1, 2, 3, 4]))
    serve(cache, array("i", [1, 2]))
    serve(cache, array("i", [9]))
    assert cache.match_length(b"", array("i", [1, 2, 3, 4])) == 3
    assert sorted(node.rank for node in cache.tree.nodes()) == [1, 2, 3]


def test_new_pages_do_not_inherit_the_uses_of_the_run_before_them(workdir: Path) -> None:
    cache = CacheManager(num_pages=5, page_size=1, policy=load_policy("own_policies:LeastUsed"))
    turn, other = array("i", [1, 2]), array("i", [7])
    for _ in range(3):
        serve(cache, turn)
    for _ in range(2):
        serve(cache, other)
    serve(cache, turn + array("i", [3, 4]))
    serve(cache, array("i", [9]))
    assert cache.match_length(b"", turn + array("i", [3, 4])) == 3
    assert cache.match_length(b"", other) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lfru", "unknown eviction policy 'lfru': choose one of lru, or give module:Class"),
        ("absent:Policy", "no module or file 'absent.py'"),
        ("absent/dir/file.py:Policy", "no module or file 'absent/dir/file.py'"),
        (":Policy", "not the name of a module"),
        (".own_policies:LeastUsed", "not the name of a module"),
        ("own_policies:Missing", "own_policies has no class 'Missing'"),
        ("own_policies:NUMBER", "own_policies has no class 'NUMBER'"),
        ("own_policies:Needy", "cannot be made without arguments: .*size"),
        ("own_policies:Half", r"lacks the methods touch\(node, tick\) and priority\(node\)"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(workdir: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(name)


def test_a_missing_import_inside_a_users_file_is_shown_as_it_is(workdir: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_policy("broken_policies:Policy")
