"""A snapshot: a copy of one rank's state at one instant, made into a slot.

Most of a training state changes only when an optimizer steps. A snapshot copies that part while the next forward and
backward run, and the `Guard` delays the step until the copy is done. It copies everything else at once. (CheckFreq,
FAST'21, calls this the snapshot phase; DataStates-LLM, HPDC'24, copies lazily for the same reason.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from operator import attrgetter

import torch

from holdfast.errors import StateError
from holdfast.format.names import shown
from holdfast.format.patterns import Globs
from holdfast.latch import Latch
from holdfast.snapshot.device import Calls, Queued, devices_of
from holdfast.snapshot.routes import Pair, Routes, Tensors
from holdfast.state.collect import LocalTensor, WalkCache
from holdfast.state.flatten import FlatState, Walk
from holdfast.state.marks import Marked, Versions

#: Bytes that one call copies; other Python threads run during the call.
_CALL_NBYTES = 64 << 20
#: Limit of the bytes that are cloned into fresh memory; where there are more, the saving thread waits until they are in
#: the slot.
_ASIDE_NBYTES = 64 << 20


_memory = attrgetter("memory")


class Snapshot:
    """The state of this rank at one instant. The saving thread makes it, and another thread copies it.

    The constructor reads the whole structure: the tensors, values, groups and slots that exist. Tensors that only steps
    of the optimizers change (see `Walk.stepped`) are guarded: nothing may change them until `copy` has returned, and
    the caller holds a `Guard` so long. Everything else may change once `instant` is set.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        *,
        rank: int,
        world_size: int,
        last: Sequence[WalkCache] = (),
        select: Globs | None = None,
    ) -> None:
        """Walk the state; the arguments are those of `flatten`. Slots that `Walk` can leave for later get no names
        yet."""
        self._walk = Walk(state, rank=rank, world_size=world_size, last=last, select=select)
        found = self._walk.found()
        stepped = self._walk.stepped(found)
        #: Whether this walk found the same tensors as the last one.
        self.is_as_before = _is_as_before(self._walk, last)
        self._marked = Marked()
        are_all_marked = self._marked.add(_memory_of(map(found.__getitem__, stepped)))
        if not are_all_marked:  # torch would not show changes of some of them, so those are copied at once
            stepped = {name for name in stepped if self._marked.add(found[name].memory)}
        rest = {name: local for name, local in found.items() if name not in stepped} if stepped else found
        #: The names of the tensors that are copied before `instant` is set.
        self._at_once = frozenset(rest)
        memory = _memory_of(rest.values())
        #: Shows whether another thread changes those tensors during the copy; the saving thread does not.
        self._versions: Versions | None = Versions(memory)
        #: Their clones, in order, where they are small enough. (Only the tensors, because the saving thread waits for
        #: this.)
        self._aside: list[torch.Tensor] | None = None
        self._rest: Tensors = {}
        #: Set when all unguarded tensors are copied, or the snapshot has ended.
        self.instant = Latch()
        if sum(part.nbytes for part in memory) <= _ASIDE_NBYTES:
            self._aside, self._rest = _cloned(memory), rest
            self._check_whole(rest)
            self.instant.set()
        held = chain.from_iterable(local.memory for local in found.values())
        #: The work that was queued on devices by then, the clones included.
        self.queued = Queued(devices_of(chain(held, self._walk.left.memory)))

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers in the state."""
        return self._walk.optimizers

    def end(self) -> None:
        """Set `instant`, so that no thread waits any more, and release the clones: they are in the slot, or not
        needed."""
        self.instant.set()
        self._aside, self._rest = None, {}

    def flat(self) -> FlatState:
        """The whole state, with the clones in place of the tensors that they were made of."""
        flat = self._walk.finish()
        if self._aside is None:
            return flat
        parts = iter(self._aside)
        aside = {
            name: LocalTensor(local.layout, tuple(islice(parts, len(local.memory))))
            for name, local in self._rest.items()
        }
        return replace(flat, tensors={**flat.tensors, **aside})

    def copy(self, tensors: Tensors, routes: Routes) -> None:
        """Copy `tensors`, those of `flat`, along `routes`. Blocks until they are in the slot.

        Raises:
            StateError: a tensor was changed during the copy, so the copy is not of one instant. The error names the
                tensor where `Marked` shows which one it is.
        """
        held = {name: local for name, local in tensors.items() if name not in self._at_once}
        if self._aside is None:
            rest = {name: local for name, local in tensors.items() if name in self._at_once}
            _copy(routes.pairs(rest))
            self._check_whole(rest)
            self.instant.set()
            _copy(routes.pairs(held))
        else:
            _copy(routes.pairs(tensors))
        changed = self._marked.changed() | self._walk.left.changed()
        if changed:
            raise _changed(_name_at(changed, held))

    def _check_whole(self, rest: Tensors) -> None:
        """Raise `StateError` if a thread changed one of the `rest` while they were copied."""
        versions, self._versions = self._versions, None
        changed = {id(part) for part in versions.changed()} if versions is not None else set()
        if changed:
            named = (name for name, local in rest.items() if any(id(part) in changed for part in local.memory))
            raise _changed(next(named, "a tensor"))


def _is_as_before(walk: Walk, last: Sequence[WalkCache]) -> bool:
    seen = len(walk.remembered)
    return (
        len(last) == seen + 1
        and all(now is before for now, before in zip(walk.remembered, last, strict=False))
        and last[seen].num_left == len(walk.left.memory)
    )


def _memory_of(tensors: Iterable[LocalTensor]) -> list[torch.Tensor]:
    return list(chain.from_iterable(map(_memory, tensors)))


def _name_at(addresses: set[int], tensors: Tensors) -> str:
    named = (name for name, local in tensors.items() if any(part.data_ptr() in addresses for part in local.memory))
    return next(named, "a parameter, or what an optimizer keeps for it,")


def _cloned(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.clone() for part in memory]


def _copy(pairs: Iterable[Pair]) -> None:
    """Copy in calls of limited size; returns when all targets are filled."""
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
    """Split a contiguous pair into parts for one call each: an accelerator does not interrupt a copy, however large."""
    numel = _CALL_NBYTES // target.element_size()
    for part in zip(torch.split(target.view(-1), numel), torch.split(source.view(-1), numel), strict=True):
        yield [part[0]], [part[1]]


def _changed(name: str) -> StateError:
    return StateError(
        f"{shown(name)} was changed while it was being copied, by code other than the step of an optimizer in the "
        "state.",
        code="state.changed",
        action="Make the change under the guard: `with checkpointer.guard():` waits until the copy is done.",
        tensor=name,
    )
