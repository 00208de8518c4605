"""The values of a DCP folder: each is a pickle of its own, and is read when it is first looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType

from holdfast.errors import HoldfastError
from holdfast.format.names import component, shown
from holdfast.format.values import Items, Node, Open, TableNode, TensorRef
from holdfast.interop.dcp_metadata import DcpMetadata, StatePath, name_of
from holdfast.interop.foreign_format import ForeignFolder, damaged, unreadable
from holdfast.interop.pickle_machine import ForbiddenGlobalError, PickleError
from holdfast.interop.pickled_tree import CheckedNodes, nodes_of
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows

#: The values that the object of an archive stands for: itself, or that inside it, or none.
ContentOf = Callable[[object], Iterable[object]]


def whole_content(value: object) -> Iterable[object]:
    """The object itself, as DCP stores it."""
    return (value,)


def dcp_nodes(
    folder: ForeignFolder,
    metadata: DcpMetadata,
    more: Mapping[str, Node | PickleError] = MappingProxyType({}),
    value_of: ContentOf = whole_content,
) -> CheckedNodes:
    """The table of values of a DCP folder, and `more` of them."""
    return CheckedNodes(partial(_table, folder, metadata, more, value_of))


def _table(
    folder: ForeignFolder, metadata: DcpMetadata, more: Mapping[str, Node | PickleError], value_of: ContentOf
) -> dict[str, Node | HoldfastError]:
    table: dict[str, Node | HoldfastError] = {}
    windows = Windows(folder.storage)
    for path, item in sorted(metadata.values.values(), key=lambda entry: entry[1][:2]):
        place = ArchivePlace(windows, item.file, item.start, item.nbytes)
        table.update(archived_nodes(folder, name_of(path), place, loader="dcp.load", value_of=value_of))
    beside: dict[str, Node | HoldfastError] = {
        name: unreadable(folder.location.url, f"holds {shown(name):.200}, which cannot be read: {node}")
        if isinstance(node, PickleError)
        else node
        for name, node in more.items()
    }
    return {**_containers(metadata), **table, **beside}


def archived_nodes(
    folder: ForeignFolder, name: str, place: ArchivePlace, *, loader: str, value_of: ContentOf = whole_content
) -> Mapping[str, Node | HoldfastError]:
    """The nodes of a value that has an archive of its own; an error where it cannot be read. Messages name `loader`, a
    function that reads it."""
    path = folder.path(place.key)
    try:
        found: dict[str, Node | HoldfastError] = {}
        for value in value_of(TorchArchive(place).value()):
            found.update(nodes_of(name, value))
        return found
    except ForbiddenGlobalError as error:
        action = f"Leave it out with select=, or load it with {loader} and save it again as plain values."
        return {name: unreadable(path, f"holds {shown(name):.200}, which is refused: {error}", action=action)}
    except PickleError as error:
        return {name: unreadable(path, f"holds {shown(name):.200}, which cannot be read: {error}")}
    except ArchiveError as error:
        return {name: damaged(path, f"holds no {shown(name):.200} at byte {place.start}: {error}")}


def _containers(metadata: DcpMetadata) -> dict[str, Node]:
    """The nodes of the dicts and lists that DCP took apart, and of tensors in lists.

    A dict with tensors is open, since it may be that of a module.
    """
    tensors = [tensor.path for tensor in metadata.tensors.values()]
    paths: list[StatePath] = [*tensors, *(path for path, _ in metadata.values.values())]
    children: dict[StatePath, dict[str | int, None]] = {}
    for path in paths:
        for depth in range(len(path)):
            children.setdefault(path[:depth], {})[path[depth]] = None
    live = {path[:depth] for path in tensors for depth in range(len(path))}
    nodes: dict[str, Node] = {"": Open("dict")}
    for path, keys in children.items():
        if not path:
            continue
        if all(type(key) is int for key in keys) and sorted(map(int, keys)) == list(range(len(keys))):
            nodes[name_of(path)] = Items("list", len(keys))
        elif path in live:
            nodes[name_of(path)] = Open("dict")
        else:
            nodes[name_of(path)] = TableNode("dict", tuple(component(str(key)) for key in keys))
    nodes |= {name_of(path): TensorRef() for path in tensors if type(path[-1]) is int}
    return nodes
