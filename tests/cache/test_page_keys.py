"""Keys of pages: nothing that differs shares one, however much it looks alike when it is written side by side."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

from tierax.cache.page_keys import KEY_BYTES, chain, namespace_digest
from tierax.engine.config import EngineConfig
from tierax.engine.tiers import identity

Fields = dict[str, Any]

ALIKE: list[tuple[Fields, bytes]] = [
    ({}, b""),
    ({"a": "bc"}, b""),
    ({"ab": "c"}, b""),
    ({"a": "b", "c": ""}, b""),
    ({"a": "", "b": "c"}, b""),
    ({"a": b"bc"}, b""),
    ({"a": b"'bc'"}, b""),
    ({"n": 1}, b""),
    ({"n": "1"}, b""),
    ({"n": 1.0}, b""),
    ({"n": None}, b""),
    ({"n": "None"}, b""),
    # The same bytes one after the other, but for where one field ends and the next begins.
    ({"a": b"x", "b": b"y"}, b""),
    ({"a": b"xbbytesy"}, b""),
    # A tenant and a field, and the same text in both places.
    ({}, b"bob"),
    ({"salt": b"bob"}, b""),
    ({"salt": "bob"}, b""),
    ({"adapter": "bob"}, b""),
    ({"adapter": "bob"}, b"bob"),
    ({"a": "x"}, b"bob"),
]


def test_no_two_lists_of_fields_make_one_namespace() -> None:
    for (one, salt), (other, other_salt) in combinations(ALIKE, 2):
        assert namespace_digest(one, salt) != namespace_digest(other, other_salt), (one, other)


def test_whatever_the_kv_of_a_model_depends_on_is_in_its_namespace() -> None:
    as_it_is: dict[str, Any] = {
        "source": SimpleNamespace(config="a config", weights_digest=lambda: "w"),
        "config": EngineConfig.create("demo", host_disk_cache_dir="kv"),
        "dtype": "f32",
        "weight_form": "f32",
        "activations": "f32",
        "kv_dtype": "f32",
        "page_size": 16,
    }
    others: Fields = {
        "source": SimpleNamespace(config="a config", weights_digest=lambda: "x"),
        "dtype": "bf16",
        "weight_form": "int8",
        "activations": "int8",
        "kv_dtype": "fp8",
        "page_size": 32,
    }
    variants = [as_it_is, *(as_it_is | {name: other} for name, other in others.items())]
    variants.append(as_it_is | {"source": SimpleNamespace(config="another", weights_digest=lambda: "w")})
    digests = {namespace_digest(identity(**fields)) for fields in variants}
    assert len(digests) == len(variants)


def test_the_order_of_fields_makes_no_difference() -> None:
    assert namespace_digest({"a": 1, "b": 2}) == namespace_digest({"b": 2, "a": 1})


def test_a_page_is_named_after_all_that_comes_before_it() -> None:
    root = namespace_digest({"model": "tiny"})
    first, second = chain(root, [b"1111", b"2222"])
    assert len(first) == len(second) == KEY_BYTES
    assert chain(first, [b"2222"]) == [second], "as if one goes on where another has stopped"
    assert chain(root, [b"2222", b"1111"])[1] not in (first, second)
    assert chain(namespace_digest({"model": "other"}), [b"1111"]) != [first]
