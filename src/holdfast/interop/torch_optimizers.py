"""The ``state_dict()`` of torch's optimizers, under the names that holdfast gives to an optimizer.

torch knows parameters by numbers: the order of a live optimizer's parameters, group by group. So a parameter's name is
the component of its number here, ``%int=0``, and a load takes the live optimizer's parameters in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import StateError
from holdfast.format.names import component, join
from holdfast.format.values import Node, Open, Plain, TableNode

_IDENTITY = ("params", "param_names")


class OptimizerParts(NamedTuple):
    """The content of an optimizer: nodes and values, each by its path below the optimizer."""

    nodes: Sequence[tuple[str, Node]]
    values: Sequence[tuple[str, object]]


def optimizer_parts(item: object) -> OptimizerParts | None:
    """The parts of a dict in the form of ``Optimizer.state_dict()``; None for anything else."""
    if not isinstance(item, dict) or item.keys() != {"state", "param_groups"}:
        return None
    state, groups = item["state"], item["param_groups"]
    if not (isinstance(state, dict) and isinstance(groups, list) and groups):
        return None
    num_parameters = _num_parameters(groups)
    if num_parameters is None or not all(_is_kept(*pair, num_parameters) for pair in state.items()):
        return None
    try:
        return _parts(state, groups)
    except StateError:  # a key that no name can have
        return None


def _num_parameters(groups: Sequence[object]) -> int | None:
    """The number of parameters in all groups; None unless they count from 0 on."""
    expected = 0
    for group in groups:
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list):
            return None
        for number in numbers:
            # Ends at the first wrong one, since a pickle can have one long list in many groups.
            if type(number) is not int or number != expected:
                return None
            expected += 1
    return expected


def _is_kept(key: object, slots: object, num_parameters: int) -> bool:
    """Whether this is the state of a parameter, or state of the whole optimizer, which has a text as its key."""
    return isinstance(key, str) or (type(key) is int and 0 <= key < num_parameters and isinstance(slots, dict))


def _parts(state: dict[object, object], groups: Sequence[dict[object, object]]) -> OptimizerParts:
    nodes: list[tuple[str, Node]] = [("group_of", Open("dict")), ("param_groups", Open("dict"))]
    values: list[tuple[str, object]] = []
    for index, group in enumerate(groups):
        path = join("param_groups", str(index))
        hyper = {component(key): value for key, value in group.items() if key not in _IDENTITY}
        nodes.append((path, TableNode("ordered", tuple(sorted(hyper)))))
        values += [(join(path, key), value) for key, value in hyper.items()]
        numbers = group["params"]
        assert isinstance(numbers, list)
        nodes += [(join("group_of", component(component(number))), Plain(index)) for number in numbers]
    for key, kept in state.items():
        if isinstance(key, str):
            values.append((join("shared", component(key)), kept))
        elif isinstance(kept, dict):
            values += [(join("state", component(key), component(slot)), value) for slot, value in kept.items()]
    return OptimizerParts(nodes, values)
