"""The expected state: the live one, with optimizer slots that the first step will make, as tensors without memory.

An optimizer of ``torch.optim`` makes its slots in its first step. To learn them earlier, a copy of the optimizer takes
one step on the meta device, for one parameter of each shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

import torch
from torch.optim import Optimizer

from holdfast.frameworks.first_steps import Slots, option_kinds, slots_after_a_step
from holdfast.frameworks.known_types import unwrapped
from holdfast.frameworks.registry import adapter_of
from holdfast.frameworks.stateful import StatefulAdapter
from holdfast.state.local_placements import is_dtensor, local_part
from holdfast.state.per_rank import PerRank

#: Depth of containers to which optimizers are searched; a deeper one is not predicted.
_MAX_DEPTH: Final = 4


def expected_state(state: Mapping[str, object]) -> Mapping[str, object]:
    """A state like `state`, to be walked and not to be saved: in place of each optimizer of ``torch.optim`` that has
    not made all its slots yet, it has a stand-in with the slots that the next step will make. Changes nothing.

    Objects with a ``state_dict`` of their own, and parts of one rank, are left out: they are small, and those of data
    loaders start processes when they are asked."""
    return cast("Mapping[str, object]", _expected(state, _MAX_DEPTH))


def _expected(item: object, depth: int) -> object:
    if isinstance(item, dict) and depth:
        return {key: _expected(entry, depth - 1) for key, entry in item.items()}
    if type(item) in (list, tuple) and depth:
        return [_expected(entry, depth - 1) for entry in cast("list[object]", item)]
    inner = unwrapped(item)
    if isinstance(inner, PerRank) or isinstance(adapter_of(inner), StatefulAdapter):
        return None
    return _with_slots(inner) if isinstance(inner, Optimizer) else item


def _with_slots(optimizer: Optimizer) -> Optimizer:
    """`optimizer`, or a stand-in with the slots that its parameters lack. A class of the user's own may do anything in
    a step, so it is left alone."""
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return optimizer
    slots: dict[torch.Tensor, Slots] = {}
    known: dict[object, Slots] = {}
    for group in optimizer.param_groups:
        options = option_kinds(group)
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter in optimizer.state:
                continue
            part = local_part(parameter)
            key = (part.shape, part.dtype, options)
            if key not in known:
                known[key] = slots_after_a_step(optimizer, group, part)
            slots[parameter] = {name: _like(slot, parameter) for name, slot in known[key].items()}
    if not any(slots.values()):
        return optimizer
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__, state={**optimizer.state, **slots})
    return stand_in


def _like(slot: object, parameter: torch.Tensor) -> object:
    """A slot of its own memory for `parameter`, divided among ranks as that is if both have one shape."""
    if not isinstance(slot, torch.Tensor):
        return slot
    mine = torch.empty_like(slot)
    if not is_dtensor(parameter) or slot.shape != local_part(parameter).shape or not slot.dim():
        return mine
    return type(parameter).from_local(
        mine,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
