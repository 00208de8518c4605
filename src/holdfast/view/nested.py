"""Values and tensors at and below a name, in nested containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.format import values as value_codec
from holdfast.format.values import Node, Open, TableNode, TensorRef


def nested(nodes: Mapping[str, Node], names: Iterable[str], root: str) -> dict[str, Node]:
    """The nodes at and below `root`, with nodes for the tensors `names` too; each container lists its entries.

    A path that is only a part of names, or whose saved node lists no entries, becomes a dictionary: these are modules,
    optimizers, and parameters with slots.
    """
    found = {path: nodes[path] for path in nodes if _is_below(path, root)}
    for name in names:
        if _is_below(name, root):
            found.setdefault(name, TensorRef())
    children: dict[str, dict[str, None]] = {}
    for path in sorted(found):
        at = path
        while at != root:
            above, _, last = at.rpartition("/")
            known = children.setdefault(above, {})
            if last in known:
                break
            known[last] = None
            at = above
    for path, below in children.items():
        if isinstance(found.get(path, Open("dict")), Open):
            found[path] = TableNode("dict", tuple(below))
    return {path: TableNode("dict", ()) if isinstance(node, Open) else node for path, node in found.items()}


def tensors_in(nodes: Mapping[str, Node]) -> list[str]:
    """The names of all tensors that the nodes refer to."""
    return list(dict.fromkeys(value_codec.tensors(nodes)))


def _is_below(path: str, root: str) -> bool:
    return not root or path == root or path.startswith(root + "/")
