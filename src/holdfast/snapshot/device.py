"""Accelerators: what is copied from them, when, and when it is there.

Kernels run later than the calls that queue them, in the order of their stream. So the state of an instant is what it
is when the work has run that was queued until then; it is copied by streams of our own, which wait for that, and run
beside what is queued later. Copies are issued in calls of limited size, of which few are under way at the same time:
those of training that come in between, of a loss that is printed, do not wait behind gigabytes.

Nothing here waits for a whole device. Without tensors on accelerators nothing is done. (CUDA, and ROCm by that name.)
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

#: So many calls are under way at the same time: one, and the next.
_NUM_CALLS: Final = 2
#: Of ``cudaHostRegister``: for all contexts of the process.
_PORTABLE: Final = 1

_log = logging.getLogger(__name__)


def devices_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.device]:
    """The accelerators that hold any of `tensors`."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return frozenset()  # so none is on one, and thousands need not be looked at
    return frozenset(tensor.device for tensor in tensors if tensor.is_cuda)


def await_queued(tensors: Iterable[torch.Tensor]) -> None:
    """Return when the work has run that this thread queued on the current streams of the devices of `tensors`: other
    threads see what it wrote, and it does not write over what they do."""
    for device in devices_of(tensors):
        torch.cuda.current_stream(device).synchronize()


class Queued:
    """The instant at which all has run that the current streams of `devices` hold when this is made."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @property
    def device(self) -> torch.device | None:
        """One of the devices; None where there is none."""
        return next(iter(self._events), None)

    @contextmanager
    def passed(self) -> Iterator[None]:
        """A ``with`` block in which everything that this thread queues on those devices runs after that instant, beside
        what other threads queue."""
        with ExitStack() as stack:
            for device, event in self._events.items():
                stream = _stream(device)
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def await_copies(self) -> None:
        """Return when everything has run that copies of this process had queued on those devices."""
        for device in self._events:
            _stream(device).synchronize()


class Calls:
    """Copies into host memory, issued by this thread call by call; from accelerators they go on after the call."""

    def __init__(self) -> None:
        self._under_way: deque[list[torch.cuda.Event]] = deque()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy in one call; returns when few enough are under way."""
        devices = devices_of(sources)
        # One call for all of them: of single copies, each would wait for the interpreter beside a busy thread. Of
        # accelerators of other kinds, nobody would know when the copies are over.
        torch._foreach_copy_(targets, sources, non_blocking=bool(devices))
        if devices:
            self._under_way.append([_marked(device) for device in devices])
        while len(self._under_way) > _NUM_CALLS:
            self._await_oldest()

    def finish(self) -> None:
        """Return when all are over."""
        while self._under_way:
            self._await_oldest()

    def _await_oldest(self) -> None:
        for event in self._under_way.popleft():
            event.synchronize()


def registered(data: Bytes, device: torch.device) -> Callable[[], None]:
    """Have accelerators copy into `data` by themselves, past the processor; returns what ends that, to be called before
    `data` is unmapped. Takes about as long as to fill the memory. Where the driver refuses, it is said, and copies take
    longer."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, start_s = data.ctypes.data, time.perf_counter()
    with torch.cuda.device(device):  # else the first device gets a context of this process, and memory for it
        status = int(runtime.cudaHostRegister(address, data.nbytes, _PORTABLE))
    if status:
        _log.warning(
            "memory for snapshots could not be registered with %s (error %d): copies take longer", device, status
        )
        return lambda: None
    _log.info("registered %d bytes with %s in %.2f s", data.nbytes, device, time.perf_counter() - start_s)

    def end() -> None:
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    return end


def _marked(device: torch.device) -> torch.cuda.Event:
    """An event behind what this thread has queued; who waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process that snapshots are copied on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
