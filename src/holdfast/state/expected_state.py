"""The expected state: the live one, with optimizer slots that the first step will make, as tensors without memory.

An optimizer of ``torch.optim`` makes its slots in its first step. To learn them earlier, a copy of the optimizer takes
one step on the meta device, for one parameter of each shape.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.frameworks.known_types import unwrapped
from holdfast.frameworks.registry import adapter_of
from holdfast.frameworks.stateful import StatefulAdapter
from holdfast.state.local_placements import is_dtensor, local_part
from holdfast.state.per_rank import PerRank

#: Options of groups that choose another implementation of the same step; the plain one runs on the meta device.
_PLAIN_STEP: Final = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
#: Depth of containers to which optimizers are searched; a deeper one is not predicted.
_MAX_DEPTH: Final = 4

_log = logging.getLogger(__name__)

_Slots = dict[object, object]


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
    slots: dict[torch.Tensor, _Slots] = {}
    known: dict[object, _Slots] = {}
    for group in optimizer.param_groups:
        options = tuple((key, _kind(option)) for key, option in group.items() if key != "params")
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter in optimizer.state:
                continue
            part = local_part(parameter)
            key = (part.shape, part.dtype, options)
            if key not in known:
                known[key] = _slots_after_a_step(optimizer, group, part)
            slots[parameter] = {name: _like(slot, parameter) for name, slot in known[key].items()}
    if not any(slots.values()):
        return optimizer
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__, state={**optimizer.state, **slots})
    return stand_in


def _kind(option: object) -> object:
    """An option of a group, as far as it decides which slots there are: of numbers, whether they are 0. There may be
    thousands of groups, each with a rate of its own."""
    if option is None or isinstance(option, bool | str):
        return option
    if isinstance(option, tuple | list):
        return tuple(map(_kind, option))
    return type(option), option == 0 if isinstance(option, int | float) else None


def _slots_after_a_step(optimizer: Optimizer, group: Mapping[str, Any], part: torch.Tensor) -> _Slots:
    """The slots of one parameter after one step on the meta device. Where the step does not run there, those that it
    made before it failed, which are all for most optimizers."""
    parameter = nn.Parameter(torch.empty(part.shape, dtype=part.dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    copy = object.__new__(type(optimizer))
    plain = {**group, "params": [parameter], **{key: _PLAIN_STEP[key] for key in _PLAIN_STEP.keys() & group.keys()}}
    copy.__dict__.update(optimizer.__dict__, state=defaultdict(dict), param_groups=[plain])
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(copy)  # without the hooks, which are the user's
    except Exception as error:  # noqa: BLE001 - a wrong prediction costs time at the first save, and nothing else
        _log.debug("a step of %s does not run on the meta device: %s", type(optimizer).__name__, error)
    return cast("_Slots", copy.state[parameter])


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
