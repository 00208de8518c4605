"""Optimizer slots of a parameter that is flat memory: each slot becomes a tensor per logical parameter, and back.

A slot lies like the parameter, element by element, or is one number for all of it, such as ``step``. That number is
stored under the name of every parameter in the flat memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple, cast

import torch
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.format.names import component, join, parse_component
from holdfast.format.values import PlanesNode
from holdfast.frameworks import BindingSource, Finish, NamedTensor, Sink
from holdfast.frameworks.flat_memory import FlatMemory
from holdfast.frameworks.known_types import type_of
from holdfast.frameworks.planes import planed_type

Slots = Mapping[object, object]
#: A bound slot: the tensor that the load fills, or a function that returns the slot after the load.
Slot = torch.Tensor | Finish

_ACTION: Final = (
    "Use an optimizer that works element by element, such as AdamW; or shard the model with "
    "torch.distributed.fsdp.fully_shard (FSDP2)."
)


def check_slots(path: str, held: FlatMemory, slots: Slots) -> None:
    """Refuse slots of the optimizer at `path` whose elements belong to no known element of a parameter.

    Raises:
        StateError: code ``state.optimizer``.
    """
    for key, slot in slots.items():
        if isinstance(slot, torch.Tensor) and planed_type(type_of(slot)) is not None:
            raise StateError(
                f"Slot {key!r} of optimizer {path!r} is quantised ({type(slot).__qualname__}), and its parameter is "
                "memory that FSDP1 flattened: blocks would go over the ends of parameters and of ranks.",
                code="state.optimizer",
                action=_ACTION,
                path=path,
            )
        if isinstance(slot, torch.Tensor) and slot.ndim and not held.lies_alike(slot):
            raise StateError(
                f"Slot {key!r} of optimizer {path!r} has shape {tuple(slot.shape)}, but the memory of its parameter, "
                f"which FSDP1 flattened, has shape {tuple(held.memory.shape)}: nothing tells to which elements of "
                f"{held.portions[0].names[0]!r} it belongs.",
                code="state.optimizer",
                action=_ACTION,
                path=path,
            )


def describe_slots(state: str, held: FlatMemory, slots: Slots, sink: Sink) -> None:
    """Add the slots of one owner of flat memory, by the names of its portions below `state`, to `sink`."""
    for key, slot in slots.items():
        text = component(key, path=state)
        for portion in held.portions:
            name = join(state, portion.names[0], text)
            if not isinstance(slot, torch.Tensor):
                sink.tree(name, slot, "compare")
            elif slot.ndim:
                sink.portion(name, portion, slot.detach())
            else:
                sink.tensors([NamedTensor(name, slot, "compare")])


def bind_flat_slots(
    path: str,
    optimizer: Optimizer,
    parameters: Iterable[NamedTensor],
    stored: Mapping[str, AbstractSet[str]],
    steps_on_device: bool,
    source: BindingSource,
) -> Iterator[tuple[torch.Tensor, dict[object, Slot]]]:
    """Bind the stored slots of those `parameters` that are owners of flat memory, each owner once. `stored` has the
    components of the slots of each parameter."""
    owners = {id(entry.tensor): held for entry in parameters if (held := source.held(entry.tensor)) is not None}
    for held in owners.values():
        device = held.memory.device if steps_on_device else torch.device("cpu")
        live: Slots = optimizer.state.get(held.owner, {})
        yield held.owner, _FlatSlots(join(path, "state"), stored, live, device).bind(held, source)


class _FlatSlots(NamedTuple):
    """The binding of the slots of one owner of flat memory: the optimizer's `state` path, the stored slots of each
    parameter, the live slots, and the device of step counters."""

    state: str
    stored: Mapping[str, AbstractSet[str]]
    live: Slots
    step_device: torch.device

    def bind(self, held: FlatMemory, source: BindingSource) -> dict[object, Slot]:
        """Bind the stored slots of the portions. A rank without memory gets no slots: its optimizer steps nothing. One
        with nothing but padding gets them, so that it counts steps as the others do.

        Refuses slots that only some of the portions have: the owner has one slot for all of them.
        """
        names = [portion.names[0] for portion in held.portions if portion.names[0] in self.stored]
        if not held.memory.numel():
            for name in names:
                for below in source.stored_below(join(self.state, name)):
                    source.mark(below)
            return {}
        texts = {text for name in names for text in self.stored[name]}
        bound: dict[object, Slot] = {}
        for text in [*(texts & {"step"}), *sorted(texts - {"step"})]:
            lacking = [name for name in names if text not in self.stored[name]]
            if lacking:
                what = f"in the checkpoint for some parameters of one flat parameter only, not for {lacking[0]!r}"
                source.refuse("incompatible.flat_slots", join(self.state, names[0], text), what)
                continue
            paths = [join(self.state, name, text) for name in names]
            if quantised := [name for name in paths if isinstance(source.nodes.get(name), PlanesNode)]:
                what = "of a parameter that FSDP1 flattened here, and quantised in the checkpoint"
                source.refuse("incompatible.blocks", quantised[0], what)
                continue
            bound[parse_component(text)] = self._slot(text, names, held, source)
        return bound

    def _slot(self, text: str, names: list[str], held: FlatMemory, source: BindingSource) -> Slot:
        stored = [source.stored(join(self.state, name, text)) for name in names]
        first, *others = (join(self.state, name, text) for name in names)
        live = self.live.get(parse_component(text))
        mine = live if isinstance(live, torch.Tensor) else None
        kept = stored[0]
        if kept is None:
            value = source.opaque(first)
            for other in others:
                source.require_equal(first, other)
            return value
        if not kept.shape and (text == "step" or held.memory.ndim == 0 or held.portions[0].shape):
            device = self.step_device if text == "step" or mine is None else mine.device
            number = source.memory(first, live=mine, like=None, device=device)
            for name in (first, *others):
                source.fill(NamedTensor(name, number, "compare"))
            return number
        return self._lying_alike(text, mine, held, source)

    def _lying_alike(
        self, text: str, live: torch.Tensor | None, held: FlatMemory, source: BindingSource
    ) -> torch.Tensor:
        """The memory of a slot that lies like the parameter, bound to the stored slots of all portions."""
        portions = [portion for portion in held.portions if portion.names[0] in self.stored]
        dtype = self._dtype(text, portions[0].names[0], held, source)
        if live is None or live.dtype is not dtype or not held.lies_alike(live):
            device = held.memory.device if live is None else live.device
            live = torch.zeros_like(held.memory, dtype=dtype, device=device)  # padding stays zero
        for portion in portions:
            source.portion(join(self.state, portion.names[0], text), portion, live)
        return live

    def _dtype(self, text: str, name: str, held: FlatMemory, source: BindingSource) -> torch.dtype:
        """The dtype of a slot: the stored one; or that of the parameter, if the parameter is cast and the stored slot
        has the dtype of the stored parameter."""
        parameter, slot = source.stored(name), source.stored(join(self.state, name, text))
        assert slot is not None
        mine = held.memory.dtype
        if parameter is not None and parameter.dtype == slot.dtype and getattr(torch, parameter.dtype, None) != mine:
            return mine
        return cast("torch.dtype", getattr(torch, slot.dtype))
