"""`tierax cache`: looks after a disk cache, a directory or a URL of an object store; or after a running server's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from .option import Parser

if TYPE_CHECKING:
    from ..cache.disk.board import Board
    from ..cache.disk.index import DiskIndex
    from ..cache.disk.store import PageStore
    from ..cache.page_keys import PageKey

EXAMPLES_OF_BAD = 20
"""Bad pages that `verify` prints one by one; --json has all."""


def run(argv: list[str]) -> int:
    """Runs one subcommand. Returns 0; 1 if something was found wrong or could not be done; 2 for a wrong target."""
    parser = Parser(
        "tierax cache",
        "Look after a disk cache (a directory, or the URL of an object store) or the cache of a running server.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, targets) in SUMMARIES.items():
        command = commands.add_parser(name, description=summary, help=summary)
        command.add_argument("target", metavar="|".join(targets), help=" or ".join(HELP[t] for t in targets))
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        if name == "verify":
            command.add_argument(
                "--delete", action="store_true", help="remove bad pages, and what hangs below them"
            )
        if name == "prune":
            command.add_argument("--size", required=True, help="how much may stay, e.g. 10GiB")
        if name == "clear":
            command.add_argument(
                "--namespace", metavar="HEX", help="only this one (or its first digits), as ls prints it"
            )
            command.add_argument("--tier", help="only this one of a server: device, host or disk")
        if name in ("warm", "pin", "unpin"):
            command.add_argument("--prompt", action="append", metavar="TEXT", help="a text, may be repeated")
            command.add_argument(
                "--file", help='a JSON object per line: {"prompt": …}, {"messages": …} or {"token_ids": …}'
            )
            command.add_argument(
                "--cache-salt", metavar="SALT", help="the salt of the requests that it is for"
            )
        if name == "unpin":
            command.add_argument("--id", action="append", help="a pin's id, as ls prints it; may be repeated")
        if "URL" in targets:
            command.add_argument("--api-key", metavar="KEY", help="of the server; else $TIERAX_API_KEY")
    args = parser.parse_args(argv)
    is_server = args.target.startswith(("http://", "https://"))
    _, targets = SUMMARIES[args.command]
    if ("URL" if is_server else "DIR") not in targets:
        from .errors import UsageError

        wanted = " and ".join(HELP[target] for target in targets)
        raise UsageError(f"tierax cache {args.command}", f"{args.target}: this is for {wanted}")
    if is_server:
        from .cache_server import on_server

        return on_server(args)
    if getattr(args, "tier", None) is not None:
        from .errors import UsageError

        raise UsageError("tierax cache clear", "--tier is for a running server; a directory is all disk")
    return _on_store(args)


def _on_store(args: argparse.Namespace) -> int:
    from ..cache.disk.local import is_store, local_path
    from ..cache.disk.store import PageStore, StoreError

    writes, command = COMMANDS[args.command]
    try:
        directory = local_path(args.target)
        if directory is not None and not is_store(directory):
            problem = "holds no disk cache of tierax" if directory.is_dir() else "no such directory"
            raise StoreError(f"{args.target}: {problem}")
        store = PageStore(args.target, read_only=not (writes or getattr(args, "delete", False)))
        try:
            return command(store, args)
        finally:
            store.close()
    except StoreError as error:
        print(f"tierax cache: error: {error}", file=sys.stderr)
        return 2


def _stat(store: PageStore, args: argparse.Namespace) -> int:
    index, orphans = _index(store)
    report = {
        "location": store.url,
        "namespaces": len(index.namespaces()),
        "pages": len(index),
        "bytes": index.bytes,
        "orphans": len(orphans),
        "free_bytes": store.free_bytes(),
        **_sharing(store),
    }
    free = "" if report["free_bytes"] is None else f", {size(report['free_bytes'])} free on the file system"
    lines = [
        store.url,
        f"{report['pages']} pages in {count(report['namespaces'], 'namespace')}, {size(index.bytes)}{free}",
    ]
    if orphans:
        lines.append(
            f"{count(len(orphans), 'page')} without the pages before them: useless, removed at the next start"
        )
    if report["replicas"]:
        lines.append(
            f"shared by {count(len(report['replicas']), 'server')} (one that died counts for a while)"
        )
        lines += [f"  {row['replica']}  uses {count(row['pages'], 'page')}" for row in report["replicas"]]
    if report["collector"]:
        lines.append(f"{report['collector']} collects; {count(report['doomed'], 'page')} will go next")
    return show(args, report, lines)


def _ls(store: PageStore, args: argparse.Namespace) -> int:
    index, _ = _index(store)
    rows = [
        {
            "namespace": namespace.hex(),
            "description": store.papers.description(namespace),
            "pages": stats.pages,
            "bytes": stats.bytes,
            "deepest": stats.deepest,
        }
        for namespace, stats in sorted(index.namespaces().items())
    ]
    lines = []
    for row in rows:
        description = ", ".join(f"{name} {value}" for name, value in row["description"].items())
        lines.append(
            f"{row['namespace']}  {row['pages']} pages, {size(row['bytes'])}, deepest {row['deepest']} pages"
        )
        lines.append(f"  {description or 'no description'}")
    return show(args, rows, lines or ["empty"])


def _verify(store: PageStore, args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ..cache.disk.upkeep import check_pages

    index, orphans = _index(store)
    keys = [page.key for page in store.list() if not page.only_parts]
    bad: dict[PageKey, str] = {}
    with tqdm(total=len(keys), unit="page", disable=not sys.stderr.isatty(), leave=False) as bar:
        for key, _, reason in check_pages(store, keys):
            # A server at work may have evicted it since it was listed.
            if reason not in (None, "missing"):
                bad[key] = reason
            bar.update()
    useless = [gone for key in bad for gone in index.remove(key, "corrupt")]
    # Where servers write, a head may be on its way, and orphans are their business.
    shared = bool(_sharing(store)["replicas"])
    doomed = dict.fromkeys(bad if shared else [*useless, *bad, *orphans])
    deleted = _delete(store, list(doomed)) if args.delete else 0
    report = {
        "pages": len(keys),
        "bad": [
            {"namespace": key.namespace.hex(), "key": key.key.hex(), "depth": key.depth, "reason": reason}
            for key, reason in bad.items()
        ],
        "orphans": len(orphans),
        "deleted": deleted,
    }
    lines = [f"{key.key.hex()}  {reason}" for key, reason in list(bad.items())[:EXAMPLES_OF_BAD]]
    if len(bad) > EXAMPLES_OF_BAD:
        lines.append(f"… and {len(bad) - EXAMPLES_OF_BAD} more")
    lines.append(
        f"{len(keys)} pages: {len(bad)} bad, {len(orphans)} without the pages before them, {deleted} deleted"
    )
    show(args, report, lines)
    return 1 if bad else 0


def _prune(store: PageStore, args: argparse.Namespace) -> int:
    from ..engine.config import ConfigError, parse_size
    from .errors import UsageError

    try:
        capacity = parse_size(args.size)
    except ConfigError as error:
        raise UsageError("tierax cache prune", str(error).replace("size:", "--size:", 1)) from None
    needed = _needed(store)
    index, doomed = _index(store, capacity, needed)
    if needed:
        print(f"tierax cache: {count(len(needed), 'page')} that servers use stay", file=sys.stderr)
    return _report_deletion(store, args, doomed, index.bytes)


def _clear(store: PageStore, args: argparse.Namespace) -> int:
    index, orphans = _index(store)
    described = store.papers.described()
    if args.namespace is None:
        chosen = {None}
    else:
        known = {*index.namespaces(), *described, *(key.namespace for key in orphans)}
        chosen = {name for name in known if name.hex().startswith(args.namespace.lower())}
        if len(chosen) != 1:
            from .errors import UsageError

            problem = "no namespace starts" if not chosen else f"{len(chosen)} namespaces start"
            raise UsageError("tierax cache clear", f"--namespace {args.namespace}: {problem} with that")
    (namespace,) = chosen
    doomed = index.clear(namespace) + [key for key in orphans if namespace in (None, key.namespace)]
    code = _report_deletion(store, args, doomed, index.bytes)
    for name in described | {key.namespace for key in doomed}:
        if namespace in (None, name):
            store.papers.forget(name)
    if namespace is None:
        store.papers.forget_index()
        _board(store).clear()
    return code


def _report_deletion(store: PageStore, args: argparse.Namespace, doomed: list[PageKey], left: int) -> int:
    deleted = _delete(store, doomed)
    report = {"deleted": deleted, "failed": len(doomed) - deleted, "bytes_left": left}
    lines = [f"{count(deleted, 'page')} deleted, {size(left)} left"]
    if deleted < len(doomed):
        lines.append(f"{count(len(doomed) - deleted, 'page')} could not be deleted")
    show(args, report, lines)
    return 0 if deleted == len(doomed) else 1


def _index(
    store: PageStore, capacity: int | None = None, needed: Collection[PageKey] = ()
) -> tuple[DiskIndex, list[PageKey]]:
    """An index of what is there, and the keys that it would not have: what is beyond the capacity, but for what servers
    need, and orphans, unless there are servers, which look after these."""
    from ..cache.disk.index import DiskIndex
    from ..cache.disk.upkeep import list_with_sizes

    index = DiskIndex(capacity)
    index.restore(store.papers.load_index())
    index.lock(needed)
    return index, index.add_listed(list_with_sizes(store), spare_orphans=bool(needed))


def _needed(store: PageStore) -> set[PageKey]:
    """What servers that share the store use just now."""
    notes = _board(store).read().notes.values()
    return {page for note in notes for page in (*note.stored, *note.writing)}


def _sharing(store: PageStore) -> dict[str, Any]:
    """Which servers share the store, as far as they tell."""
    from ..cache.disk.notes import NOBODY

    news = _board(store).read()
    rows = [
        {"replica": name.hex(), "pages": len(note.stored) + len(note.writing)}
        for name, note in sorted(news.notes.items())
    ]
    claim = news.claim
    holder = "" if claim is None or claim.holder == NOBODY else claim.holder.hex()
    return {"replicas": rows, "collector": holder, "doomed": 0 if claim is None else len(claim.doomed)}


def _board(store: PageStore) -> Board:
    import time

    from ..cache.disk.board import Board

    return Board(store, lease=0, clock=time.monotonic)


def _delete(store: PageStore, keys: list[PageKey]) -> int:
    """How many could be deleted; says why others could not."""
    from ..cache.disk.upkeep import delete_pages
    from ..cache.moves import Outcome

    outcomes = [outcome for _, outcome in delete_pages(store, keys)]
    failures = sorted({outcome.value for outcome in outcomes if outcome is not Outcome.OK})
    if failures:
        print(f"tierax cache: warning: deleting failed: {', '.join(failures)}", file=sys.stderr)
    return outcomes.count(Outcome.OK)


def show(args: argparse.Namespace, report: Any, lines: list[str]) -> int:
    print(json.dumps(report, indent=1) if args.json else "\n".join(lines))
    return 0


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(nbytes: int) -> str:
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


COMMANDS: dict[str, tuple[bool, Callable[[PageStore, argparse.Namespace], int]]] = {
    "stat": (False, _stat),
    "ls": (False, _ls),
    "verify": (False, _verify),
    "prune": (True, _prune),
    "clear": (True, _clear),
}
"""On a store: name -> whether it always writes, and the function."""
HELP = {
    "DIR": "what was given to --host-disk-cache-dir, a directory or a URL",
    "URL": "a running server, http://host:port",
}
SUMMARIES = {
    "stat": ("how much it holds", ("DIR", "URL")),
    "ls": ("what it holds, by namespace (model, dtypes, tenant)", ("DIR", "URL")),
    "verify": ("read and check every page; exit code 1 if any is bad", ("DIR",)),
    "prune": ("delete what was used longest ago, tails first, down to a size", ("DIR",)),
    "clear": ("drop all pages, or those of a namespace or tier; foreign files stay", ("DIR", "URL")),
    "warm": ("compute prompts now, so that they are cached when they come", ("URL",)),
    "pin": ("keep prefixes on the host whatever else is used", ("URL",)),
    "unpin": ("let go of pinned prefixes", ("URL",)),
}
"""Name -> what it does, and on which kinds of target."""
