"""What a lazy quantifier means where a whole text must match: which part of a pattern is to end as soon as it can."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(-[a-zA-Z]+)?\)")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{[^}]*\}|[pP].|[xuU]\{[0-9A-Fa-f]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"(\*|\+|\?|\{(\d+)(?:(,)(\d*))?\})(\??)")


@dataclass(frozen=True, slots=True)
class _Item:
    """A piece of a pattern: an atom and how often it may come; `most` None = without bound."""

    atom: str
    least: int = 1
    most: int | None = 1
    quantifier: str = ""
    lazy: bool = False
    """It, or something inside it, is quantified lazily."""


def split_lazy(pattern: str) -> tuple[str, str] | None:
    """Head and tail of a pattern with a lazy quantifier, None for one without.

    The head ends where it first can; the tail is what the pattern lets follow it greedily: the optional end of
    `.*?: \\d+` are all digits but the first. A pattern with alternatives on the outside, or one that cannot be cut, is all head.
    """
    body, flags = pattern, ""
    if (found := _FLAGS.match(pattern)) is not None:
        flags, body = found.group(), pattern[found.end() :]
    items = _items(body)
    if items is None:
        return None if "?" not in pattern or not _LOOKS_LAZY.search(pattern) else (pattern, "")
    if not any(item.lazy for item in items):
        return None
    if any(item.atom == "|" for item in items) or (found is not None and set(found.group(1)) & set("xU")):
        return pattern, ""
    if items[-1].atom == "$":
        items.pop()
    tail: list[str] = []
    while items and not items[-1].lazy and items[-1].least != items[-1].most:
        item = items.pop()
        if item.least == 0:
            tail.insert(0, item.atom + item.quantifier)
            continue
        items.append(_Item(item.atom, item.least, item.least, f"{{{item.least}}}"))
        rest = "" if item.most is None else item.most - item.least
        tail.insert(0, f"{item.atom}{{0,{rest}}}")
        break
    head = "".join(item.atom + item.quantifier for item in items)
    return flags + head, flags + "".join(tail) if tail else ""


_LOOKS_LAZY = re.compile(r"[*+?}]\?")


def _items(pattern: str) -> list[_Item] | None:
    """The pattern's outermost pieces in order; None where its syntax is not understood."""
    items = []
    at = 0
    while at < len(pattern):
        end = _atom_end(pattern, at)
        if end is None:
            return None
        atom, at = pattern[at:end], end
        lazy = atom.startswith("(") and any(item.lazy for item in _items(_inside(atom)) or [])
        quantifier = _QUANTIFIER.match(pattern, at)
        if quantifier is None:
            items.append(_Item(atom, lazy=lazy))
            continue
        at = quantifier.end()
        least, most = _bounds(quantifier)
        if _QUANTIFIER.match(pattern, at) is not None:
            return None
        items.append(_Item(atom, least, most, quantifier.group(), lazy or quantifier.group(5) == "?"))
    return items


def _inside(group: str) -> str:
    """What a group has between its parentheses, without its name or flags."""
    body = group[1:-1]
    return re.sub(r"^\?(?:P?<[^>]*>|[a-zA-Z-]*:)", "", body)


def _bounds(quantifier: re.Match[str]) -> tuple[int, int | None]:
    kind = quantifier.group(1)
    if kind in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[kind]
    least = int(quantifier.group(2))
    if quantifier.group(3) is None:
        return least, least
    return least, int(quantifier.group(4)) if quantifier.group(4) else None


def _atom_end(pattern: str, at: int) -> int | None:
    char = pattern[at]
    if char == "\\":
        found = _ESCAPE.match(pattern, at)
        return None if found is None else found.end()
    if char == "[":
        return _class_end(pattern, at)
    if char == "(":
        return _group_end(pattern, at)
    return None if char in "*+?)" else at + 1


def _class_end(pattern: str, at: int) -> int | None:
    """Behind the bracket that closes a class, which may have others inside."""
    at += 1
    if pattern[at : at + 1] == "^":
        at += 1
    if pattern[at : at + 1] == "]":
        at += 1
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "[":
            inner = _class_end(pattern, at)
            if inner is None:
                return None
            at = inner
        else:
            at += 2 if pattern[at] == "\\" else 1
    return at + 1 if at < len(pattern) else None


def _group_end(pattern: str, at: int) -> int | None:
    at += 1
    if (start := re.compile(r"\?(?:P?<[^>]*>|[a-zA-Z-]*[:)])").match(pattern, at)) is not None:
        if start.group().endswith(")"):
            return start.end()
        at = start.end()
    while at < len(pattern) and pattern[at] != ")":
        if pattern[at] in "\\[(":
            inner = _atom_end(pattern, at)
            if inner is None:
                return None
            at = inner
        else:
            at += 1
    return at + 1 if at < len(pattern) else None
