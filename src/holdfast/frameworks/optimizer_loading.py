"""The binding of an optimizer to its stored state; see ``holdfast.frameworks.optimizer``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import reduce
from itertools import compress, repeat
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch.optim import Optimizer

from holdfast.errors import IncompatibleError
from holdfast.format.names import component, join, parse_component
from holdfast.frameworks import BindingSource, Finish, NamedTensor
from holdfast.frameworks.factored_slots import factor_like
from holdfast.frameworks.first_steps import NeededSlots
from holdfast.frameworks.flat_slots import bind_flat_slots
from holdfast.frameworks.optimizer_groups import (
    SavedOptimizer,
    bind_hyper,
    check_alike,
    check_rates,
    flag,
    group_origin,
    is_other_class,
    options_after,
    own_flags,
    read_saved,
)
from holdfast.frameworks.optimizer_order import check_order
from holdfast.frameworks.optimizer_positions import as_stored, check_order_of
from holdfast.frameworks.optimizer_saving import named_parameters
from holdfast.frameworks.scheduler_lists import check_lists
from holdfast.frameworks.stateful import writing
from holdfast.geometry import Shape

#: Optimizers of torch whose slots have other shapes than their parameter.
_OTHER_SHAPES = (torch.optim.LBFGS, torch.optim.Adafactor)
#: Optimizers of torch that count their steps in a number.
_COUNT_IN_NUMBERS = (torch.optim.LBFGS, torch.optim.SparseAdam)


def bind_optimizer(path: str, optimizer: Optimizer, source: BindingSource) -> Finish:
    """Bind an optimizer to the stored state of its parameters.

    The result replaces the state of every parameter that the checkpoint has by the stored slots (slots that are not
    stored are dropped) and sets the hyper-parameters. ``optimizer.state``, the groups and every slot tensor that fits
    keep their identity. Raises `IncompatibleError`, code ``incompatible.groups``, when parameters of one live group
    come from groups with different hyper-parameters, ``incompatible.optimizer`` for flat state of parameters in
    another order (LBFGS), and ``incompatible.optimizer_class`` for state of another class. A load that is not strict
    accepts the state of another class if both have the same slots and hyper-parameters, as Adam and AdamW do; it keeps
    the flags that the live class sets by itself.

    A strict load also refuses the state of a parameter that had another shape (``incompatible.slots``), and live groups
    that differ from each other but come from one stored group, or that a scheduler's lists by group do not fit
    (``incompatible.groups``). A load that is not strict does
    not load the state of such a parameter, and gives such groups the stored hyper-parameters.
    """
    saved = read_saved(path, source)
    own = own_flags(optimizer) if is_other_class(path, optimizer, saved, source) else frozenset[str]()
    needed = NeededSlots(optimizer)
    groups: list[Finish] = []
    states: list[_BoundState] = []
    served: dict[int, int] = {}
    ordered: list[NamedTensor] = []
    for index, group in enumerate(optimizer.param_groups):
        found = list(_match(path, index, group, saved, source))
        ordered += found
        if isinstance(optimizer, torch.optim.LBFGS):
            _check_holder(path, saved, found)
        names = [name for entry in found for name in (entry.name, *source.copies(entry.name))]
        origins = [saved.group_of[name] for name in names if name in saved.group_of]
        origin = group_origin(path, index, group, origins, saved, source)
        if origin is None:
            continue
        if source.is_strict and origins:
            other = served.setdefault(origin, index)
            check_alike(path, other, index, origin, optimizer)
        origin_path = join(path, "param_groups", str(origin))
        groups.append(bind_hyper(origin_path, group, own, source))
        on_device = any(flag(join(origin_path, key), group.get(key), source) for key in ("capturable", "fused"))
        fitting = _fitting(path, optimizer, found, saved, source)
        _check_needed(path, fitting, options := options_after(origin_path, group, own, source), needed, saved, source)
        states += (bound := list(_bind_states(path, optimizer, fitting, saved, on_device, source)))
        _check_dtypes(path, fitting, bound, options, needed, source)
    check_rates(path, served, source)
    check_order(path, optimizer, ordered, saved, source)
    if source.is_strict:
        check_lists(path, optimizer, served, source)
    shared = {parse_component(text): source.opaque(join(path, "shared", text)) for text in sorted(saved.shared)}

    def finish() -> Optimizer:
        for group in groups:
            group()
        _set_states(optimizer, states)
        state = cast("MutableMapping[object, object]", optimizer.state)
        for key in [key for key in state if not isinstance(key, torch.Tensor)]:
            del state[key]
        state.update((key, value()) for key, value in shared.items())
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():  # noqa: SLF001
            with writing(path, f"a load_state_dict hook of {type(optimizer).__qualname__}"):
                hook(optimizer)
        return optimizer

    return finish


#: The slots of torch's optimizers that are numbers.
_NUMBERS: Final = frozenset({"step", "eta", "mu", "mu_product"})
#: A bound slot: the tensor that the load fills, or a function that returns the slot after the load.
_Slot: TypeAlias = torch.Tensor | Finish
#: A parameter, its bound slots, and whether its steps are counted on its device.
_BoundState: TypeAlias = tuple[torch.Tensor, dict[object, _Slot], bool]


def _match(
    path: str, index: int, group: Mapping[str, object], saved: SavedOptimizer, source: BindingSource
) -> Iterator[NamedTensor]:
    """The group's parameters that the checkpoint has, under their names there. Reports the others as missing."""
    for entry in as_stored(path, index, named_parameters(path, index, group, source), saved.group_of):
        name = saved.group_names.get(entry.name)
        if name is None:
            source.missing(join(path, "group_of", component(entry.name)))
        else:
            source.mark(name)
            yield entry


def _require_equal_copies(path: str, parameter: str, saved: SavedOptimizer, source: BindingSource) -> None:
    """Require that slots stored for a parameter under its other names are equal to those that it gets."""
    for copy in source.copies(parameter):
        if copy in saved.group_of:
            state = join(path, "state")
            source.mark(saved.group_names[copy])
            for slot in sorted(saved.slots[copy] & saved.slots[parameter]):
                source.require_equal(join(state, parameter, slot), join(state, copy, slot))


def _check_holder(path: str, saved: SavedOptimizer, found: Sequence[NamedTensor]) -> None:
    """Raise if the stored state belongs to another parameter than the first one: LBFGS keeps all its state under its
    first parameter, and ignores state under any other."""
    holders = [name for name, slots in saved.slots.items() if slots]
    if found and holders and found[0].name not in holders:
        raise IncompatibleError(
            f"The state of LBFGS optimizer {path!r} is stored under parameter {holders[0]!r}, which was its first one, "
            f"but the live optimizer's first parameter is {found[0].name!r}.",
            code="incompatible.optimizer",
            action="Give the optimizer its parameters in the order they had when the checkpoint was written.",
            path=path,
        )


def _fitting(
    path: str, optimizer: Optimizer, found: Sequence[NamedTensor], saved: SavedOptimizer, source: BindingSource
) -> Sequence[NamedTensor]:
    """The parameters whose stored state fits the shape that they have here. Refuses the others, or reports their state
    as missing: torch would use state of another shape without a check, and fused steps would write beyond the end of a
    shorter slot."""
    plain = [entry for entry in found if source.held(entry.tensor) is None]
    shapes = ((entry, _stored_shape(path, optimizer, entry, saved, source)) for entry in plain)
    others: dict[str, Shape | None] = {
        entry.name: shape for entry, shape in shapes if shape not in (None, entry.tensor.shape)
    }
    if not others:
        return found
    if isinstance(optimizer, torch.optim.LBFGS):  # its state is of all parameters at once
        others = {entry.name: others.get(entry.name) for entry in found}
    for entry in found:
        if entry.name in others and saved.slots[entry.name]:
            if (shape := others[entry.name]) is not None:
                check_order_of(path, entry, shape)
            slots = join(path, "state", entry.name)
            source.missing(slots)
            if source.is_strict:
                text = (
                    f"of a parameter of shape {tuple(entry.tensor.shape)} here, {others[entry.name]} in the checkpoint"
                )
                source.refuse("incompatible.slots", slots, text)
    return [entry for entry in found if entry.name not in others]


def _stored_shape(
    path: str, optimizer: Optimizer, parameter: NamedTensor, saved: SavedOptimizer, source: BindingSource
) -> Shape | None:
    """The shape that a parameter had when its state was saved; None if it is unknown."""
    stored = source.stored(parameter.name)
    if stored is not None:
        return stored.shape
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, _OTHER_SHAPES):
        return None
    # The parameter itself was not saved. The slots of these optimizers have its shape, or are one number.
    names = (join(path, "state", parameter.name, slot) for slot in sorted(saved.slots[parameter.name]))
    shapes = (kept.shape for kept in map(source.stored, names) if kept is not None)
    return next((shape for shape in shapes if shape), None)


def _check_needed(
    path: str,
    parameters: Sequence[NamedTensor],
    options: Mapping[str, object],
    needed: NeededSlots,
    saved: SavedOptimizer,
    source: BindingSource,
) -> None:
    """Refuse parameters that have some of the slots that the next step needs, and lack others: it would fail."""
    held = [(entry.tensor, saved.slots[entry.name]) for entry in parameters]
    for entry, lacking in zip(parameters, needed.lacking(options, held), strict=True):
        state, slots = join(path, "state", entry.name), saved.slots[entry.name]
        has = ", ".join(sorted(slots)) or "none"
        dropped = source.dropped.get(state, ()) if source.is_strict and not needed.are_known else ()
        if lacking:
            text = f"its steps need the slots {_listed(lacking)} too, beside {has} in the checkpoint (after a mapping)"
            source.refuse("incompatible.needed_slots", state, text)
        elif slots and (lost := {*dropped} - slots):
            text = f"a rule drops its slots {_listed(lost)} beside {has}, and its class has steps of its own"
            source.refuse("incompatible.needed_slots", state, text)


def _check_dtypes(
    path: str,
    parameters: Sequence[NamedTensor],
    bound: Iterable[_BoundState],
    options: Mapping[str, object],
    needed: NeededSlots,
    source: BindingSource,
) -> None:
    """Refuse casts that leave the bound slots of a parameter in another dtype than the next step takes: it would fail.
    Slots that had a dtype of their own in the save keep it."""
    slots_of = {parameter: slots for parameter, slots, _ in bound}
    for entry in parameters:
        stored, state = source.stored(entry.name), join(path, "state", entry.name)
        if not source.recast and (stored is None or getattr(torch, stored.dtype, None) is entry.tensor.dtype):
            continue
        others = {
            component(key): slot.dtype
            for key, slot in slots_of.get(entry.tensor, {}).items()
            if isinstance(slot, torch.Tensor)
            and slot.dtype is not entry.tensor.dtype
            and not _is_number(component(key), tuple(slot.shape), entry)
        }
        follow = [name for name in (join(state, slot) for slot in others) if _cast(name, entry, source, None)]
        if not follow and source.recast.isdisjoint([entry.name, *(join(state, slot) for slot in others)]):
            continue
        if why := needed.refused(options, entry.tensor, others):
            text = f"its next step fails, because a cast leaves its slots {_listed(others)} in another dtype: {why}"
            source.refuse("incompatible.slot_dtype", state, text)


def _listed(slots: Iterable[str]) -> str:
    return ", ".join(sorted(slots))


class _SlotColumn(NamedTuple):
    """The stored slots with one key, of many parameters: the name of each, the live slot (of any type), and whether it
    can be filled as it is."""

    key: object
    names: list[str]
    live: list[Any]
    fits: Sequence[bool]


def _bind_states(
    path: str,
    optimizer: Optimizer,
    parameters: Sequence[NamedTensor],
    saved: SavedOptimizer,
    on_device: bool,
    source: BindingSource,
) -> Iterator[_BoundState]:
    """Bind the stored state of the `parameters` of one group."""
    plain = [entry for entry in parameters if source.held(entry.tensor) is None]
    slots = _bind_slots(path, optimizer, plain, saved, on_device, source)
    yield from zip((entry.tensor for entry in plain), slots, repeat(on_device), strict=False)
    for owner, bound in bind_flat_slots(path, optimizer, parameters, saved.slots, on_device, source):
        yield owner, bound, on_device
    for entry in parameters:
        _require_equal_copies(path, entry.name, saved, source)


def _bind_slots(
    path: str,
    optimizer: Optimizer,
    parameters: Sequence[NamedTensor],
    saved: SavedOptimizer,
    steps_on_device: bool,
    source: BindingSource,
) -> list[dict[object, _Slot]]:
    """Bind the stored slots of each of the `parameters` of one group."""
    # By the sets of slots, of which there are few.
    alike: dict[frozenset[str], list[int]] = {}
    for number, parameter in enumerate(parameters):
        alike.setdefault(frozenset(saved.slots[parameter.name]), []).append(number)
    flat = _flat_dtype(optimizer)
    bound: list[dict[object, _Slot]] = [{} for _ in parameters]
    filled: list[NamedTensor] = []
    # The slots that cannot be filled as they are, by the number of their parameter and their place among its slots.
    others: list[tuple[int, int, _SlotColumn, int]] = []
    for texts, numbers in alike.items():
        held = parameters if len(numbers) == len(parameters) else [parameters[number] for number in numbers]
        columns = _slot_columns(join(path, "state"), optimizer, held, texts, steps_on_device, source)
        keys = [column.key for column in columns]
        for number, slots in zip(numbers, zip(*(column.live for column in columns), strict=True), strict=False):
            bound[number] = dict(zip(keys, slots, strict=True))
        replicas = [parameter.replicas for parameter in held]
        for place, column in enumerate(columns):
            entries = map(NamedTensor, column.names, column.live, replicas)
            if all(column.fits):
                filled += entries
                continue
            filled += compress(entries, column.fits)
            others += ((numbers[row], place, column, row) for row, fits in enumerate(column.fits) if not fits)
    for number, _, column, row in sorted(others, key=itemgetter(0, 1)):
        parameter, name = parameters[number], column.names[row]
        bound[number][column.key] = _bind_slot(
            name,
            column.key,
            column.live[row],
            parameter,
            steps_on_device,
            source,
            flat=flat,
        )
    source.fill_all(filled)
    return bound


def _slot_columns(
    state: str,
    optimizer: Optimizer,
    parameters: Sequence[NamedTensor],
    texts: frozenset[str],
    steps_on_device: bool,
    source: BindingSource,
) -> list[_SlotColumn]:
    """The stored slots of parameters that all have the slots with the components `texts`."""
    flat = _flat_dtype(optimizer)
    tensors = [parameter.tensor for parameter in parameters]
    prefixes = [f"{state}/{parameter.name}/" for parameter in parameters]
    kept = [optimizer.state.get(tensor, {}) for tensor in tensors]
    stored = [source.stored(parameter.name) for parameter in parameters]
    is_cast = [
        owner is not None and getattr(torch, owner.dtype, None) is not tensor.dtype
        for owner, tensor in zip(stored, tensors, strict=True)
    ]
    columns = []
    for text in [*(texts & {"step"}), *sorted(texts - {"step"})]:  # mostly torch's own order
        key = parse_component(text)
        names, live = [prefix + text for prefix in prefixes], [slots.get(key) for slots in kept]
        fits = source.fitting(names, live, [None] * len(names) if key == "step" else tensors)
        if key == "step":
            homes = (_step_device(parameter, steps_on_device) for parameter in parameters)
            fits = [fit and slot.device == home for fit, slot, home in zip(fits, live, homes, strict=True)]
        if any(is_cast):
            casts = (_cast(name, entry, source, flat) for name, entry in zip(names, parameters, strict=True))
            fits = [fit and cast_to is None for fit, cast_to in zip(fits, casts, strict=True)]
        columns.append(_SlotColumn(key, names, live, fits))
    return columns


def _cast(name: str, parameter: NamedTensor, source: BindingSource, flat: torch.dtype | None) -> torch.dtype | None:
    """The dtype that the stored slot `name` of a parameter must be cast to, or None: torch requires one dtype for a
    parameter and its slots of that dtype, so if the parameter is cast, these slots are cast too. `flat` is the dtype of
    all slots of an optimizer that has one vector of all parameters."""
    kept = source.stored(name)
    if flat is not None:
        return None if kept is None or kept.dtype == str(flat).removeprefix("torch.") else flat
    owner, dtype = source.stored(parameter.name), parameter.tensor.dtype
    if owner is None or getattr(torch, owner.dtype, None) is dtype:
        return None
    if kept is None or kept.dtype != owner.dtype or _is_number(name.rpartition("/")[2], kept.shape, parameter):
        return None
    return dtype


def _is_number(slot: str, shape: Shape, parameter: NamedTensor) -> bool:
    """Whether a slot is one number for its parameter, which keeps its dtype. A parameter without axes has moments
    without axes, too."""
    return not shape and (slot in _NUMBERS or parameter.tensor.dim() > 0)


def _flat_dtype(optimizer: Optimizer) -> torch.dtype | None:
    """The dtype of the vectors and the numbers of LBFGS, which joins the gradients of all parameters; None for other
    optimizers."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return None
    dtypes = [parameter.dtype for group in optimizer.param_groups for parameter in group["params"]]
    return reduce(torch.promote_types, dtypes) if dtypes else None


def _step_device(parameter: NamedTensor, on_device: bool) -> torch.device:
    """The device of a step counter: torch keeps it on the host unless a kernel reads it."""
    return parameter.tensor.device if on_device else torch.device("cpu")


def _bind_slot(
    name: str,
    key: object,
    live: object,
    parameter: NamedTensor,
    steps_on_device: bool,
    source: BindingSource,
    *,
    flat: torch.dtype | None,
) -> _Slot:
    """Bind one slot: to the live tensor if it fits, else to new memory of the stored shape, and the stored dtype or the
    one that it is cast to. A slot may be a container of tensors. `flat` is as `_cast` has it."""

    def memory(stored: str) -> torch.Tensor:
        cast_to = _cast(stored, parameter, source, flat)
        mine = live if isinstance(live, torch.Tensor) and stored == name else None
        if key == "step":
            return source.memory(stored, live=mine, like=None, device=_step_device(parameter, steps_on_device))
        device = parameter.tensor.device if mine is None else mine.device
        found = source.memory(stored, live=mine, like=parameter.tensor, device=device, cast_to=cast_to)
        like = None if found is mine else factor_like(parameter.tensor, found.shape)
        if like is None:
            return found
        return source.memory(stored, live=None, like=like, device=device, cast_to=cast_to)

    tensor = source.of_planes(name, live=live, like=parameter.tensor)
    if tensor is None and name in source.nodes:
        return source.opaque(name, memory, parameter.replicas)
    tensor = memory(name) if tensor is None else tensor
    source.fill(NamedTensor(name, tensor, parameter.replicas))
    return tensor


def _set_states(optimizer: Optimizer, states: Iterable[_BoundState]) -> None:
    """Replace the state of parameters by bound slots; their steps may be counted on the parameter's device."""
    for parameter, slots, on_device in states:
        filled = {key: slot if isinstance(slot, torch.Tensor) else slot() for key, slot in slots.items()}
        _count_in_tensor(optimizer, filled, parameter.device if on_device else None)
        _replace(optimizer.state, parameter, filled)


def _count_in_tensor(optimizer: Optimizer, slots: dict[object, object], device: torch.device | None) -> None:
    """Make a stored number of steps the tensor that torch's optimizers add to in place; they would forget what they
    add to a number. Other optimizers, and old versions of torch, store numbers."""
    step = slots.get("step")
    if type(step) not in (int, float) or not type(optimizer).__module__.startswith("torch.optim"):
        return
    if not isinstance(optimizer, _COUNT_IN_NUMBERS):
        slots["step"] = torch.tensor(step, dtype=torch.float32, device=device)


def _replace(state: MutableMapping[torch.Tensor, object], parameter: torch.Tensor, slots: dict[object, object]) -> None:
    live = state.get(parameter)
    if not slots:
        state.pop(parameter, None)
    elif isinstance(live, dict):
        live.clear()
        live.update(slots)
    else:
        state[parameter] = slots
