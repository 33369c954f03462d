"""Which replica a prompt goes to, by what each has seen."""

from __future__ import annotations

from tierax.integrations.affinity import CHUNK, PrefixAffinity

ALL = ("a", "b", "c")


def prompt(*parts: str) -> bytes:
    """A chunk of text for each part."""
    return b"".join(part.encode().ljust(CHUNK, b".") for part in parts)


def test_longest_beginning_that_was_seen_decides() -> None:
    affinity = PrefixAffinity()
    assert affinity.home(prompt("system", "x"), ALL) is None
    affinity.note(prompt("system", "one"), "a")
    affinity.note(prompt("system", "two"), "b")
    assert affinity.home(prompt("system", "one", "more"), ALL) == "a"
    assert affinity.home(prompt("system", "two", "more"), ALL) == "b"
    assert affinity.home(prompt("system", "three"), ALL) == "b", "the latest of those with as much in common"
    assert affinity.home(prompt("other", "one"), ALL) is None


def test_replica_that_is_gone_is_passed_over() -> None:
    affinity = PrefixAffinity()
    affinity.note(prompt("system"), "a")
    affinity.note(prompt("system", "one"), "a")
    affinity.note(prompt("system", "one", "two"), "b")
    affinity.note(prompt("system"), "c")
    assert affinity.home(prompt("system", "one", "two"), ("a", "c")) == "c"
    assert affinity.home(prompt("system", "one", "two"), ("x",)) is None


def test_short_prompts_go_by_all_of_their_text() -> None:
    affinity = PrefixAffinity()
    affinity.note(b"hello", "a")
    assert affinity.home(b"hello", ALL) == "a"
    assert affinity.home(b"help", ALL) is None


def test_memory_is_bounded_and_forgets_what_was_used_least_recently() -> None:
    affinity = PrefixAffinity(capacity=2)
    for name in ("one", "two"):
        affinity.note(prompt(name), "a")
    affinity.note(prompt("one"), "b")
    affinity.note(prompt("three"), "c")
    assert affinity.home(prompt("one"), ALL) == "b"
    assert affinity.home(prompt("two"), ALL) is None
    assert affinity.home(prompt("three"), ALL) == "c"
