"""A snapshot: the state of one rank at one instant, on its way into a slot.

Most of a training state changes only when an optimizer steps. That part is copied while the next forward and backward
run, and the `Guard` keeps the step back until the copy is done; everything else is copied at once. (CheckFreq,
FAST'21, calls it the snapshot phase; DataStates-LLM, HPDC'24, copies lazily for the same reason.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.format.names import shown
from holdfast.geometry import flat_boxes
from holdfast.state.memory import MemorySource, carried
from holdfast.storage.base import Bytes

#: So much is copied by one call, for whose time other threads of Python run, and after which the copy can be stopped.
_CALL_NBYTES = 64 << 20


class Part(NamedTuple):
    """Elements of the tensor `name`, and the byte of the slot where they go."""

    name: str
    source: MemorySource
    start: int


class _Mark(NamedTuple):
    """What shows that a tensor was changed, or is other memory now."""

    name: str
    tensor: torch.Tensor
    version: int
    address: int

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> _Mark:
        return _Mark(name, tensor, tensor._version, tensor.data_ptr())  # noqa: SLF001 - torch has no other name for it

    def holds(self) -> bool:
        return self == _Mark.of(self.name, self.tensor)


class _Copies:
    """Views of live memory and of where it goes, in calls of limited size."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.calls: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        nbytes = _CALL_NBYTES
        for target, source in pairs:
            if nbytes >= _CALL_NBYTES:
                self.calls.append(([], []))
                nbytes = 0
            self.calls[-1][0].append(target)
            self.calls[-1][1].append(source)
            nbytes += target.nbytes

    def __iter__(self) -> Iterator[None]:
        for targets, sources in self.calls:
            # One call for all of them: of single copies, each would wait for the interpreter beside a busy thread.
            torch._foreach_copy_(targets, sources)
            yield


class Snapshot:
    """A copy of `parts` into `data`, the memory of a slot.

    Tensors whose names are in `guarded` are copied by `copy`, all others by the constructor, which returns when that is
    done: the instant that the snapshot holds is its return. From then on nothing may change what is guarded until
    `copy` has returned, see `Guard`.
    """

    def __init__(self, parts: Sequence[Part], data: Bytes, *, guarded: Collection[str]) -> None:
        memory = torch.from_numpy(data)
        later = [part for part in parts if part.name in guarded and not part.source.view.is_inference()]
        late = {id(part) for part in later}
        self._marks = [_Mark.of(part.name, part.source.view) for part in later]
        self._copies = _Copies(pair for part in later for pair in _pairs(part, memory))
        self.nbytes_left = sum(part.source.nbytes for part in later)
        self._stopped = False
        for _ in _Copies(pair for part in parts if id(part) not in late for pair in _pairs(part, memory)):
            pass

    def copy(self) -> None:
        """Copy what is guarded; from any one thread.

        Raises:
            StateError: a tensor was changed meanwhile, so that what was copied is of no instant; names it. (What does
                not show: writes through ``.data``, and kernels that do not tell torch what they write to.)
        """
        for _ in self._copies:
            if self._stopped:
                return
        for mark in self._marks:
            if not mark.holds():
                raise StateError(
                    f"{shown(mark.name)} was changed while it was being copied, by something else than a step of an "
                    "optimizer in the state.",
                    code="state.changed",
                    action="Change it under the guard: `with checkpointer.guard():` waits until it may be changed.",
                    tensor=mark.name,
                )

    def stop(self) -> None:
        """Have `copy` return soon, with part of it copied."""
        self._stopped = True


def _pairs(part: Part, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Where elements go, and where they are."""
    source = part.source
    view = carried(source.view)
    target = memory[part.start : part.start + source.nbytes].view(view.dtype)
    if source.numel == view.numel():
        yield target.view(view.shape), view
    elif view.is_contiguous():
        yield target, view.reshape(-1)[source.first : source.first + source.numel]
    else:
        for offset, box in flat_boxes(tuple(view.shape), source.first, source.first + source.numel):
            yield target[offset : offset + box.numel].view(box.size), view[box.slices()]
