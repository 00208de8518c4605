"""The binding of an optimizer to its stored state; see ``holdfast.frameworks.optimizer``."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import compress, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch.optim import Optimizer

from holdfast.errors import CorruptError, IncompatibleError
from holdfast.format.names import component, join, parse_component, split
from holdfast.format.values import Node, Plain, TensorRef, Text
from holdfast.frameworks import BindingSource, Finish, NamedTensor
from holdfast.frameworks.factored_slots import factor_like
from holdfast.frameworks.flat_slots import bind_flat_slots
from holdfast.frameworks.optimizer_order import check_order
from holdfast.frameworks.optimizer_positions import as_stored
from holdfast.frameworks.optimizer_saving import hyper_parameters, named_parameters
from holdfast.frameworks.scheduler_lists import check_lists
from holdfast.frameworks.stateful import writing
from holdfast.geometry import Shape

#: Optimizers of torch whose slots have other shapes than their parameter.
_OTHER_SHAPES = (torch.optim.LBFGS, torch.optim.Adafactor)
#: Optimizers of torch that count their steps in a number.
_COUNT_IN_NUMBERS = (torch.optim.LBFGS, torch.optim.SparseAdam)
#: Keys that torch's schedulers add to the groups of any optimizer.
_OF_SCHEDULERS = frozenset(("initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"))


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
    saved = _read_saved(path, source)
    own = _own_flags(optimizer) if _is_other_class(path, optimizer, saved, source) else frozenset[str]()
    groups: list[Finish] = []
    states: list[tuple[torch.Tensor, dict[object, _Slot], bool]] = []
    served: dict[int, int] = {}
    ordered: list[NamedTensor] = []
    for index, group in enumerate(optimizer.param_groups):
        found = list(_match(path, index, group, saved, source))
        ordered += found
        if isinstance(optimizer, torch.optim.LBFGS):
            _check_holder(path, saved, found)
        names = [name for entry in found for name in (entry.name, *source.copies(entry.name))]
        origins = [saved.group_of[name] for name in names if name in saved.group_of]
        origin = _origin(path, index, group, origins, saved, source)
        if origin is None:
            continue
        if source.is_strict and origins:
            other = served.setdefault(origin, index)
            _check_alike(path, other, index, origin, optimizer)
        origin_path = join(path, "param_groups", str(origin))
        groups.append(_bind_hyper(origin_path, group, own, source))
        on_device = any(_flag(join(origin_path, key), group.get(key), source) for key in ("capturable", "fused"))
        fitting = _fitting(path, optimizer, found, saved, source)
        states += _bind_states(path, optimizer, fitting, saved, on_device, source)
        for entry in fitting:
            _require_equal_copies(path, entry.name, saved, source)
    _check_rates(path, served, source)
    check_order(path, ordered, source)
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


#: A bound slot: the tensor that the load fills, or a function that returns the slot after the load.
_Slot: TypeAlias = torch.Tensor | Finish


class _Saved(NamedTuple):
    """An optimizer in the checkpoint: the name of its class (None if not recorded), the group of each parameter and the
    stored name of that value, the slots of each, and the components of the shared state and of the hyper-parameters of
    all groups."""

    kind: str | None
    group_of: dict[str, int]
    group_names: dict[str, str]
    slots: dict[str, set[str]]
    shared: set[str]
    hyper: set[str]


def _read_saved(path: str, source: BindingSource) -> _Saved:
    recorded = source.nodes.get(join(path, "class"))
    kind = recorded.data.decode("utf-8", "replace") if isinstance(recorded, Text) else None
    saved = _Saved(kind, {}, {}, {}, set(), set())
    depth = len(split(path)) + 1
    group_of = join(path, "group_of")
    for name in source.stored_below(group_of):
        node = source.nodes[name]
        if not isinstance(node, Plain) or type(node.value) is not int:
            raise CorruptError(
                f"{name!r} is not an index of a parameter group.",
                code="corrupt.values",
                action="Use another copy or an older checkpoint.",
                path=name,
            )
        parameter = str(parse_component(name[len(group_of) + 1 :].partition("/")[0]))
        saved.group_of[parameter] = node.value
        saved.group_names[parameter] = name
        saved.slots[parameter] = set()
    state = join(path, "state")
    for name in source.stored_below(state):
        parameter, _, below = name[len(state) + 1 :].rpartition("/")
        while parameter and parameter not in saved.slots:
            parameter, _, below = parameter.rpartition("/")
        if parameter:
            saved.slots[parameter].add(below)
    saved.shared.update(split(name)[depth] for name in source.stored_below(join(path, "shared")))
    for name in source.stored_below(join(path, "param_groups")):
        saved.hyper.update(split(name)[depth + 1 : depth + 2])
    return saved


def _is_other_class(path: str, optimizer: Optimizer, saved: _Saved, source: BindingSource) -> bool:
    """Whether the saved optimizer is of another class whose state this one can take.

    Raises `IncompatibleError`, code ``incompatible.optimizer_class``, if it cannot take it, or the load is strict.
    """
    kind, name = type(optimizer).__name__, join(path, "class")
    foreign = _foreign(optimizer, saved)
    if foreign or (source.is_strict and saved.kind not in (None, kind)):
        raise _other_class(path, kind, saved, foreign)
    if saved.kind == kind:
        source.mark(name)
    elif saved.kind is not None:
        source.missing(name)
    return saved.kind not in (None, kind)


def _foreign(optimizer: Optimizer, saved: _Saved) -> list[str]:
    """Lines that say why stored state is foreign to an optimizer; empty if it is not.

    Another class must have the same hyper-parameters. For the same class, or one that was not recorded, versions and
    users add some, so only several on each side that the other lacks show that two classes have one name. Options add
    slots, so slots are foreign only if each side has some that the other lacks.
    """
    kind = type(optimizer).__name__
    defaults = {component(key) for key in optimizer.defaults}
    hyper = defaults | {component(key) for group in optimizer.param_groups for key, _ in hyper_parameters(group)}
    stored = saved.hyper - _OF_SCHEDULERS
    theirs, mine = stored - hyper, defaults - stored
    lines = []
    if stored and (theirs or mine if saved.kind not in (None, kind) else min(len(theirs), len(mine)) > 1):
        lines.append(f"hyper-parameters only in the checkpoint: {_list(theirs)}; only here: {_list(mine)}")
    slots = {component(key) for kept in optimizer.state.values() if isinstance(kept, dict) for key in kept}
    stored = set().union(*saved.slots.values())
    if saved.kind != kind and stored - slots and slots - stored:
        lines.append(f"slots only in the checkpoint: {_list(stored - slots)}; only here: {_list(slots - stored)}")
    return lines


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _own_flags(optimizer: Optimizer) -> frozenset[str]:
    """The flags in the groups that the class sets by itself, since its constructor does not take them. They belong to
    the class and are not loaded from another one."""
    parameters = inspect.signature(type(optimizer)).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return frozenset()
    flags = {key for key, value in optimizer.defaults.items() if isinstance(value, bool)}
    return frozenset(flags - parameters.keys())


def _other_class(path: str, kind: str, saved: _Saved, foreign: list[str]) -> IncompatibleError:
    stored = f"class {saved.kind}" if saved.kind not in (None, kind) else "another class"
    slots = _list(set().union(*saved.slots.values()))
    action = f'Build the optimizer that was saved, or leave this one out, with select="!{path}".'
    if not foreign:
        action = f"Build the optimizer that was saved, or load its state into {kind} with strict=False."
    return IncompatibleError(
        f"Optimizer {path!r} is of class {kind} here, but of {stored} in the checkpoint, with slots {slots}.",
        code="incompatible.optimizer_class",
        action=action,
        path=path,
        details=tuple(foreign),
    )


def _match(
    path: str, index: int, group: Mapping[str, object], saved: _Saved, source: BindingSource
) -> Iterator[NamedTensor]:
    """The group's parameters that the checkpoint has, under their names there. Reports the others as missing."""
    for entry in as_stored(path, index, named_parameters(path, index, group, source), saved.group_of):
        name = saved.group_names.get(entry.name)
        if name is None:
            source.missing(join(path, "group_of", component(entry.name)))
        else:
            source.mark(name)
            yield entry


def _require_equal_copies(path: str, parameter: str, saved: _Saved, source: BindingSource) -> None:
    """Require that slots stored for a parameter under its other names are equal to those that it gets."""
    for copy in source.copies(parameter):
        if copy in saved.group_of:
            state = join(path, "state")
            source.mark(saved.group_names[copy])
            for slot in sorted(saved.slots[copy] & saved.slots[parameter]):
                source.require_equal(join(state, parameter, slot), join(state, copy, slot))


def _check_holder(path: str, saved: _Saved, found: Sequence[NamedTensor]) -> None:
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
    path: str, optimizer: Optimizer, found: Sequence[NamedTensor], saved: _Saved, source: BindingSource
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
            slots = join(path, "state", entry.name)
            source.missing(slots)
            if source.is_strict:
                text = (
                    f"of a parameter of shape {tuple(entry.tensor.shape)} here, {others[entry.name]} in the checkpoint"
                )
                source.refuse("incompatible.slots", slots, text)
    return [entry for entry in found if entry.name not in others]


def _stored_shape(
    path: str, optimizer: Optimizer, parameter: NamedTensor, saved: _Saved, source: BindingSource
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


def _check_rates(path: str, served: Mapping[int, int], source: BindingSource) -> None:
    """Refuse live groups in another order than the stored ones where a scheduler gave these different rates: its state
    has a rate for each index of a group, and no names. `served` has the live index for each stored one.

    Raises:
        IncompatibleError: code ``incompatible.groups``.
    """

    def rate(index: int) -> Node | None:
        return source.nodes.get(join(path, "param_groups", str(index), "initial_lr"))

    for origin, index in served.items():
        if origin != index and rate(origin) is not None and rate(origin) != rate(index):
            raise IncompatibleError(
                f"parameter group {index} of {path!r} was group {origin} when it was saved, and a scheduler keeps its "
                "rates by the index of the group.",
                code="incompatible.groups",
                action="Build the groups in the saved order, or pass strict=False and set the rates yourself.",
                path=path,
            )


def _check_alike(path: str, first: int, second: int, origin: int, optimizer: Optimizer) -> None:
    """Raise if two live groups that come from one stored group differ: both would get its hyper-parameters."""
    mine, theirs = (dict(hyper_parameters(optimizer.param_groups[index])) for index in (first, second))
    differing = sorted(str(key) for key in mine.keys() & theirs.keys() if not _is_same(mine[key], theirs[key]))
    if differing:
        raise IncompatibleError(
            f"Groups {first} and {second} of optimizer {path!r} differ here ({', '.join(differing)}), but their "
            f"parameters were saved in one group, {origin}: both groups would get the values of that group.",
            code="incompatible.groups",
            action="Group the parameters as they were saved, or load the stored values into both with strict=False.",
            path=path,
        )


def _is_same(mine: object, theirs: object) -> bool:
    """Whether two hyper-parameters are equal. Objects of one class that compare by identity count as equal, and so do
    tensors if one of them is on the meta device."""
    if mine is theirs:
        return True
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        alike = mine.shape == theirs.shape and mine.dtype is theirs.dtype
        return alike and (mine.is_meta or theirs.is_meta or torch.equal(mine.to(theirs.device), theirs))
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_is_same(value, theirs[key]) for key, value in mine.items())
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(_is_same, mine, theirs))
    if type(mine).__eq__ is object.__eq__ and type(theirs).__eq__ is object.__eq__:
        return type(mine) is type(theirs)
    return not isinstance(mine, torch.Tensor) and not isinstance(theirs, torch.Tensor) and np.array_equal(mine, theirs)  # type: ignore[arg-type] # any objects


def _origin(
    path: str, index: int, group: Mapping[str, object], origins: list[int], saved: _Saved, source: BindingSource
) -> int | None:
    """The stored group whose hyper-parameters a live group takes: that of its parameters; for a group without
    parameters, the one of its index."""
    if not origins:
        return None if group["params"] else _origin_of_empty(path, index, group, saved, source)
    first, *others = sorted(set(origins))
    for other in others:
        differing = _differing(path, first, other, source)
        if differing:
            raise IncompatibleError(
                f"Group {index} of optimizer {path!r} holds parameters of the stored groups {first} and {other}, whose "
                f"hyper-parameters differ or are tensors ({', '.join(differing)}).",
                code="incompatible.groups",
                action="Group the parameters as they were when the checkpoint was written.",
                path=path,
            )
        other_path = join(path, "param_groups", str(other))
        for key in _hyper_nodes(other_path, source):
            source.mark(join(other_path, key))
    return first


def _origin_of_empty(
    path: str, index: int, group: Mapping[str, object], saved: _Saved, source: BindingSource
) -> int | None:
    """The stored group of that index; if there is none, the first one if all agree. Otherwise reports the group's keys
    as missing, and returns None."""
    group_path = join(path, "param_groups", str(index))
    if group_path in source.nodes:
        return index
    candidates = sorted(set(saved.group_of.values()))
    if candidates and not any(_differing(path, candidates[0], other, source) for other in candidates[1:]):
        return candidates[0]
    for key, _ in hyper_parameters(group):
        source.missing(join(group_path, component(key, path=group_path)))
    return None


def _differing(path: str, first: int, other: int, source: BindingSource) -> list[str]:
    """The hyper-parameters in which two stored groups differ; tensors count as different, because they are not
    compared."""
    mine, theirs = (_hyper_nodes(join(path, "param_groups", str(index)), source) for index in (first, other))
    return sorted(
        key
        for key in mine.keys() | theirs.keys()
        if mine.get(key) != theirs.get(key) or isinstance(mine.get(key), TensorRef)
    )


def _hyper_nodes(path: str, source: BindingSource) -> dict[str, Node]:
    """The nodes of a stored group's hyper-parameters, by their path below the group's."""
    return {name[len(path) + 1 :]: source.nodes[name] for name in source.stored_below(path) if name in source.nodes}


def _bind_hyper(path: str, group: MutableMapping[str, object], own: Container[str], source: BindingSource) -> Finish:
    values = {
        key: source.live(join(path, component(key, path=path)), value)
        for key, value in hyper_parameters(group)
        if key not in own
    }

    def finish() -> None:
        group.update((key, value()) for key, value in values.items())

    return finish


def _flag(path: str, live: object, source: BindingSource) -> bool:
    """The value that a flag will have after the load."""
    node = source.nodes.get(path)
    return bool(node.value if isinstance(node, Plain) else live)


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
    saved: _Saved,
    on_device: bool,
    source: BindingSource,
) -> Iterator[tuple[torch.Tensor, dict[object, _Slot], bool]]:
    """Bind the stored state of the `parameters` of one group."""
    plain = [entry for entry in parameters if source.held(entry.tensor) is None]
    slots = _bind_slots(path, optimizer, plain, saved, on_device, source)
    yield from zip((entry.tensor for entry in plain), slots, repeat(on_device), strict=False)
    for owner, bound in bind_flat_slots(path, optimizer, parameters, saved.slots, on_device, source):
        yield owner, bound, on_device


def _bind_slots(
    path: str,
    optimizer: Optimizer,
    parameters: Sequence[NamedTensor],
    saved: _Saved,
    steps_on_device: bool,
    source: BindingSource,
) -> list[dict[object, _Slot]]:
    """Bind the stored slots of each of the `parameters` of one group."""
    # By the sets of slots, of which there are few.
    alike: dict[frozenset[str], list[int]] = {}
    for number, parameter in enumerate(parameters):
        alike.setdefault(frozenset(saved.slots[parameter.name]), []).append(number)
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
            cast_to=_cast(name, parameter, source),
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
            casts = (_cast(name, parameter, source) for name, parameter in zip(names, parameters, strict=True))
            fits = [fit and cast_to is None for fit, cast_to in zip(fits, casts, strict=True)]
        columns.append(_SlotColumn(key, names, live, fits))
    return columns


def _cast(name: str, parameter: NamedTensor, source: BindingSource) -> torch.dtype | None:
    """The dtype that the stored slot `name` of a parameter must be cast to, or None: torch requires one dtype for a
    parameter and its slots of that dtype, so if the parameter is cast, these slots are cast too."""
    owner, dtype = source.stored(parameter.name), parameter.tensor.dtype
    if owner is None or getattr(torch, owner.dtype, None) is dtype:
        return None
    kept = source.stored(name)
    return dtype if kept is not None and kept.dtype == owner.dtype and kept.shape else None


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
    cast_to: torch.dtype | None,
) -> _Slot:
    """Bind one slot: to the live tensor if it fits, else to new memory of the stored shape, and the stored dtype or the
    one that it is cast to."""

    def memory(stored: str) -> torch.Tensor:
        mine = live if isinstance(live, torch.Tensor) and stored == name else None
        if key == "step":
            return source.memory(stored, live=mine, like=None, device=_step_device(parameter, steps_on_device))
        device = parameter.tensor.device if mine is None else mine.device
        found = source.memory(stored, live=mine, like=parameter.tensor, device=device, cast_to=cast_to)
        like = None if found is mine else factor_like(parameter.tensor, found.shape)
        if like is None:
            return found
        return source.memory(stored, live=None, like=like, device=device, cast_to=cast_to)

    if name in source.nodes:
        return source.opaque(name, memory, parameter.replicas)
    tensor = memory(name)
    source.fill(NamedTensor(name, tensor, parameter.replicas))
    return tensor


def _set_states(optimizer: Optimizer, states: Iterable[tuple[torch.Tensor, dict[object, _Slot], bool]]) -> None:
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
