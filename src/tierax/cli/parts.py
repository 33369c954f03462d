"""A command of several parts: `tierax bench NAME …`, `tierax lab NAME …`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping

from .errors import UsageError


def named_part(argv: list[str], command: str, kind: str, parts: Mapping[str, str]) -> str | None:
    """The part that the line begins with; None when help was shown instead, on stderr if there is no line at all.

    `parts` is name -> summary; `kind` is the word for one. Raises `UsageError` for a name that no part has.
    """
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, parts))
        lines = [f"  {name:<{width}}  {summary}" for name, summary in parts.items()]
        text = "\n".join([f"usage: {command} NAME …", "", f"{kind}s:", *lines])
        print(text, file=sys.stdout if argv else sys.stderr)
        return None
    name = argv[0]
    if name not in parts:
        near = difflib.get_close_matches(name, parts, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(parts)}"
        raise UsageError(command, f"no {kind} {name!r}; {hint}")
    return name
