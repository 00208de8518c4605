"""The optimizer of a DeepSpeed engine under the names that a plain optimizer of the model has.

DeepSpeed's inner optimizer trains flat tensors, whose number and content depend on the number of ranks. Its slots are
cut here as the master weights are: a slot of a flat tensor is a slot in pieces of each parameter in it, and the one
count of steps is that of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from holdfast.format.names import component, join, parse_component
from holdfast.format.values import Open, Plain
from holdfast.frameworks import BindingSource, Finish, NamedTensor, Sink
from holdfast.frameworks.deepspeed_flats import EngineFlats, FlatTensor, HeldPart
from holdfast.frameworks.optimizer_groups import (
    SavedOptimizer,
    bind_hyper,
    check_alike,
    check_rates,
    flag,
    group_origin,
    is_other_class,
    own_flags,
    read_saved,
)
from holdfast.frameworks.optimizer_saving import flatten_optimizer, is_replayed
from holdfast.frameworks.scheduler_lists import check_lists

#: Optimizers that change slots before their step, while gradients are reduced.
_CHANGE_EARLY = frozenset(("MuonWithAuxAdam",))

#: The canonical name of each parameter, by its id.
Names = Mapping[int, str]


def describe_slots(path: str, flats: EngineFlats, names: Names, sink: Sink) -> None:
    """Add the optimizer at `path`, and say which memory its steps change: the master weights and the slots."""
    inner = flats.inner
    flatten_optimizer(path, inner, sink)
    stepped: list[NamedTensor] = []
    for flat in flats.flats:
        slots = inner.state.get(flat.master, {})
        for part in flat.parts:
            name = names[id(part.parameter)]
            sink.node(join(path, "group_of", component(name)), Plain(flat.group))
            stepped.append(NamedTensor(name, flat.master, "split"))
            for key, value in slots.items():
                slot = join(path, "state", name, component(key, path=path))
                stepped.append(NamedTensor(slot, flat.master, "split"))
                if isinstance(value, torch.Tensor) and value.shape == flat.master.shape:
                    sink.pieces(slot, flat.pieces(part, value))
                elif isinstance(value, torch.Tensor):
                    sink.tensors([NamedTensor(slot, value, "split")])
                else:
                    sink.tree(slot, value, "split")
    is_early = type(inner).__name__ in _CHANGE_EARLY or is_replayed(inner)
    sink.steps(inner, [] if is_early else stepped)


def bind_slots(path: str, flats: EngineFlats, names: Names, source: BindingSource) -> Finish:
    """Bind the groups and the slots of the inner optimizer, as `bind_optimizer` does those of a plain one. Slots that
    fit are filled in place; the result puts others, and the hyper-parameters, into the optimizer."""
    inner = flats.inner
    node = source.nodes.get(path)
    if node != Open("optimizer"):
        if node is None:
            source.missing(path)
        else:
            source.differs(path, "the optimizer of a DeepSpeed engine")
        return lambda: inner
    saved = read_saved(path, source)
    own = own_flags(inner) if is_other_class(path, inner, saved, source) else frozenset[str]()
    steps: list[Finish] = []
    served: dict[int, int] = {}
    for index, group in enumerate(inner.param_groups):
        chosen = [flat for flat in flats.flats if flat.group == index]
        stored = list(_stored(path, chosen, names, saved, source))
        origin = group_origin(path, index, group, [saved.group_of[name] for name in stored], saved, source)
        if origin is None:
            continue
        if source.is_strict and stored:
            check_alike(path, served.setdefault(origin, index), index, origin, inner)
        origin_path = join(path, "param_groups", str(origin))
        steps.append(bind_hyper(origin_path, group, own, source))
        on_device = any(flag(join(origin_path, key), group.get(key), source) for key in ("capturable", "fused"))
        slots = _SlotBinding(join(path, "state"), inner, saved, source, is_on_device=on_device)
        steps += [slots.bind(flat, names) for flat in chosen]
    check_rates(path, served, source)
    if source.is_strict:
        check_lists(path, inner, served, source)

    def finish() -> Optimizer:
        for step in steps:
            step()
        return inner

    return finish


def _stored(
    path: str, chosen: Sequence[FlatTensor], names: Names, saved: SavedOptimizer, source: BindingSource
) -> Iterator[str]:
    """The names of those parameters of flat tensors whose group is stored. Reports the others as missing."""
    for part in chain.from_iterable(flat.parts for flat in chosen):
        name = names[id(part.parameter)]
        if name in saved.group_names:
            source.mark(saved.group_names[name])
            yield name
        else:
            source.missing(join(path, "group_of", component(name)))


class _Stored(NamedTuple):
    """A parameter of a flat tensor, and the stored name of one slot of it."""

    part: HeldPart
    slot: str


class _SlotBinding:
    """The binding of the slots of flat tensors to those stored below the path `state`."""

    def __init__(
        self, state: str, inner: Optimizer, saved: SavedOptimizer, source: BindingSource, *, is_on_device: bool
    ) -> None:
        self._state = state
        self._inner = inner
        self._saved = saved
        self._source = source
        self._is_on_device = is_on_device

    def bind(self, flat: FlatTensor, names: Names) -> Finish:
        """Bind the slots of one flat tensor. The result replaces its state in the optimizer."""
        named = [(part, names[id(part.parameter)]) for part in flat.parts]
        stored = [(part, name) for part, name in named if name in self._saved.slots]
        kinds = {frozenset(self._saved.slots[name]) for _, name in stored}
        if len(kinds) != 1:
            if kinds:
                text = "parameters with different slots in the checkpoint, which DeepSpeed trains as one tensor here"
                self._source.refuse("incompatible.slots", join(self._state, stored[0][1]), text)
            return lambda: None
        slots: dict[object, Callable[[], object]] = {}
        (texts,) = kinds
        for text in (*(texts & {"step"}), *sorted(texts - {"step"})):  # mostly torch's own order
            of_slot = [_Stored(part, join(self._state, name, text)) for part, name in stored]
            slots[parse_component(text)] = self._bind_slot(flat, text, of_slot)

        def finish() -> None:
            filled = {key: slot() for key, slot in slots.items()}
            if filled:
                self._inner.state[flat.master] = filled
            else:
                self._inner.state.pop(flat.master, None)

        return finish

    def _bind_slot(self, flat: FlatTensor, text: str, of_slot: Sequence[_Stored]) -> Callable[[], object]:
        """Bind the slot with the component `text` of all parameters; returns a function for its value after the
        load."""
        live = self._inner.state.get(flat.master, {}).get(parse_component(text))
        found = [self._source.stored(each.slot) for each in of_slot]
        tensors = [tensor for tensor in found if tensor is not None]
        if not tensors:
            return self._bind_value(text, of_slot)
        if text != "step" and all(
            tensor.shape == each.part.shape for tensor, each in zip(found, of_slot, strict=True) if tensor is not None
        ):
            dtype = getattr(torch, tensors[0].dtype)
            memory = self._memory(flat, live, flat.master.dtype if dtype.is_floating_point else dtype)
            for each in of_slot:
                self._source.live(each.slot, flat.pieces(each.part, memory))
            return lambda: memory
        if any(tensor.shape != () for tensor in tensors):
            text = "of another shape than its parameter, so it cannot be cut as DeepSpeed cuts that"
            self._source.refuse("incompatible.slots", of_slot[0].slot, text)
            return lambda: live
        return self._bind_number(flat, live, of_slot)

    def _bind_value(self, text: str, of_slot: Sequence[_Stored]) -> Callable[[], object]:
        first, *others = of_slot
        for other in others:
            self._source.require_equal(first.slot, other.slot)
        value = self._source.opaque(first.slot)
        if text != "step" or not self._counts_in_tensors:
            return value
        return lambda: torch.tensor(value(), dtype=torch.float32)

    def _bind_number(self, flat: FlatTensor, live: object, of_slot: Sequence[_Stored]) -> Callable[[], object]:
        """Bind a number that is stored once for each parameter, and must be the same for all of them."""
        device = flat.master.device if self._is_on_device else torch.device("cpu")
        mine = live if isinstance(live, torch.Tensor) else None
        number = self._source.memory(of_slot[0].slot, live=mine, like=None, device=device)
        for each in of_slot:
            self._source.fill(NamedTensor(each.slot, number, "split"))
        return lambda: number if self._counts_in_tensors else int(number.item())

    @staticmethod
    def _memory(flat: FlatTensor, live: object, dtype: torch.dtype) -> torch.Tensor:
        """The live slot if it has the form of the flat tensor, else new memory, whose padding is zero."""
        master = flat.master
        if isinstance(live, torch.Tensor) and live.shape == master.shape and live.device == master.device:
            return live
        return torch.zeros(master.shape, dtype=dtype, device=master.device)

    @property
    def _counts_in_tensors(self) -> bool:
        """Whether the optimizer counts its steps in a tensor: DeepSpeed's own ones count in a number."""
        return not type(self._inner).__module__.startswith("deepspeed.")
