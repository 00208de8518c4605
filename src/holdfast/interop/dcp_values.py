"""The values of a DCP folder: each is a pickle of its own, and is read when it is first looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from threading import RLock
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.format import values
from holdfast.format.names import component, join, shown
from holdfast.format.values import Items, Node, Open, TableNode, TensorRef, TorchValue
from holdfast.interop.dcp_metadata import DcpMetadata, Item, StatePath, name_of
from holdfast.interop.foreign_format import ForeignFolder, damaged, unreadable
from holdfast.interop.pickle_machine import ForbiddenGlobalError, PickledObject, PickleError, UnknownGlobal
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows
from holdfast.interop.torch_globals import PickledTensor, TorchSize

#: Most nodes of one value: a pickle can refer to one object many times, and a table cannot.
_MAX_NODES: Final = 1 << 20


class DcpNodes(Mapping[str, Node]):
    """The table of values of a DCP folder. A look-up of what cannot be read raises; listing the paths reads the values
    once, and lists those that cannot be read, too."""

    def __init__(self, folder: ForeignFolder, metadata: DcpMetadata) -> None:
        self._folder = folder
        self._metadata = metadata
        self._lock = RLock()

    def __getitem__(self, path: str) -> Node:
        found = self._table[path]
        if isinstance(found, HoldfastError):
            raise found
        return found

    def __contains__(self, path: object) -> bool:
        return path in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    @cached_property
    def _table(self) -> dict[str, Node | HoldfastError]:
        with self._lock:
            table: dict[str, Node | HoldfastError] = {}
            windows = Windows(self._folder.storage)
            for path, item in sorted(self._metadata.values.values(), key=lambda entry: entry[1][:2]):
                table.update(self._nodes(name_of(path), item, windows))
            return {**_containers(self._metadata), **table}

    def _nodes(self, name: str, item: Item, windows: Windows) -> Mapping[str, Node | HoldfastError]:
        place = ArchivePlace(windows, item.file, item.start, item.nbytes)
        path = self._folder.path(item.file)
        try:
            return nodes_of(name, TorchArchive(place).value())
        except ForbiddenGlobalError as error:
            action = "Leave it out with select=, or load it with dcp.load and save it again as plain values."
            return {name: unreadable(path, f"holds {shown(name):.200}, which is refused: {error}", action=action)}
        except PickleError as error:
            return {name: unreadable(path, f"holds {shown(name):.200}, which cannot be read: {error}")}
        except ArchiveError as error:
            return {name: damaged(path, f"holds no {shown(name):.200} at byte {item.start}: {error}")}


def nodes_of(name: str, value: object, tensors: dict[str, PickledTensor] | None = None) -> dict[str, Node]:
    """The nodes of one value, at and below `name`. Tensors in it go into `tensors`, by their names.

    Raises `PickleError` for what is no value, and for a tensor without `tensors`.
    """
    found: dict[str, Node] = {}
    left = [(name, value, 0)]
    while left:
        path, item, depth = left.pop()
        if depth > values.MAX_DEPTH or len(found) > _MAX_NODES:
            raise PickleError("it is nested too deeply, or refers to one object too often")
        if isinstance(item, TorchSize):
            found[path] = TorchValue("size", ",".join(map(str, item)))
        elif isinstance(item, TorchValue):
            found[path] = item
        elif isinstance(item, PickledTensor):
            if tensors is None:
                raise PickleError("a tensor is inside a value")
            tensors[path], found[path] = item, TensorRef()
        elif isinstance(item, PickledObject | UnknownGlobal):
            raise ForbiddenGlobalError(item.name)
        elif (leaf := values.leaf(item)) is not None:
            found[path] = leaf
        elif type(item) in (dict, OrderedDict, list, tuple) and (held := values.container(item, path)) is not None:
            found[path], children = held
            left += [(join(path, child), part, depth + 1) for child, part in children]
        else:
            raise PickleError(f"it has an object of a type that is no value ({type(item).__name__})")
    return found


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
