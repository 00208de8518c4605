"""Comparison of the copies and values that several ranks hold under one name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.agreement.plan_messages import Digests
from holdfast.errors import StateError
from holdfast.format.values import Node, PerRankNode, TableNode, holds_live
from holdfast.wording import count

#: A table of values, and the ranks that all have it.
Shared = tuple[Sequence[int], Mapping[str, Node]]


@dataclass(frozen=True)
class Divergence:
    """A tensor whose copies differ: the first part that differs ("" if the tensor has only one part), and the groups of
    ranks with equal copies of that part, the lowest rank's group first."""

    name: str
    part: str
    groups: Sequence[Sequence[int]]


def diverged(names: Sequence[str], digests: Mapping[int, Digests]) -> tuple[Divergence, ...]:
    """The tensors among `names` whose copies differ between ranks, in that order; `digests` are by rank."""
    return tuple(
        found
        for index, name in enumerate(names)
        if (found := _divergence(name, {rank: parts[index] for rank, parts in digests.items()})) is not None
    )


def _divergence(name: str, held: Mapping[int, Mapping[str, bytes]]) -> Divergence | None:
    holders: dict[str, dict[bytes, list[int]]] = {}
    for rank, parts in held.items():
        for part, digest in parts.items():
            holders.setdefault(part, {}).setdefault(digest, []).append(rank)
    for part, groups in sorted(holders.items()):
        if len(groups) > 1:
            return Divergence(name, part if len(holders) > 1 else "", sorted(groups.values()))
    return None


def describe(found: Sequence[Divergence]) -> str:
    """The error text about diverged tensors, of which there is at least one."""
    first = found[0]
    more = f" (and {count(len(found) - 1, 'more tensor')})" if len(found) > 1 else ""
    sides = " and ".join(_listed(group) for group in first.groups[:2])
    part = f", at [{first.part}]" if first.part else ""
    return (
        f"Tensor {first.name!r} has copies on several ranks without a declared sharding, "
        f"and they differ between ranks {sides}{part}{more}."
    )


def merge_values(tables: Sequence[Shared]) -> dict[str, Node]:
    """Merge the tables of all ranks into one. A path that several ranks hold must have one value, except that dicts may
    have different keys on different ranks, which are merged, if one of them holds a tensor or an object: ranks hold
    different parts of a model, but values that only one rank has are not shared. A path that is a `PerRankNode` on one
    rank must exist on all ranks.

    Raises:
        StateError: ranks disagree; the error names the path and the ranks.
    """
    united: dict[str, Node] = {}
    origin: dict[str, int] = {}
    #: For each dict that has other keys on another rank, that rank.
    other_keys: dict[str, int] = {}
    for ranks, table in tables:
        for path, node in table.items():
            if path not in united:
                united[path], origin[path] = node, ranks[0]
                continue
            known = united[path]
            if isinstance(known, TableNode) and isinstance(node, TableNode) and known.kind == node.kind == "dict":
                if known.keys != node.keys:
                    united[path] = TableNode("dict", tuple(dict.fromkeys((*known.keys, *node.keys))))
                    if set(known.keys) != set(node.keys):
                        other_keys.setdefault(path, ranks[0])
            elif not _same(known, node):
                raise StateError(
                    f"Value {path!r} differs between rank {origin[path]} and rank {ranks[0]}.",
                    code="state.diverged",
                    action="Make it equal on all ranks, or save it as holdfast.PerRank(value).",
                    path=path,
                )
    for path, rank in other_keys.items():
        if not holds_live(path, united):
            raise StateError(
                f"The dict {path!r} has other keys on rank {rank} than on rank {origin[path]}, and holds nothing but "
                "values: a load would give the keys of all ranks to each.",
                code="state.diverged",
                action="Give it the same keys on all ranks, or save it as holdfast.PerRank(the dict).",
                path=path,
            )
    for path in (path for path, node in united.items() if isinstance(node, PerRankNode)):
        _check_on_all(path, tables)
    return united


def _check_on_all(path: str, tables: Iterable[Shared]) -> None:
    absent = sorted(rank for ranks, table in tables if path not in table for rank in ranks)
    if absent:
        raise StateError(
            f"{path!r} is a PerRank on some ranks, but is missing on ranks {_listed(absent)}.",
            code="state.per_rank",
            action="Put a PerRank there on every rank of the save: PerRank(None) on ranks with nothing to keep.",
            path=path,
            rank=absent[0],
        )


def _same(a: Node, b: Node) -> bool:
    """Whether two values are equal in type and bits: 1, True and 1.0 differ, and so do 0.0 and -0.0."""
    return type(a) is type(b) and msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}{', ...' if len(ranks) > 8 else ''}]"
