"""A snapshot: the state of one rank at one instant, on its way into a slot.

Most of a training state changes only when an optimizer steps. That part is copied while the next forward and backward
run, and the `Guard` keeps the step back until the copy is done; everything else is copied at once. (CheckFreq,
FAST'21, calls it the snapshot phase; DataStates-LLM, HPDC'24, copies lazily for the same reason.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter

import torch

from holdfast.errors import StateError
from holdfast.format.names import shown
from holdfast.staging.routes import Pair, Routes, Tensors

#: So much is copied by one call, for whose time other threads of Python run.
_CALL_NBYTES = 64 << 20

_version_of = attrgetter("_version")


class Snapshot:
    """A copy of `tensors` along `routes`.

    Tensors whose names are in `guarded` are copied by `copy`, all others by the constructor, which returns when that is
    done: the instant that the snapshot holds is its return. From then on nothing may change what is guarded until
    `copy` has returned, see `Guard`. (None of that may be a tensor of inference: torch does not count their changes.)
    """

    def __init__(self, routes: Routes, tensors: Tensors, *, guarded: Collection[str]) -> None:
        self._routes = routes
        self._tensors = tensors
        self._later, now = routes.split(guarded)
        self._marks = _Marks([name for name in guarded if name in tensors], tensors)
        _copy(routes.pairs(now, tensors))

    def copy(self) -> None:
        """Copy what is guarded; from any one thread.

        Raises:
            StateError: a tensor was changed meanwhile, so that what was copied is of no instant; names it. (What does
                not show: writes through ``.data``, and kernels that do not tell torch what they write to.)
        """
        _copy(self._routes.pairs(self._later, self._tensors))
        changed = self._marks.changed()
        if changed is not None:
            raise StateError(
                f"{shown(changed)} was changed while it was being copied, by something else than a step of an "
                "optimizer in the state.",
                code="state.changed",
                action="Change it under the guard: `with checkpointer.guard():` waits until it may be changed.",
                tensor=changed,
            )


class _Marks:
    """What shows that tensors were changed, or are other memory now."""

    def __init__(self, names: Sequence[str], tensors: Tensors) -> None:
        self._names = [name for name in names for _ in tensors[name].memory]
        self._memory = [part for name in names for part in tensors[name].memory]
        self._then = self._now()

    def changed(self) -> str | None:
        """The first tensor that is not as it was then."""
        marks = zip(self._names, zip(*self._then, strict=True), zip(*self._now(), strict=True), strict=True)
        return next((name for name, then, now in marks if then != now), None)

    def _now(self) -> tuple[list[int], list[int]]:
        return list(map(_version_of, self._memory)), list(map(torch.Tensor.data_ptr, self._memory))


def _copy(pairs: Iterable[Pair]) -> None:
    """Copy in calls of limited size."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    nbytes = 0
    for target, source in pairs:
        targets.append(target)
        sources.append(source)
        nbytes += target.nbytes
        if nbytes >= _CALL_NBYTES:
            _copy_all(targets, sources)
            targets, sources, nbytes = [], [], 0
    _copy_all(targets, sources)


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    # One call for all of them: of single copies, each would wait for the interpreter beside a busy thread.
    if targets:
        torch._foreach_copy_(targets, sources)
