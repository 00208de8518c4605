"""Live objects that a state has under several names: what is stored under each of them must be equal.

A load changes such an object once for each name. Were the stored values to differ, the last one would stay. `Matcher`
compares tensors with several names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import nn

from holdfast.format import values
from holdfast.format.names import own_part
from holdfast.format.values import Node, Stateful, TableNode
from holdfast.frameworks.module import innermost
from holdfast.frameworks.registry import adapter_of
from holdfast.state.differences import Mismatches
from holdfast.state.match import Matcher
from holdfast.state.registered_types import registered


def is_changed_in_place(item: object) -> bool:
    """Whether a load changes `item`, which is neither a tensor nor a `PerRank`, instead of replacing it."""
    if isinstance(item, (dict, list, torch.Generator)):
        return registered(item) is None
    return registered(item) is None and not isinstance(item, tuple) and adapter_of(item) is not None


class SameObjects:
    """The first name of each live object that a load changes in place."""

    def __init__(
        self,
        matcher: Matcher,
        mismatches: Mismatches,
        *,
        is_selected: Callable[[str], bool],
        stored_below: Callable[[str], Iterator[str]],
    ) -> None:
        self._matcher = matcher
        self._mismatches = mismatches
        self._is_selected = is_selected
        self._stored_below = stored_below
        #: The first path of each object by its id, with the object itself, so that no other gets its id.
        self._places: dict[int, tuple[str, object]] = {}

    def note(self, path: str, item: object, nodes: Mapping[str, Node]) -> None:
        """Note that `item` is at `path`. If it has a name already, require that both names store the same."""
        item = innermost(item) if isinstance(item, nn.Module) else item
        first, _ = self._places.setdefault(id(item), (path, item))
        if first != path:
            for name in (path, *self._stored_below(path)):
                original = first + name[len(path) :]
                if own_part(name) == own_part(path) and self._is_selected(name) and self._is_selected(original):
                    self._compare(original, name, nodes)

    def _compare(self, original: str, name: str, nodes: Mapping[str, Node]) -> None:
        """Compare what is stored under two names, without what lies below them."""
        node, other = nodes.get(name), nodes.get(original)
        if node is None or other is None:
            if self._matcher.is_tensor(name) and self._matcher.is_tensor(original):
                self._matcher.require_equal(original, name)
        elif next(values.children(node), None) is None and next(values.children(other), None) is None:
            self._matcher.require_equal(original, name)
        elif not values.same(_unordered(node), _unordered(other)):
            text = f"one object here, stored separately as {name!r}, which differs"
            self._mismatches.add("incompatible.tied", original, text)


def _unordered(node: Node) -> Node:
    """A node without the order of entries in a plain dict: dicts with equal entries are equal."""
    if isinstance(node, Stateful) and isinstance(node.state, TableNode):
        return Stateful(cast("TableNode", _unordered(node.state)))
    if not isinstance(node, TableNode) or node.kind == "ordered":
        return node
    return TableNode(node.kind, tuple(sorted(node.keys)))
