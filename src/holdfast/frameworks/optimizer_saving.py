"""The state of an optimizer as names and values; see ``holdfast.frameworks.optimizer``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple, cast

import torch
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.format.names import component, join
from holdfast.format.values import Open, Plain, TableNode
from holdfast.frameworks import BindingSource, NamedTensor, Sink
from holdfast.frameworks.flat_memory import FlatMemory
from holdfast.frameworks.flat_slots import check_slots, describe_slots
from holdfast.frameworks.known_types import Transparent, known_type, refusal_of, type_of
from holdfast.plan.layout import Replicas
from holdfast.wording import kind_of

# Keys of a group that identify its parameters; all others are hyper-parameters.
_IDENTITY = ("params", "param_names")


class Kept(NamedTuple):
    """The structure of the optimizer at `path` when it was read: its parameters by group, and the slots of each, by the
    id of the parameter. Later additions, removals and regroupings do not show here, but the tensors are the live ones.
    A parameter that is the owner of flat memory stands in its group once for each portion, and in `held`.
    It is `Deferred`."""

    path: str
    groups: list[list[NamedTensor]]
    kept: dict[int, dict[object, object]]
    held: dict[int, FlatMemory]

    def divided(self, ids: Container[int]) -> tuple[Kept, Kept]:
        """Two parts of this object: with the slots of the parameters with these ids, and with all others."""
        chosen = {each: slots for each, slots in self.kept.items() if each in ids}
        others = {each: slots for each, slots in self.kept.items() if each not in ids}
        return self._replace(kept=chosen), self._replace(kept=others)

    def slots(self) -> Iterable[object]:
        """As `Deferred.slots`."""
        return chain.from_iterable(map(dict.values, self.kept.values()))

    def describe(self, sink: Sink) -> None:
        """Add the slots of the optimizer's parameters to `sink`."""
        state = join(self.path, "state")
        # By columns, with little Python code per slot: every save runs this.
        names: list[str] = []
        values: list[object] = []
        replicas: list[Replicas] = []
        for entry in chain.from_iterable(self.groups):
            slots = self.kept.get(id(entry.tensor))
            if slots and id(entry.tensor) not in self.held:
                names += _slot_names(f"{state}/{entry.name}", *slots)
                values += slots.values()
                replicas += repeat(entry.replicas, len(slots))
        sink.slots(_tensors_of(names, values, replicas, sink))
        for owner, held in self.held.items():
            describe_slots(state, held, self.kept.get(owner, {}), sink)


class KeptGroups(NamedTuple):
    """The group of each parameter in `kept`. It is `Deferred`."""

    kept: Kept

    def slots(self) -> Iterable[object]:
        """As `Deferred.slots`: none, because the groups were read already."""
        return ()

    def describe(self, sink: Sink) -> None:
        """Add the group of each parameter to `sink`."""
        group_of = join(self.kept.path, "group_of")
        for index, group in enumerate(self.kept.groups):
            of_index = Plain(index)
            for entry in group:
                sink.node(_below(group_of, entry.name), of_index)


def flatten_optimizer(path: str, optimizer: Optimizer, sink: Sink) -> None:
    """Add an optimizer's hyper-parameters, and state that belongs to no parameter, to `sink`, which must already know
    the parameters. The results of `read_slots` and `KeptGroups` add the rest.

    Raises `StateError`, code ``state.optimizer``, for an optimizer whose state is more than ``state`` and
    ``param_groups``.
    """
    _refuse_hidden_state(path, optimizer)
    sink.node(path, Open("optimizer"))
    sink.tree(join(path, "class"), type(optimizer).__name__)
    groups, group_of = (join(path, name) for name in ("param_groups", "group_of"))
    sink.node(group_of, Open("dict"))
    sink.node(groups, Open("dict"))
    for index, group in enumerate(optimizer.param_groups):
        _flatten_hyper(join(groups, str(index)), group, sink)
    for other, value in _shared(optimizer):
        sink.tree(join(path, "shared", component(other, path=path)), value)


def read_slots(path: str, optimizer: Optimizer, sink: Sink) -> Kept:
    """Read the parameters of an optimizer and the slots of each; adds nothing to `sink`.

    Raises `StateError`: ``state.unnamed_parameter`` for a parameter that is not a tensor of the state,
    ``state.optimizer`` for slots that are not a dict, or belong to a tensor that is in no group.
    """
    groups = [named_parameters(path, index, group, sink) for index, group in enumerate(optimizer.param_groups)]
    grouped = {id(entry.tensor): entry.tensor for group in groups for entry in group}
    slots: dict[int, dict[object, object]] = {}
    for key, kept in cast("Mapping[object, object]", optimizer.state).items():
        if id(key) in grouped and isinstance(kept, dict):
            slots[id(key)] = dict(kept)
        elif isinstance(key, torch.Tensor):
            raise _no_slots(path, key, kept) if id(key) in grouped else _ungrouped(path, key)
    held = {owner: each for owner, tensor in grouped.items() if (each := sink.held(tensor)) is not None}
    for owner, each in held.items():
        check_slots(path, each, slots.get(owner, {}))
    return Kept(path, groups, slots, held)


def stepped(kept: Kept) -> list[NamedTensor]:
    """The parameters that the next steps will change: those that require a gradient, and have one or have slots."""
    slots = kept.kept
    return [
        entry
        for entry in chain.from_iterable(kept.groups)
        if entry.tensor.requires_grad and (slots.get(id(entry.tensor)) or entry.tensor.grad is not None)
    ]


def is_replayed(optimizer: Optimizer) -> bool:
    """Whether steps may be part of a CUDA graph, whose replay calls no hooks."""
    return any(group.get("capturable", False) for group in optimizer.param_groups)


def named_parameters(
    path: str, index: int, group: Mapping[str, object], owner: Sink | BindingSource
) -> list[NamedTensor]:
    """The parameters of a group with their names in `owner`; the owner of flat memory once for each portion. Raises
    `StateError` if one has no name."""
    parameters = cast("list[torch.Tensor]", group["params"])
    entries = list(map(owner.named, parameters))
    named = [entry for entry in entries if entry is not None]
    if len(named) < len(entries):
        raise _unnamed(path, index, parameters, entries.index(None))
    flat = [owner.held(parameter) for parameter in parameters]
    if not any(flat):
        return named
    return list(chain.from_iterable(map(_by_portion, named, flat)))


def _by_portion(entry: NamedTensor, held: FlatMemory | None) -> list[NamedTensor]:
    """The entry of a parameter; the owner of flat memory has one for each portion."""
    if held is None:
        return [entry]
    return [NamedTensor(portion.names[0], entry.tensor, entry.replicas) for portion in held.portions]


def hyper_parameters(group: Mapping[str, object]) -> list[tuple[str, object]]:
    """The hyper-parameters of a group, each with its key."""
    # DeepSpeed names the process group of a group of experts in it, which another job has otherwise.
    identity = (*_IDENTITY, "name", "moe") if group.get("moe") is True else _IDENTITY
    return [(key, value) for key, value in group.items() if key not in identity]


def _shared(optimizer: Optimizer) -> list[tuple[object, object]]:
    """The state under keys that are not tensors."""
    state = cast("Mapping[object, object]", optimizer.state)
    return [(key, value) for key, value in state.items() if not isinstance(key, torch.Tensor)]


def _flatten_hyper(path: str, group: Mapping[str, object], sink: Sink) -> None:
    values = {component(key, path=path): value for key, value in hyper_parameters(group)}
    # An ordered table is never merged with one of other keys, as dicts are.
    sink.node(path, TableNode("ordered", tuple(sorted(values))))
    for key, value in values.items():
        sink.tree(join(path, key), value)


def _tensors_of(
    names: Sequence[str], slots: Sequence[object], replicas: Sequence[Replicas], sink: Sink
) -> Iterator[NamedTensor]:
    """The slots that are tensors. Adds all others to `sink`."""
    for name, value, each in zip(names, slots, replicas, strict=True):
        if isinstance(value, torch.Tensor):
            yield NamedTensor(name, value, each)
        else:
            sink.tree(name, value, each)


# Cached, because making thousands of names again would take most of a walk.
@lru_cache(maxsize=1 << 16, typed=True)
def _slot_names(path: str, *keys: object) -> tuple[str, ...]:
    return tuple(f"{path}/{component(key, path=path)}" for key in keys)


@lru_cache(maxsize=1 << 16)
def _below(path: str, name: str) -> str:
    return f"{path}/{component(name)}"


def _unnamed(path: str, index: int, parameters: Sequence[torch.Tensor], position: int) -> StateError:
    return StateError(
        f"Parameter {position} of group {index} of optimizer {path!r}, of shape {tuple(parameters[position].shape)}, "
        "is not in the state, so it has no name.",
        code="state.unnamed_parameter",
        action="Put the module that owns the parameter into the state. If it is there already, its parameters were "
        "replaced after the optimizer was built, as fully_shard does: build the optimizer from module.parameters() "
        "after that.",
        path=path,
    )


def _ungrouped(path: str, key: torch.Tensor) -> StateError:
    return StateError(
        f"Optimizer {path!r} holds state for a tensor of shape {tuple(key.shape)} that is in no group.",
        code="state.optimizer",
        action="Delete that state, or add the tensor to a group.",
        path=path,
    )


def _no_slots(path: str, key: torch.Tensor, kept: object) -> StateError:
    return StateError(
        f"Optimizer {path!r} keeps {kind_of(kept)}, not a dict of slots, for a parameter of shape {tuple(key.shape)}.",
        code="state.optimizer",
        action="Keep the optimizer's state per parameter in a dict.",
        path=path,
    )


def _refuse_hidden_state(path: str, optimizer: Optimizer) -> None:
    kind = type(optimizer)
    refusal = refusal_of(optimizer)
    action = "Put the inner optimizer into the state, and the rest as values."
    if refusal is not None:
        what, action = refusal.problem, refusal.action
    elif not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        what = "never called Optimizer.__init__, as wrappers of optimizers do"
    elif kind.state_dict is not Optimizer.state_dict and not isinstance(known_type(type_of(optimizer)), Transparent):
        what = "overrides state_dict"
    elif optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks:  # noqa: SLF001
        what = "has state-dict hooks"
    else:
        return
    raise StateError(
        f"Optimizer {path!r} ({kind.__module__}.{kind.__qualname__}) {what}, so its slots and groups may not be its "
        "whole state.",
        code="state.optimizer",
        action=action,
        path=path,
    )
