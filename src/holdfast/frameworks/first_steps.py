"""The slots that optimizers make in the first step; those of ``torch.optim`` are learned from one on the meta device.

Later steps of nearly all classes need every one of them: a parameter that has some slots and lacks others is an error
in the middle of a step.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.format.names import component

#: Options of groups that choose another implementation of the same step; the plain one runs on the meta device.
_PLAIN_STEP: Final = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
#: The slots that the steps of a class need, by the package and the class that has these steps: of classes that make the
#: slots that they lack in any step, that make them elsewhere, or whose step does not run on the meta device.
_KNOWN: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("torch", "SGD"): frozenset(),
    ("torch", "Muon"): frozenset(),
    ("torch", "Adagrad"): frozenset({"step", "sum"}),
    ("torch", "SparseAdam"): frozenset({"step", "exp_avg", "exp_avg_sq"}),
    ("torchao", "_AdamBase"): frozenset({"step", "exp_avg", "exp_avg_sq"}),
    ("bitsandbytes", "Optimizer8bit"): frozenset({"step", "state1"}),
}

#: Classes that make slots when they are built, and none in a step.
_MAKE_SLOTS_AT_ONCE: Final = frozenset({("torch", "Adagrad")})

_log = logging.getLogger(__name__)

Slots = dict[object, object]


def slots_after_a_step(optimizer: Optimizer, group: Mapping[str, Any], part: torch.Tensor) -> Slots:
    """The slots of one parameter after one step on the meta device. Where the step does not run there, those that it
    made before it failed, which are all for most optimizers."""
    slots, error = _step(optimizer, group, part, {})
    if error:  # a wrong prediction costs time at the first save, and nothing else
        _log.debug("a step of %s does not run on the meta device: %s", type(optimizer).__name__, error)
    return slots


def _step(optimizer: Optimizer, group: Mapping[str, Any], part: torch.Tensor, slots: Slots) -> tuple[Slots, str]:
    """Take a step of one parameter with these `slots` on the meta device. Returns the slots after it, and the error in
    which it ended ("": in none)."""
    parameter = nn.Parameter(torch.empty(part.shape, dtype=part.dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    copy = object.__new__(type(optimizer))
    plain = {**group, "params": [parameter], **{key: _PLAIN_STEP[key] for key in _PLAIN_STEP.keys() & group.keys()}}
    state = defaultdict[object, Slots](dict, {parameter: slots})
    copy.__dict__.update(optimizer.__dict__, state=state, param_groups=[plain])
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(copy)  # without the hooks, which are the user's
    except Exception as error:  # noqa: BLE001 - of any kind: the step is another library's
        return state[parameter], str(error) or type(error).__name__
    return state[parameter], ""


def option_kinds(group: Mapping[str, object]) -> object:
    """The options of a group, as far as they decide which slots there are."""
    return tuple((key, _option_kind(option)) for key, option in group.items() if key != "params")


def _option_kind(option: object) -> object:
    """An option of a group, as far as it decides which slots there are: of numbers, whether they are 0. There may be
    thousands of groups, each with a rate of its own."""
    if option is None or isinstance(option, bool | str):
        return option
    if isinstance(option, tuple | list):
        return tuple(map(_option_kind, option))
    return type(option), option == 0 if isinstance(option, int | float) else None


def _steps_of(kind: type[Optimizer]) -> tuple[str, str] | None:
    """The package and the class whose steps those of `kind` are; None if it has steps of its own."""
    steps = [inspect.unwrap(function) for name in ("step", "_init_group") if (function := getattr(kind, name, None))]
    package = steps[0].__module__.partition(".optim.")[0]
    if any(not step.__module__.startswith(f"{package}.optim.") for step in steps):
        return None
    found = package, str(steps[0].__qualname__).partition(".")[0]
    return found if package == "torch" or found in _KNOWN else None


def _cast(slot: object, dtype: torch.dtype | None) -> object:
    return slot.to(dtype) if isinstance(slot, torch.Tensor) and dtype is not None else slot


class NeededSlots:
    """The slots that the steps of one optimizer need of a parameter that has any. None are known for classes with steps
    of their own, which may do anything in one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kind = _steps_of(type(optimizer))
        self._known: dict[object, frozenset[str]] = {}
        self._refused: dict[object, str] = {}

    @property
    def are_known(self) -> bool:
        """Whether the slots that steps need are known."""
        return self._kind is not None

    def lacking(
        self, group: Mapping[str, object], parameters: Sequence[tuple[torch.Tensor, Collection[str]]]
    ) -> list[frozenset[str]]:
        """For each of some parameters in `group`, with its slots: the components of those that steps need beside them.
        The options of `group` are those of the steps. Most classes make the slots of a parameter that has none; where
        they do not, one that has none here either is as it was saved."""
        options = option_kinds(group)
        are_made = self._kind not in _MAKE_SLOTS_AT_ONCE
        return [
            self._of(group, options, parameter).difference(slots)
            if slots or (not are_made and self._optimizer.state.get(parameter))
            else frozenset()
            for parameter, slots in parameters
        ]

    def _of(self, group: Mapping[str, object], options: object, parameter: torch.Tensor) -> frozenset[str]:
        if self._kind is None:
            return frozenset()
        if self._kind in _KNOWN:
            return _KNOWN[self._kind]
        if not (parameter.dtype.is_floating_point or parameter.dtype.is_complex):
            return frozenset()
        key = (options, parameter.dim(), parameter.dtype)
        if key not in self._known:
            part = torch.empty((1,) * parameter.dim(), dtype=parameter.dtype, device="meta")
            slots = slots_after_a_step(self._optimizer, group, part)
            self._known[key] = frozenset(map(component, slots))
        return self._known[key]

    def refused(self, group: Mapping[str, object], parameter: torch.Tensor, dtypes: Mapping[str, torch.dtype]) -> str:
        """The error in which a step in `group` ends that finds slots of a parameter in other `dtypes`, by component; ""
        where it does not fail, or nothing is known about it."""
        if not self.are_known or not dtypes:
            return ""
        key = option_kinds(group), parameter.dim(), parameter.dtype, tuple(sorted(dtypes.items(), key=str))
        if key not in self._refused:
            part = torch.empty((1,) * parameter.dim(), dtype=parameter.dtype, device="meta")
            slots, error = _step(self._optimizer, group, part, {})
            cast = {slot: _cast(kept, dtypes.get(component(slot))) for slot, kept in slots.items()}
            # Where a step does not run here in any case, it tells nothing.
            self._refused[key] = "" if error else _step(self._optimizer, group, part, cast)[1]
        return self._refused[key]
