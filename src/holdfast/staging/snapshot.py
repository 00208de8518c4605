"""A snapshot: the state of one rank at one instant, on its way into a slot.

Most of a training state changes only when an optimizer steps. That part is copied while the next forward and backward
run, and the `Guard` keeps the step back until the copy is done; everything else is set aside at once. (CheckFreq,
FAST'21, calls it the snapshot phase; DataStates-LLM, HPDC'24, copies lazily for the same reason.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from threading import Event

import torch

from holdfast.errors import StateError
from holdfast.format.names import shown
from holdfast.format.patterns import Globs
from holdfast.frameworks.optimizer import is_replayed, slots_of
from holdfast.staging.device import Calls, Queued, devices_of
from holdfast.staging.guarded import Guarded
from holdfast.staging.routes import Pair, Routes, Tensors
from holdfast.state.flatten import FlatState, Walk
from holdfast.state.gather import LocalTensor, Remembered
from holdfast.state.placements import dtensor_type

#: So much is copied by one call, for whose time other threads of Python run.
_CALL_NBYTES = 64 << 20
#: So much is set aside in memory of its own; where more has to be, whoever saves waits until it is in the slot.
_ASIDE_NBYTES = 64 << 20

_version_of = attrgetter("_version")


class Snapshot:
    """The state of this rank at the instant when `wait` returns, for as long as a guard is held; taken by one thread,
    and copied by another.

    Guarded are parameters of optimizers, and what those keep for them: nothing may change that until `copy` has
    returned, see `Guard`. Everything else may change when `wait` has returned.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        guarded: Guarded,
        *,
        rank: int,
        world_size: int,
        last: Sequence[Remembered] = (),
        select: Globs | None = None,
    ) -> None:
        """As `flatten`, without what the walk can leave for later."""
        self._walk = Walk(state, rank=rank, world_size=world_size, last=last, select=select)
        found = self._walk.found()
        names = guarded.names(self._walk, found)
        slots, all_held = _held_slots(self._walk)
        #: Whether it looks like what the last walk saw.
        self.is_as_before = _is_as_before(self._walk.remembered, len(slots), last)
        self._marks = _Marks([*(part for name in names for part in found[name].memory), *slots])
        rest = {name: local for name, local in found.items() if name not in names}
        self._aside: Tensors | None = None
        self._instant = Event()
        if all_held and sum(part.nbytes for local in rest.values() for part in local.memory) <= _ASIDE_NBYTES:
            self._aside = _cloned(rest)
            self._instant.set()
        held = chain.from_iterable(local.memory for local in found.values())
        #: What devices had been given to do by then, the clones among it.
        self.queued = Queued(devices_of(chain(held, slots)))

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers in the state."""
        return self._walk.optimizers

    def wait(self) -> None:
        """Return when all is set aside that no guard holds, or this has ended."""
        self._instant.wait()

    def end(self) -> None:
        """Have nobody wait any more: it is copied, or will not be."""
        self._instant.set()

    def flat(self) -> FlatState:
        """All of the state; what is set aside as that."""
        flat = self._walk.finish()
        return flat if self._aside is None else replace(flat, tensors={**flat.tensors, **self._aside})

    def copy(self, tensors: Tensors, routes: Routes) -> None:
        """Copy `tensors`, those of `flat`, along `routes`.

        Raises:
            StateError: a tensor was changed meanwhile, so that what was copied is of no instant; names it. (What does
                not show: writes through ``.data``, and kernels that do not tell torch what they write to.)
        """
        rest = {name: local for name, local in tensors.items() if self._aside is None or name not in self._aside}
        held = {name: local for name, local in rest.items() if self._marks.cover(local)}
        if self._aside is None:
            _copy(routes.pairs({name: local for name, local in rest.items() if name not in held}))
            self._instant.set()
            _copy(routes.pairs(held))
        elif len(held) < len(rest):
            raise _changed(min(rest.keys() - held.keys()))
        else:
            _copy(routes.pairs(tensors))
        changed = self._marks.changed(held)
        if changed is not None:
            raise _changed(changed)


class _Marks:
    """What shows that tensors were changed, or are other memory now."""

    def __init__(self, memory: list[torch.Tensor]) -> None:
        self._memory = memory
        self._then = self._now()
        # An empty tensor has no address, and nothing that could change.
        self._addresses = {0, *self._then[1]}

    def cover(self, local: LocalTensor) -> bool:
        """Whether all of a tensor is marked."""
        return all(part.data_ptr() in self._addresses for part in local.memory)

    def changed(self, tensors: Tensors) -> str | None:
        """The name of one that is not as it was then."""
        present = self._now()
        if present == self._then:
            return None
        marks = zip(zip(*self._then, strict=True), zip(*present, strict=True), strict=True)
        changed = {then[1] for then, now in marks if then != now}
        named = (name for name, local in tensors.items() if any(part.data_ptr() in changed for part in local.memory))
        return next(named, "a parameter, or what an optimizer keeps for it,")

    def _now(self) -> tuple[list[int], list[int]]:
        return list(map(_version_of, self._memory)), list(map(torch.Tensor.data_ptr, self._memory))


def _is_as_before(remembered: Sequence[Remembered], num_slots: int, last: Sequence[Remembered]) -> bool:
    seen = len(remembered)
    return (
        len(last) == seen + 1
        and all(now is before for now, before in zip(remembered, last, strict=False))
        and len(last[seen].facts.names) == num_slots
    )


def _held_slots(walk: Walk) -> tuple[list[torch.Tensor], bool]:
    """The memory of what optimizers keep for parameters, as far as a guard can hold it still; whether it can all of
    it."""
    held: list[torch.Tensor] = []
    whole = True
    dtensor = dtensor_type()
    for optimizer in walk.optimizers:
        slots = slots_of(optimizer)
        parts = [slot._local_tensor if type(slot) is dtensor else slot for slot in slots]  # noqa: SLF001
        if is_replayed(optimizer) or any(map(torch.Tensor.is_inference, parts)):
            whole = False
        else:
            held += parts
    return held, whole


def _cloned(tensors: Tensors) -> Tensors:
    return {
        name: LocalTensor(local.layout, tuple(part.clone() for part in local.memory)) for name, local in tensors.items()
    }


def _copy(pairs: Iterable[Pair]) -> None:
    """Copy in calls of limited size; returns when all is there."""
    calls = Calls()
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    nbytes = 0
    for target, source in pairs:
        if target.nbytes > _CALL_NBYTES and not source.is_cpu and source.is_contiguous():
            for part in _parts(target, source):
                calls.copy(*part)
            continue
        targets.append(target)
        sources.append(source)
        nbytes += target.nbytes
        if nbytes >= _CALL_NBYTES:
            calls.copy(targets, sources)
            targets, sources, nbytes = [], [], 0
    if targets:
        calls.copy(targets, sources)
    calls.finish()


def _parts(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """A pair in parts for one call each: an accelerator takes one copy as one, however large. Both are contiguous."""
    numel = _CALL_NBYTES // target.element_size()
    for part in zip(torch.split(target.view(-1), numel), torch.split(source.view(-1), numel), strict=True):
        yield [part[0]], [part[1]]


def _changed(name: str) -> StateError:
    return StateError(
        f"{shown(name)} was changed while it was being copied, by something else than a step of an optimizer in the "
        "state.",
        code="state.changed",
        action="Change it under the guard: `with checkpointer.guard():` waits until it may be changed.",
        tensor=name,
    )
