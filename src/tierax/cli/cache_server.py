"""`tierax cache … URL`: asks a running server about its cache, through the server's own routes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cache import count, show, size
from .errors import UsageError

PATIENCE_S = 600.0
"""Seconds that an answer may take; warming computes."""


class ServerError(Exception):
    """The server could not be asked, or said no; the message is for the user, `answer` what it sent."""

    def __init__(self, message: str, answer: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.answer = answer


def on_server(args: argparse.Namespace) -> int:
    """Runs a subcommand of `tierax cache`. Returns 0, or 1 if something could not be done; 2 if nobody answers."""
    server = Server(args.target, args.api_key or os.environ.get("TIERAX_API_KEY"))
    try:
        return _COMMANDS[args.command](server, args)
    except ServerError as error:
        print(f"tierax cache {args.command}: error: {error}", file=sys.stderr)
        return 2 if error.answer is None else 1


class Server:
    """The routes of a running server that concern its cache."""

    def __init__(self, url: str, api_key: str | None) -> None:
        # The base URL of OpenAI clients is welcome too.
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to GET, or to POST with a body. Raises `ServerError`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(self.url + path, error.code, error.read()) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"{self.url}: {getattr(reason, 'strerror', None) or reason}") from None


def _refused(url: str, status: int, raw: bytes) -> ServerError:
    try:
        answer = json.loads(raw)
        return ServerError(answer["error"]["message"], answer)
    except (ValueError, KeyError, TypeError):
        return ServerError(f"{url}: HTTP {status}, which is no answer of tierax")


def _stat(server: Server, args: argparse.Namespace) -> int:
    found = server.ask("/cache/stat")
    tokens = found["tokens"]
    lines = [f"{server.url}, pages of {found['page_size']} tokens, {size(found['page_bytes'])} each"]
    for tier, level in found["tiers"].items():
        hits = tokens["hits_by_tier"][tier]
        lines.append(f"{tier:<6}  {_level(level)}; {hits} tokens hit")
    share = f" ({tokens['hits'] / tokens['queries']:.1%})" if tokens["queries"] else ""
    lines.append(f"{tokens['hits']} of {tokens['queries']} prompt tokens were cached{share}")
    return show(args, found, lines)


def _level(level: dict[str, Any]) -> str:
    text = f"{level['used_pages']} pages, {size(level['used_bytes'])}"
    if "capacity_bytes" in level:
        text += f" of {size(level['capacity_bytes'])}"
    if "in_use_pages" in level:
        text += f", {level['in_use_pages']} in use"
    if "pinned_pages" in level:
        text += f", {level['pinned_pages']} pinned (of at most {level['pin_quota_pages']})"
    if "location" in level:
        text += f", {'read-only ' if level['read_only'] else ''}{level['location']}"
    return text


def _ls(server: Server, args: argparse.Namespace) -> int:
    rows, pins = server.ask("/cache/stat")["namespaces"], server.ask("/cache/pins")["pins"]
    lines = []
    for row in rows:
        where = ", ".join(
            f"{tier} {row[f'{tier}_pages']}" for tier in ("device", "host", "disk") if f"{tier}_pages" in row
        )
        lines.append(f"{row['namespace']}  pages: {where}")
        if row.get("description"):
            lines.append("  " + ", ".join(f"{name} {value}" for name, value in row["description"].items()))
    for pin in pins:
        lines.append(f"pin {pin['id']}  {count(pin['pages'], 'page')}, {pin['held_pages']} held")
    return show(args, {"namespaces": rows, "pins": pins}, lines or ["empty"])


def _clear(server: Server, args: argparse.Namespace) -> int:
    asked = {name: getattr(args, name) for name in ("tier", "namespace") if getattr(args, name) is not None}
    try:
        found = server.ask("/cache/clear", asked) if asked else server.ask("/flush_cache", {})
    except ServerError as error:
        if error.answer is None or "tiers" not in error.answer:
            raise
        found = error.answer
    lines = []
    for tier, dropped in found["tiers"].items():
        line = f"{tier}: {count(dropped['dropped_pages'], 'page')} dropped, {dropped['kept_pages']} stay"
        if dropped["pinned_pages"]:
            line += f", {dropped['pinned_pages']} of them pinned"
        lines.append(line + (f" ({dropped['reason']})" if "reason" in dropped else ""))
    show(args, found, lines)
    return 0 if found["complete"] else 1


def _warm(server: Server, args: argparse.Namespace) -> int:
    items = _items(args)
    found = server.ask("/cache/warm", {"items": items, "cache_salt": args.cache_salt})
    lines = [
        f"item {number}: {item['error']['message']}"
        for number, item in enumerate(found["items"], start=1)
        if "error" in item
    ]
    lines.append(
        f"{count(len(items), 'prompt')}: {found['computed_tokens']} tokens computed, {found['cached_tokens']} cached"
        f" already, {found['failed']} failed"
    )
    show(args, found, lines)
    return 1 if found["failed"] else 0


def _pin(server: Server, args: argparse.Namespace) -> int:
    found = [server.ask("/cache/pin", item | {"cache_salt": args.cache_salt}) for item in _items(args)]
    lines = [
        f"{pin['id']}  {count(pin['pages'], 'page')}, {pin['computed_tokens']} tokens computed"
        for pin in found
    ]
    return show(args, found, lines)


def _unpin(server: Server, args: argparse.Namespace) -> int:
    bodies: list[dict[str, Any]] = [{"id": pin_id} for pin_id in args.id or []]
    if not bodies or args.prompt or args.file:
        bodies += [item | {"cache_salt": args.cache_salt} for item in _items(args)]
    found = [server.ask("/cache/unpin", body)["unpinned"] for body in bodies]
    return show(args, found, [f"{pin['id']}  {count(pin['pages'], 'page')} unpinned" for pin in found])


def _items(args: argparse.Namespace) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = [{"prompt": text} for text in args.prompt or []]
    name = f"tierax cache {args.command}"
    if args.file is not None:
        try:
            text = Path(args.file).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(name, f"--file {args.file}: {error.strerror}") from None
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                items.append(_item(name, f"--file {args.file}, line {number}", line))
    if not items:
        raise UsageError(name, "give --prompt TEXT or --file FILE")
    return items


def _item(command: str, where: str, line: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise UsageError(command, f"{where}: not JSON: {error}") from None
    if not isinstance(item, dict):
        raise UsageError(command, f'{where}: write {{"prompt": …}}, {{"messages": …}} or {{"token_ids": …}}')
    return item


_COMMANDS: dict[str, Callable[[Server, argparse.Namespace], int]] = {
    "stat": _stat,
    "ls": _ls,
    "clear": _clear,
    "warm": _warm,
    "pin": _pin,
    "unpin": _unpin,
}
