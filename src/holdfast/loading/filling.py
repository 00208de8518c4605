"""The filling of one rank's targets in a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch

from holdfast.checkpoint.data_files import DataFiles
from holdfast.checkpoint.delivery import Targets
from holdfast.collector import collector_paused
from holdfast.control.deadline import Deadline
from holdfast.errors import DeadlineError
from holdfast.geometry import Box
from holdfast.loading.wanted import Wanted, wanted
from holdfast.mapping.parts import Parts
from holdfast.plan.load import ReadRequest
from holdfast.snapshot.device import await_queued
from holdfast.snapshot.guard import await_copies
from holdfast.state.binding import Binding
from holdfast.store.base import Bytes


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A ``with`` block, or a decorator, in which torch makes tensors that can be trained. The caller may be in
    inference mode, and no later step could change slots that are made there."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class _Discarded:
    """Targets that discard all elements."""

    def put(self, want: int, at: Box, elements: npt.NDArray[Any]) -> None:
        pass

    def fill(self, wants: Sequence[int], skipped: int, data: Bytes) -> None:
        pass

    def memory(self, want: int) -> None:
        return None


class Filling:
    """The filling of one rank's targets: the plan of its reads, and the last steps after them. `parts` has, for the
    tensors that a mapping changed, the stored parts that they are made of."""

    def __init__(
        self, files: DataFiles, binding: Binding, parts: Mapping[str, Parts], rank: int, deadline: Deadline
    ) -> None:
        self._deadline = deadline
        self._files = files
        self._binding = binding
        self._parts = parts
        self._rank = rank
        self._wanted = Wanted()

    def plan(self) -> tuple[Sequence[ReadRequest], Targets]:
        """The read requests, and the targets of their elements. First waits until no save is copying live state, and
        gives memory to tensors on the meta device.

        Raises:
            DeadlineError: a save was still copying at the deadline.
        """
        if not await_copies(timeout_s=self._deadline.remaining_s()):
            raise DeadlineError(
                "A save in this process was still copying the state when the timeout expired.",
                code="timeout.copy",
                action="Raise timeout_s, or wait for `handle.staged` of that save first.",
            )
        self._binding.allocate()
        with collector_paused():
            self._wanted = wanted(self._files, self._binding, self._parts, self._rank)
        await_queued(self._wanted.targets.views)
        return self._wanted.wants, self._wanted.targets

    def plan_check(self) -> tuple[Sequence[ReadRequest], Targets]:
        """The same read requests as `plan`, to check the stored bytes: the targets discard all elements, and nothing
        changes."""
        return wanted(self._files, self._binding, self._parts, self._rank).wants, _Discarded()

    def finish(self) -> object:
        """Set memory for which nothing is stored to 0, and put the values in place; returns the whole tree. Call it
        after everything was read."""
        with torch.inference_mode():
            for memory in self._wanted.zeros:
                memory.zero_()
        return self._binding.finish()

    @property
    def resharded(self) -> tuple[str, ...]:
        """The tensors of which this rank needs a box that is not exactly one stored piece."""
        return tuple(sorted(self._wanted.resharded(self._files)))

    @property
    def cast(self) -> tuple[str, ...]:
        """The tensors that are stored in another dtype."""
        return tuple(sorted(self._wanted.cast))

    @property
    def needed_nbytes(self) -> int:
        """The bytes of all elements that this rank needs, in their stored dtypes."""
        return self._wanted.targets.nbytes
