"""The object of a pickle as a flat table: tensors by name, and nodes of values by path.

Names are those that a live state of the same form has, also inside optimizers (`torch_optimizers`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from typing import Final, NamedTuple

from holdfast.errors import HoldfastError, StateError
from holdfast.format import values
from holdfast.format.names import join, rank_component
from holdfast.format.values import Leaf, Node, Open, PerRankNode, TensorRef, TorchValue
from holdfast.interop.item_places import TensorItems
from holdfast.interop.pickle_machine import PickledObject, PickleError, UnknownGlobal
from holdfast.interop.torch_globals import PickledTensor, TorchSize
from holdfast.interop.torch_optimizers import optimizer_parts

#: Most nodes of one tree, and most characters of their paths: a pickle can refer to one object many times, and a table
#: cannot.
_MAX_NODES: Final = 1 << 20
_MAX_CHARACTERS: Final = 1 << 28
_CONTAINERS: Final = (dict, OrderedDict, Counter, list, tuple)


class RankParts(NamedTuple):
    """A value of which each of `world_size` ranks has a part of its own."""

    parts: Mapping[int, object]
    world_size: int


@dataclass(frozen=True)
class PickledTree:
    """The tensors of an object, those in a pickle and those in `items` of files, and its nodes.

    In place of the node of what is no value stands the reason.
    """

    tensors: dict[str, PickledTensor] = field(default_factory=dict)
    items: dict[str, TensorItems] = field(default_factory=dict)
    nodes: dict[str, Node | PickleError] = field(default_factory=dict)

    def open_nodes(self, refused: Callable[[str, PickleError], HoldfastError]) -> dict[str, Node | HoldfastError]:
        """The nodes below a root that is an open dict. What is no value has the error that `refused` makes of its
        name and the reason."""
        found = {
            name: refused(name, each) if isinstance(each, PickleError) else each for name, each in self.nodes.items()
        }
        return {**found, "": Open("dict")}


class CheckedNodes(Mapping[str, Node]):
    """A table of values of which some cannot be read. A look-up of such a one raises; listing the paths lists it.

    `read` reads the table, when it is first needed. Safe for several threads.
    """

    def __init__(self, read: Callable[[], Mapping[str, Node | HoldfastError]]) -> None:
        self._read = read
        self._lock = RLock()

    @cached_property
    def _table(self) -> Mapping[str, Node | HoldfastError]:
        with self._lock:
            return self._read()

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


def nodes_of(name: str, value: object, tensors: dict[str, PickledTensor] | None = None) -> dict[str, Node]:
    """The nodes of one value, at and below `name`. Tensors in it go into `tensors`, by their names.

    Raises `PickleError` for what is no value, and for a tensor without `tensors`.
    """
    tree = pickled_tree(name, value)
    if tree.items or (tree.tensors and tensors is None):
        raise PickleError("a tensor is inside a value")
    nodes: dict[str, Node] = {}
    for path, node in tree.nodes.items():
        if isinstance(node, PickleError):
            raise node
        nodes[path] = node
    if tensors is not None:
        tensors |= tree.tensors
    return nodes


def pickled_tree(name: str, value: object) -> PickledTree:
    """The tree of `value`, whose root has this name. An error in it stands for what could not be read.

    Raises `PickleError` for a tree without an end.
    """
    tree, dicts = PickledTree(), set[str]()
    left: list[tuple[str, object]] = []
    num_characters = 0

    def add(above: str, parts: Iterable[tuple[str, object]]) -> None:
        """Note parts to visit. Counts them here: one list that holds itself many times must not fill the memory."""
        nonlocal num_characters
        for below, part in parts:
            path = join(above, below)
            num_characters += len(path)
            if len(tree.nodes) + len(left) > _MAX_NODES or num_characters > _MAX_CHARACTERS:
                raise PickleError("it refers to one object too often")
            left.append((path, part))

    add("", [(name, value)])
    while left:
        path, item = left.pop()
        if path.count("/") > name.count("/") + values.MAX_DEPTH:
            raise PickleError("it is nested too deeply")
        if isinstance(item, PickledTensor):
            tree.tensors[path] = item
            tree.nodes[path] = TensorRef()
        elif isinstance(item, TensorItems):
            tree.items[path] = item
            tree.nodes[path] = TensorRef()
        elif isinstance(item, RankParts):
            tree.nodes[path] = PerRankNode(item.world_size)
            add(path, ((rank_component(rank), part) for rank, part in item.parts.items()))
        elif (parts := optimizer_parts(item)) is not None:
            tree.nodes[path] = Open("optimizer")
            tree.nodes.update((join(path, below), node) for below, node in parts.nodes)
            add(path, parts.values)
        else:
            try:
                tree.nodes[path], children = _node(item, path)
            except (PickleError, StateError) as error:
                tree.nodes[path] = error if isinstance(error, PickleError) else PickleError(str(error))
                continue
            if isinstance(item, dict):
                dicts.add(path)
            add(path, children)
    # A dict with tensors may be that of a module, whose node lists no entries.
    tree.nodes.update(dict.fromkeys(_above([*tree.tensors, *tree.items]) & dicts, Open("dict")))
    return tree


def _node(item: object, path: str) -> tuple[Node, Sequence[tuple[str, object]]]:
    """The node of a value, and its children. Raises `PickleError` or `StateError` for what is no value."""
    leaf: Leaf | None
    if isinstance(item, PickleError):
        raise item
    if isinstance(item, TorchSize):
        leaf = TorchValue("size", ",".join(map(str, item)))
    else:
        leaf = item if isinstance(item, TorchValue) else values.leaf(item)
    if leaf is not None:
        return leaf, ()
    if type(item) in _CONTAINERS and (held := values.container(item, path)) is not None:
        return held
    kind = item.name.replace(" ", ".") if isinstance(item, PickledObject | UnknownGlobal) else type(item).__name__
    raise PickleError(f"it has an object of {kind}, which is no value")


def _above(names: Iterable[str]) -> set[str]:
    """The paths of all containers that hold one of `names`."""
    found: set[str] = set()
    for name in names:
        above = name
        while above:
            above = above.rpartition("/")[0]
            if above in found:
                break
            found.add(above)
    return found
