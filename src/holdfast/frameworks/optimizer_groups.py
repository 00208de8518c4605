"""The stored groups of an optimizer, and which hyper-parameters the live groups take from them."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Container, Iterable, Mapping, MutableMapping
from typing import NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from holdfast.errors import CorruptError, IncompatibleError
from holdfast.format.names import component, join, parse_component, split
from holdfast.format.values import Node, Plain, TensorRef, Text
from holdfast.frameworks import BindingSource, Finish
from holdfast.frameworks.optimizer_saving import hyper_parameters
from holdfast.frameworks.quantised_slots import quantised_otherwise

_log = logging.getLogger(__name__)
#: Keys that torch's schedulers add to the groups of any optimizer.
_OF_SCHEDULERS = frozenset(("initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"))


class SavedOptimizer(NamedTuple):
    """An optimizer in the checkpoint: the name of its class (None if not recorded), the group of each parameter and the
    stored name of that value, the slots of each, and the components of the shared state and of the hyper-parameters of
    all groups."""

    kind: str | None
    group_of: dict[str, int]
    group_names: dict[str, str]
    slots: dict[str, set[str]]
    shared: set[str]
    hyper: set[str]


def read_saved(path: str, source: BindingSource) -> SavedOptimizer:
    """The optimizer that the checkpoint has at `path`."""
    recorded = source.nodes.get(join(path, "class"))
    kind = recorded.data.decode("utf-8", "replace") if isinstance(recorded, Text) else None
    saved = SavedOptimizer(kind, {}, {}, {}, set(), set())
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


def is_other_class(path: str, optimizer: Optimizer, saved: SavedOptimizer, source: BindingSource) -> bool:
    """Whether the saved optimizer is of another class whose state this one can take.

    Raises `IncompatibleError`, code ``incompatible.optimizer_class``, if it cannot take it, or the load is strict.
    """
    kind, name = type(optimizer).__name__, join(path, "class")
    foreign = _foreign(optimizer, saved)
    if saved.kind not in (None, kind):
        foreign += quantised_otherwise(path, optimizer, saved.slots, source)
    if foreign or (source.is_strict and saved.kind not in (None, kind)):
        raise _other_class(path, kind, saved, foreign)
    if saved.kind == kind:
        source.mark(name)
    elif saved.kind is not None:
        source.missing(name)
        _tell_of_other_class(path, kind, saved, source)
    return saved.kind not in (None, kind)


def _tell_of_other_class(path: str, kind: str, saved: SavedOptimizer, source: BindingSource) -> None:
    """Say in the log of rank 0 that an optimizer gets the state of another class, and in which precision it goes on:
    the 8-bit optimizers of bitsandbytes train on with slots of 32 bits."""
    names = (join(path, "state", parameter, slot) for parameter, slots in saved.slots.items() for slot in slots)
    stored = (tensor for tensor in map(source.stored, names) if tensor is not None and tensor.shape)
    dtypes = sorted({tensor.dtype for tensor in stored})
    if dtypes and os.environ.get("RANK", "0") == "0":
        _log.warning(
            "optimizer %r is of class %s here, and gets the state of %s, with slots of %s: it goes on with slots of "
            "that precision, whatever its own would have",
            path,
            kind,
            saved.kind,
            " and ".join(dtypes),
        )


def _foreign(optimizer: Optimizer, saved: SavedOptimizer) -> list[str]:
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


def own_flags(optimizer: Optimizer) -> frozenset[str]:
    """The flags in the groups that the class sets by itself, since its constructor does not take them. They belong to
    the class and are not loaded from another one."""
    parameters = inspect.signature(type(optimizer)).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return frozenset()
    flags = {key for key, value in optimizer.defaults.items() if isinstance(value, bool)}
    return frozenset(flags - parameters.keys())


def _other_class(path: str, kind: str, saved: SavedOptimizer, foreign: list[str]) -> IncompatibleError:
    stored = f"class {saved.kind}" if saved.kind not in (None, kind) else "another class"
    slots = _list(set().union(*saved.slots.values()))
    action = f'Build the optimizer that was saved, or leave this one out, with select="!{path}": it then starts afresh.'
    if not foreign:
        action = f"Build the optimizer that was saved, or load its state into {kind} with strict=False."
    return IncompatibleError(
        f"Optimizer {path!r} is of class {kind} here, but of {stored} in the checkpoint, with slots {slots}.",
        code="incompatible.optimizer_class",
        action=action,
        path=path,
        details=tuple(foreign),
    )


def check_rates(path: str, served: Mapping[int, int], source: BindingSource) -> None:
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


def check_alike(path: str, first: int, second: int, origin: int, optimizer: Optimizer) -> None:
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


def group_origin(
    path: str, index: int, group: Mapping[str, object], origins: list[int], saved: SavedOptimizer, source: BindingSource
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
    path: str, index: int, group: Mapping[str, object], saved: SavedOptimizer, source: BindingSource
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


def bind_hyper(path: str, group: MutableMapping[str, object], own: Container[str], source: BindingSource) -> Finish:
    """Bind the hyper-parameters of a live group, except its `own` ones, to those of the stored group at `path`."""
    values = {
        key: source.live(join(path, component(key, path=path)), value)
        for key, value in hyper_parameters(group)
        if key not in own
    }

    def finish() -> None:
        group.update((key, value()) for key, value in values.items())

    return finish


def options_after(
    path: str, group: Mapping[str, object], own: Container[str], source: BindingSource
) -> dict[str, object]:
    """The hyper-parameters that a live group will have after the load, as far as plain values tell: else those that it
    has."""
    nodes = {key: source.nodes.get(join(path, component(key, path=path))) for key, _ in hyper_parameters(group)}
    stored = {key: node.value for key, node in nodes.items() if isinstance(node, Plain) and key not in own}
    return {**group, **stored}


def flag(path: str, live: object, source: BindingSource) -> bool:
    """The value that a flag will have after the load."""
    node = source.nodes.get(path)
    return bool(node.value if isinstance(node, Plain) else live)
