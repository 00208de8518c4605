"""Values of a checkpoint as an export writes them: in plain types, which every reader has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.exporting.chosen_tensors import unfit
from holdfast.format import values
from holdfast.format.values import Node, TorchValue
from holdfast.state.local_placements import generator_state, revive


def no_tensor(name: str) -> object:
    """Refuse a tensor inside a value."""
    raise unfit(name, "is a tensor inside a value", "Leave that value out with select (--select).")


def plain_value(nodes: Mapping[str, Node], name: str, tensors: Callable[[str], object] = no_tensor) -> object:
    """The value `name`: named tuples are tuples, and registered types what they are encoded as. `tensors` gives what
    stands for a tensor inside it."""
    return values.rebuild(
        nodes,
        name,
        tensors=tensors,
        revive=_revived,
        record=lambda *_: lambda *items: items,
        decode=lambda _, value: value,
    )


def _revived(value: TorchValue) -> object:
    return generator_state(value) if value.kind == "generator" else revive(value)
