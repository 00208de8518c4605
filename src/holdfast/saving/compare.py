"""What several ranks hold under one name: is it the same?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.errors import StateError
from holdfast.format.values import Node, Table


def diverged(digests: Sequence[Mapping[str, bytes]]) -> dict[str, list[list[int]]]:
    """Tensors whose copies differ, each with the groups of ranks that hold the same, the lowest rank's group first."""
    holders: dict[str, dict[bytes, list[int]]] = {}
    for rank, named in enumerate(digests):
        for name, digest in named.items():
            holders.setdefault(name, {}).setdefault(digest, []).append(rank)
    return {name: sorted(groups.values()) for name, groups in sorted(holders.items()) if len(groups) > 1}


def divergence(found: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """What to say about diverged tensors."""
    name, groups = next(iter(found.items()))
    more = f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""
    sides = " and ".join(_ranks(group) for group in groups[:2])
    return f"Tensor {name!r} is held by several ranks undeclared, and its copies differ between ranks {sides}{more}."


def unite(tables: Mapping[int, Mapping[str, Node]]) -> dict[str, Node]:
    """The tables of ranks in one. A path that several ranks hold must have one value; dicts may have other keys on
    other ranks, and are united."""
    united: dict[str, Node] = {}
    origin: dict[str, int] = {}
    for rank, table in tables.items():
        for path, node in table.items():
            if path not in united:
                united[path], origin[path] = node, rank
                continue
            known = united[path]
            if isinstance(known, Table) and isinstance(node, Table) and known.kind == node.kind == "dict":
                united[path] = Table("dict", tuple(dict.fromkeys((*known.keys, *node.keys))))
            elif not _same(known, node):
                raise StateError(
                    f"Value {path!r} differs between rank {origin[path]} and rank {rank}.",
                    code="state.diverged",
                    action="Make it equal on all ranks, or save it as holdfast.PerRank(value).",
                    path=path,
                )
    return united


def _same(a: Node, b: Node) -> bool:
    """Equality of type and bits: 1, True and 1.0 differ, and so do 0.0 and -0.0."""
    return type(a) is type(b) and msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}{', ...' if len(ranks) > 8 else ''}]"
