"""The radix tree as a picture can show it: who hangs below whom, which tier has what, and what goes first.

Never token ids: a picture tells how prompts are cached, not what they say.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ..cache.page_keys import PageKey
from ..cache.radix_tree import DEVICE, HOST, TIERS

if TYPE_CHECKING:
    from ..cache.disk.index import DiskIndex
    from ..cache.radix_tree import Node
    from ..cache.tiered_tree import TieredTree

COLUMNS = ("parent", "pages", "device", "host", "disk", "heat", "uses", "in_use", "hidden")
_HEAT = COLUMNS.index("heat")


def picture(tree: TieredTree, index: DiskIndex | None, limit: int) -> dict[str, Any]:
    """The first `limit` nodes, nearest to the roots first, as rows of `COLUMNS`. In the engine's thread, which waits for it.

    `parent` is the row of the parent, or -1 - n below the n-th namespace. `pages` are the node's, `device`, `host` and
    `disk` how many leading ones of them each tier has. `heat` is 0 for what goes first and 1 for what goes last, by
    the policy of the highest tier that has the node. `hidden` counts children that did not fit.
    """
    roots = list(tree.tree.roots.values())
    queue: deque[tuple[int, Node, Node]] = deque()
    for place, root in enumerate(roots):
        queue.extend((-1 - place, child, root) for child in root.children.values())
    rows: list[list[Any]] = []
    orders: tuple[list[tuple[Any, int]], ...] = tuple([] for _ in TIERS)
    while queue and len(rows) < limit:
        parent, node, root = queue.popleft()
        place = len(rows)
        if node.children:
            queue.extend([(place, child, root) for child in node.children.values()])
        device, host = node.runs
        level = DEVICE if device.pages else HOST
        run = node.runs[level]
        if run.rank is not None and not run.lock:
            policy = tree.tiers[level].policy
            # Of equals the deeper one goes first.
            orders[level].append(((policy.lane(run), policy.priority(run), -node.end), place))
        on_disk = 0 if index is None else _stored(node, root, index)
        in_use = device.lock > 0
        rows.append(
            [parent, node.size, len(device.pages), len(host.pages), on_disk, 1.0, node.uses, in_use, 0]
        )
    for order in orders:
        order.sort()
        for number, (_, place) in enumerate(order):
            rows[place][_HEAT] = round(number / (len(order) - 1), 3) if len(order) > 1 else 0.5
    hidden_roots = 0
    for parent, _, _ in queue:
        if parent < 0:
            hidden_roots += 1
        else:
            rows[parent][-1] += 1
    return {
        "columns": COLUMNS,
        "nodes": rows,
        "namespaces": len(roots),
        "hidden_roots": hidden_roots,
        "truncated": bool(queue),
    }


def _stored(node: Node, root: Node, index: DiskIndex) -> int:
    """Leading pages of a node that the disk has; heads are there before tails, so a look at the last one mostly does."""
    assert node.parent is not None
    keys = node.page_keys()
    before = keys[-2] if len(keys) > 1 else node.parent.page_keys()[-1]
    if index.is_stored(PageKey(root.page_keys()[0], keys[-1], before, node.end - 1)):
        return node.size
    return index.match(node.names(0, node.size))
