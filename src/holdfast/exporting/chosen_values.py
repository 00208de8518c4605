"""The values that an export writes, and the keys that the names of values and tensors stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.errors import HoldfastError
from holdfast.format import values
from holdfast.format.names import is_rank_component, join, parse_component, split
from holdfast.format.patterns import Globs
from holdfast.format.values import Items, Leaf, Node, TableNode

#: A path in nested containers: keys of dicts as texts, indexes of lists.
KeyPath = tuple[str | int, ...]


def readable_nodes(nodes: Mapping[str, Node], select: Globs) -> dict[str, Node]:
    """The nodes without those that cannot be read and that `select` leaves out. Raises the error of any other."""
    found: dict[str, Node] = {}
    left_out: dict[str, set[str]] = {}
    for path in nodes:
        try:
            found[path] = nodes[path]
        except HoldfastError:
            if path in select:
                raise
            above, _, key = path.rpartition("/")
            left_out.setdefault(above, set()).add(key)
    for above, keys in left_out.items():
        node = found.get(above)
        if isinstance(node, TableNode):
            found[above] = TableNode(node.kind, tuple(key for key in node.keys if key not in keys))
    return found


def value_paths(nodes: Mapping[str, Node]) -> Iterator[str]:
    """The paths of the values, sorted: those of single ones, and of lists and tuples of them, but not of dicts."""
    found: set[str] = set()
    for path in sorted(nodes):
        above = split(path)
        if any("/".join(above[:stop]) in found for stop in range(1, len(above))):
            continue
        if _is_value(path, nodes):
            found.add(path)
            yield path


def _is_value(path: str, nodes: Mapping[str, Node]) -> bool:
    node = nodes[path]
    state = values.bare(node)
    if isinstance(state, Leaf):
        return True
    if isinstance(state, TableNode):
        return values.registration(node) is not None and not _holds_tensors(path, nodes)
    if isinstance(state, Items) and state.kind == "list" and _has_dicts(path, nodes):
        return False
    return not _holds_tensors(path, nodes)


def _holds_tensors(path: str, nodes: Mapping[str, Node]) -> bool:
    """Whether there is a tensor at or below a path, or a module or an optimizer, which have tensors."""
    node = nodes[path]
    if isinstance(values.bare(node), values.TensorRef | values.PlanesNode | values.Open):
        return True
    return any(_holds_tensors(join(path, name), nodes) for name in values.children(node))


def _has_dicts(path: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a list has a dict, or a list with one: such lists are divided like dicts."""
    for name in values.children(nodes[path]):
        child = join(path, name)
        state = values.bare(nodes[child])
        if isinstance(state, TableNode):
            return True
        if isinstance(state, Items) and state.kind == "list" and _has_dicts(child, nodes):
            return True
    return False


def key_path(name: str, nodes: Mapping[str, Node]) -> KeyPath:
    """The keys and indexes that lead to the tensor or value with this name."""
    components = split(name)
    keys: list[str | int] = []
    for at, component in enumerate(components):
        node = nodes.get("/".join(components[:at]))
        in_list = node is not None and isinstance(values.bare(node), Items)
        keys.append(int(component) if in_list else plain_key(component))
    return tuple(keys)


def plain_key(component: str) -> str:
    """A component of a name as the text of the key that it stands for."""
    is_reserved = is_rank_component(component) or component.startswith("%plane=")
    return component if is_reserved else str(parse_component(component))
