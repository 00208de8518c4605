"""Copies from accelerators: the instant that they capture, and when they have arrived.

Kernels run later than the calls that queue them, in the order of their stream. So the state at an instant is the state
after all work that was queued until then. Streams of our own wait for that work, and then copy beside the work that is
queued later. The copies are issued in calls of limited size, and few of them are under way at the same time, so that a
small copy of the training, such as of a loss to print, does not wait behind gigabytes.

Nothing here waits for a whole device, and without tensors on accelerators nothing is done. (These are CUDA devices, and
ROCm's, which torch calls CUDA too.)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Final

import torch

from holdfast.store.base import Bytes

#: Number of calls under way at the same time: one, and the next.
_NUM_CALLS: Final = 2
#: Flag of ``cudaHostRegister``: register for all contexts of the process.
_PORTABLE: Final = 1

_log = logging.getLogger(__name__)


def devices_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.device]:
    """The accelerators that hold any of `tensors`."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return frozenset()  # no tensor can be on one, and a check of thousands of tensors takes time
    return frozenset(tensor.device for tensor in tensors if tensor.is_cuda)


def await_queued(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until the work has run that this thread has queued on the current streams of the devices of `tensors`. Then
    other threads see its results, and it cannot overwrite theirs."""
    for device in devices_of(tensors):
        torch.cuda.current_stream(device).synchronize()


class Queued:
    """The instant at which all work has run that the current streams of `devices` hold when this object is made."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @property
    def device(self) -> torch.device | None:
        """One of the devices; None if there are none."""
        return next(iter(self._events), None)

    @contextmanager
    def passed(self) -> Iterator[None]:
        """A ``with`` block in which all work that this thread queues on those devices runs after that instant, in
        parallel with other threads' work."""
        with ExitStack() as stack:
            for device, event in self._events.items():
                stream = _stream(device)
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def await_copies(self) -> None:
        """Wait until all copies have run that this process has queued on those devices."""
        for device in self._events:
            _stream(device).synchronize()


class Calls:
    """The calls by which this thread copies into host memory. Copies from accelerators go on after their call."""

    def __init__(self) -> None:
        self._under_way: deque[list[torch.cuda.Event]] = deque()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy in one call; blocks until at most `_NUM_CALLS` calls are under way."""
        devices = devices_of(sources)
        # One call for all of them: beside a busy thread, each single copy would wait for the interpreter. It blocks for
        # accelerators of other kinds, because nothing here tells when their copies are over.
        torch._foreach_copy_(targets, sources, non_blocking=bool(devices))
        if devices:
            self._under_way.append([_marked(device) for device in devices])
        while len(self._under_way) > _NUM_CALLS:
            self._await_oldest()

    def finish(self) -> None:
        """Wait until all copies are over."""
        while self._under_way:
            self._await_oldest()

    def _await_oldest(self) -> None:
        for event in self._under_way.popleft():
            event.synchronize()


def registered(data: Bytes, device: torch.device) -> Callable[[], None]:
    """Register `data` with the driver, so that accelerators copy into it without the processor. Returns a function that
    unregisters it, to be called before `data` is unmapped. Takes about as long as filling the memory. Where the driver
    refuses, this logs a warning, and copies take longer."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, start_s = data.ctypes.data, time.perf_counter()
    with torch.cuda.device(device):  # otherwise this process would make a context, which takes memory, on device 0
        status = int(runtime.cudaHostRegister(address, data.nbytes, _PORTABLE))
    if status:
        _log.warning("could not register memory for snapshots with %s (error %d): copies are slower", device, status)
        return lambda: None
    _log.info("registered %d bytes with %s in %.2f s", data.nbytes, device, time.perf_counter() - start_s)

    def end() -> None:
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    return end


def _marked(device: torch.device) -> torch.cuda.Event:
    """An event after all work that this thread has queued; a thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this process copies snapshots from `device`."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
