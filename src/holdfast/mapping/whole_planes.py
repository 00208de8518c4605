"""The check that the planes of a tensor stay together: it consists of several tensors, and a part of them is none.

Pure. It looks at the result of all rules, so rules may move planes one by one if they arrive together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from holdfast.errors import IncompatibleError
from holdfast.format import values
from holdfast.format.names import plane_component
from holdfast.format.values import Node, PlanesNode
from holdfast.mapping.draft import CheckpointTable
from holdfast.mapping.parts import StoredTensor, as_stored

_MARK = "/%plane="


def check_whole_planes(
    table: CheckpointTable,
    stored: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    nodes: Mapping[str, Node],
) -> None:
    """Refuse a table in which a tensor lacks some of its planes, has those of another one, or has reshaped ones. All
    of them may be gone, and be plain tensors under other names. The other arguments are those before the rules.

    Raises:
        IncompatibleError: code ``incompatible.planes``.
    """
    owners: dict[tuple[str, str], set[str]] = defaultdict(set)
    for owner, planes in _planes_by_tensor({*stored, *aliases}).items():
        for plane in planes:
            name = f"{owner}/{plane}"
            owners[aliases.get(name, name), plane].add(owner)
    for name, planes in _planes_by_tensor({*table.stored, *table.aliases}).items():
        node = _planes_node(name, table.nodes)
        if node is None:
            raise _mixed(name, f"gets {_listed(planes)}, but not the tensor that they belong to")
        if lacking := [plane for plane in map(plane_component, node.planes) if plane not in planes]:
            raise _mixed(name, f"keeps {_listed(planes)}, but not {_listed(lacking)}")
        origins = {plane: _origin(f"{name}/{plane}", table, stored) for plane in planes}
        sources = [owners[origin, plane] if origin else set() for plane, origin in origins.items() if origin != ""]
        if sources and not any(_planes_node(owner, nodes) == node for owner in set.intersection(*sources)):
            raise _mixed(name, "gets planes of several tensors, or such that a rule has changed")


def chosen_in_part(chosen: Collection[str], names: Collection[str]) -> IncompatibleError | None:
    """The error for a selection `chosen` of `names` that has a part of a tensor's planes; None where it has none."""
    every = _planes_by_tensor(names)
    for name, planes in _planes_by_tensor(chosen).items():
        if lacking := [plane for plane in every[name] if plane not in planes]:
            return _mixed(name, f"is selected with {_listed(planes)}, but not {_listed(lacking)}")
    return None


def _mixed(name: str, problem: str) -> IncompatibleError:
    """The error for a tensor that would be a part of what was saved, or a mixture; `problem` follows its name."""
    return IncompatibleError(
        f"Tensor {name!r} consists of planes that belong together, but it {problem}.",
        code="incompatible.planes",
        action="Select, drop and rename the tensor by its own name, which takes all of its planes.",
        tensor=name,
    )


def _planes_by_tensor(names: Collection[str]) -> dict[str, list[str]]:
    """The components of planes among `names`, by the tensor that they belong to."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(name for name in names if _MARK in name):
        owner, _, plane = name.rpartition("/")
        found[owner].append(plane)
    return found


def _planes_node(name: str, nodes: Mapping[str, Node]) -> PlanesNode | None:
    """The planes of the tensor `name`; None if it has none."""
    node = nodes.get(name)
    bare = None if node is None else values.bare(node)
    return bare if isinstance(bare, PlanesNode) else None


def _origin(name: str, table: CheckpointTable, stored: Mapping[str, StoredTensor]) -> str | None:
    """The name under which the plane `name` was stored; None where a rule has made other elements of it (a cast is none
    of these), and "" where it has no elements."""
    name = table.aliases.get(name, name)
    parts = table.parts.get(name)
    if parts is None:
        return name
    sources = {part.source for part in parts}
    (source,) = sources if len(sources) == 1 else ("" if not parts else None,)
    return source if not source or parts == as_stored(source, stored[source]).parts else None


def _listed(planes: Collection[str]) -> str:
    names = ", ".join(plane.removeprefix(_MARK[1:]) for plane in planes)
    return f"{'the planes' if len(planes) > 1 else 'the plane'} {names}"
