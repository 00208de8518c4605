"""The kinds of stored and live values: which stored value may take the place of a live one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Final

import numpy as np
import torch

from holdfast.format import values
from holdfast.format.names import parse_component
from holdfast.format.values import Node, RecordNode, TableNode
from holdfast.frameworks.known_types import unwrapped
from holdfast.frameworks.piecewise import Piecewise
from holdfast.frameworks.registry import adapter_of
from holdfast.state.containers import maker
from holdfast.state.local_placements import torch_value
from holdfast.state.per_rank import PerRank
from holdfast.state.registered_types import registered

#: Kinds of dicts whose items an empty one can take.
DICTS: Final = ("dict", "ordered")


class RecordTypes:
    """The types of the NamedTuples of a live state, for those of its values that are rebuilt."""

    def __init__(self) -> None:
        self._makers: dict[tuple[str, tuple[str, ...]], Callable[..., object]] = {}

    def hold_only_values(self, item: object) -> bool:
        """Whether no part of `item` has to keep its identity. Notes the types of NamedTuples on the way."""
        item = unwrapped(item)
        if registered(item) is not None:
            return not isinstance(item, torch.Tensor | np.ndarray)
        if isinstance(item, (torch.Tensor, Piecewise, torch.Generator, PerRank)):
            return False
        if isinstance(item, dict):
            return all(self.hold_only_values(part) for part in item.values())
        if isinstance(item, (list, tuple)):
            if values.is_record(item):
                self._makers[type(item).__name__, item._fields] = maker(type(item))
            return all(self.hold_only_values(part) for part in item)
        return adapter_of(item) is None

    def type_of(self, name: str, fields: tuple[str, ...]) -> Callable[..., object]:
        """The type that was noted for NamedTuples of class `name` with these `fields`, or a new one."""
        return self._makers.get((name, fields)) or values.record_type(name, fields)


def is_dict_of_values(nodes: Mapping[str, Node], path: str) -> bool:
    """Whether `path` has a stored dict whose items are all values, so that an empty dict can take them."""
    node = nodes.get(path)
    return isinstance(node, TableNode) and node.kind in DICTS and not values.holds_live(path, nodes)


def is_list_of_live(nodes: Mapping[str, Node], path: str, kind: str) -> bool:
    """Whether `path` has a stored list or tuple of that kind with tensors or objects: it is bound item by item."""
    node = nodes.get(path)
    return isinstance(node, values.Items) and node.kind == kind and values.holds_live(path, nodes)


def may_replace(item: object, node: Node) -> bool:
    """Whether the value that is stored as `node` may take the place of the live value `item`.

    A plain value gives way to any value. A value of a registered type gives way to its own kind; one of any other type,
    such as a deque or a set, could not have been saved, so what is stored is something else.
    """
    registration = registered(item)
    if registration is not None:
        return values.registration(node) == registration.name
    return isinstance(item, (dict, list, tuple)) or (values.leaf(item) or torch_value(item)) is not None


def is_of_class(item: object, node: Node | None) -> bool:
    """Whether a live NamedTuple has the class name of the one that is stored as `node`, if one is."""
    return not isinstance(node, RecordNode) or node.name == type(item).__name__


def restore_order(item: MutableMapping[object, object], node: Node | None) -> None:
    """Give the entries of a live dict the order of the OrderedDict that is stored as `node`, if one is. Entries that it
    does not have come last."""
    if isinstance(node, TableNode) and node.kind == "ordered":
        stored = dict.fromkeys(key for key in map(parse_component, node.keys) if key in item)
        for key in [*stored, *(key for key in item if key not in stored)]:
            item[key] = item.pop(key)
