"""Peers that save while training goes on, each set up for the shortest pause that it knows on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from bench.meter import give_back
from bench.peers import TorchCheckpointing, TorchSnapshot
from bench.state import State
from bench.way import Futures, Pending, Way


class DcpAsync(Way):
    """`torch.distributed.checkpoint.async_save`, which writes in a thread or in a process of its own.

    Its stager is kept from save to save, with the memory that it copies into, and copies in the background. (Pinned
    memory is for GPUs; shared memory spares the process a copy.) Its thread exchanges messages, so it has a group of
    its own.
    """

    def __init__(self, state: State, kind: AsyncCheckpointerType) -> None:
        super().__init__(state)
        self._kind = kind
        self._group = dist.new_group(backend="gloo")
        self._stager: DefaultStager | None = self._new_stager()
        self._last: Futures | None = None

    def begin(self, folder: Path) -> Pending:
        """Begin to save into `folder`, when the last save is over: it needs the stager's memory."""
        if self._last is not None:
            self._last.wait()
        begun = async_save(
            self.state.tree,
            checkpoint_id=folder,
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        assert isinstance(begun, AsyncSaveResponse)
        self._last = Futures(begun.upload_completion, begun.staging_completion)
        return self._last

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Wait until the state has been copied."""
        if self._last is not None:
            self._last.wait_copied()
        yield

    def ready(self) -> None:
        """Have a stager with memory that it has copied into."""
        if self._stager is None:
            self._stager = self._new_stager()
            copied = self._stager.stage(self.state.tree)
            assert isinstance(copied, Future)
            copied.result()

    def rest(self) -> None:
        """Give up the stager; not one whose memory is shared: the process keeps that until its next save anyway."""
        if self._kind == AsyncCheckpointerType.THREAD:
            self.close()

    def load(self, folder: Path) -> None:
        """Load into the state."""
        dcp_load(self.state.tree, checkpoint_id=folder)

    def close(self) -> None:
        """Let go of the memory; the process ends with this one."""
        if self._stager is not None:
            self._stager.close()
        self._stager = self._last = None
        give_back()

    def _new_stager(self) -> DefaultStager:
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=self._kind == AsyncCheckpointerType.PROCESS,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
        return DefaultStager(options)


class TorchCheckpointingAsync(TorchCheckpointing):
    """`torch_checkpointing` with its saver for the background: copied by a thread, written by a process."""

    def __init__(self, state: State) -> None:
        super().__init__(state, background=True)

    def begin(self, folder: Path) -> Pending:
        """Begin to save into `folder`."""
        written = self.begun(folder)
        return Futures(written, self._manager._staging_future)  # noqa: SLF001 - it has no other name

    def unlocked(self) -> AbstractContextManager[None]:
        """Its own lock."""
        lock: AbstractContextManager[None] = self._manager.lock()
        return lock

    def close(self) -> None:
        """End its process."""
        self._manager.close()


class TorchSnapshotAsync(TorchSnapshot):
    """`torchsnapshot.Snapshot.async_take`, which copies before it returns."""

    def begin(self, folder: Path) -> Pending:
        """Begin to save into `folder`."""
        taken = self._snapshot.async_take(str(folder), {"state": self}, replicated=["**"])
        return _Taken(taken)


class _Taken(Pending):
    """A snapshot that is being taken, of a library without types; it was copied in its call."""

    def __init__(self, taken: Any) -> None:
        self._taken = taken

    def is_over(self) -> bool:
        """Whether it has ended."""
        return bool(self._taken.done())

    def wait(self) -> None:
        """Return when it has ended."""
        self._taken.wait()
