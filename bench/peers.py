"""Contenders of other libraries, and those of PyTorch that save in the background, each set up for the shortest pause
that it knows on a CPU. What not every environment has is imported where it is used."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save
from torch.distributed.tensor import DTensor

from bench.costs import give_back
from bench.state import box, local, walk
from bench.ways import Dcp, Pending, Site, Way

#: The part of the state's tree that has no tensors.
_VALUES = "progress"


class DcpThread(Dcp):
    """`torch.distributed.checkpoint.async_save`, which writes in a thread.

    Its stager is kept from save to save, with the memory that it copies into, and copies in the background. (Pinned
    memory is for GPUs.) Its thread exchanges messages, so it has a group of its own.
    """

    kind = AsyncCheckpointerType.THREAD

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(site, name)
        self._group = dist.new_group(backend="gloo")
        self._stager: DefaultStager | None = self._new_stager()
        self._written: Future[Any] | None = None
        self._copied: Future[Any] | None = None

    def begin(self, folder: Path) -> Pending:
        """Begin to save into `folder`, when the last save is over: it needs the stager's memory."""
        if self._written is not None:
            self._written.result()
        begun = async_save(
            self.state.tree,
            checkpoint_id=folder,
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        assert isinstance(begun, AsyncSaveResponse)
        self._written, self._copied = begun.upload_completion, begun.staging_completion
        return Pending.of(self._written, self._copied)

    def save(self, folder: Path) -> None:
        self.begin(folder).wait()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Wait until the state has been copied."""
        if self._copied is not None:
            self._copied.result()
        yield

    def ready(self) -> None:
        """Have a stager with memory that it has copied into."""
        if self._stager is None:
            self._stager = self._new_stager()
            copied = self._stager.stage(self.state.tree)
            assert isinstance(copied, Future)
            copied.result()

    def rest(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the memory; a process ends with this one."""
        if self._stager is not None:
            self._stager.close()
        self._stager = self._written = self._copied = None
        give_back()

    def _new_stager(self) -> DefaultStager:
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=self.kind == AsyncCheckpointerType.PROCESS,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
        return DefaultStager(options)


class DcpProcess(DcpThread):
    """The same in a process of its own; shared memory spares it a copy."""

    kind = AsyncCheckpointerType.PROCESS

    def rest(self) -> None:
        """Keep the stager, whose memory is shared: the process keeps that until its next save anyway."""


class TorchCheckpointing(Way):
    """`torch_checkpointing`'s manager: every item resharded by its own resharder, saved synchronously.

    Its save gathers the ranks' metadata through CUDA tensors; here it is made to gather them as objects. Its direct
    writes are off: they are unaligned, which ext4 refuses.
    """

    def __init__(self, site: Site, name: str) -> None:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(site, name)
        config = CheckpointManager.Config(
            items={_VALUES: ItemSpec(layout=LayoutInfo(f"{_VALUES}.pt", TorchSerialization()), required=False)},
            default=ItemSpec(resharder=DefaultResharder()),
            save=self._saver(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager = config.build()
        self._manager._metadata_manager._all_gather_pickled_data = _gathered  # noqa: SLF001 - see above
        logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)

    def save(self, folder: Path) -> None:
        """Save the state as it is, and values in a file for all ranks."""
        self._save(folder)

    def load(self, folder: Path) -> None:
        loaded = self._manager.load(str(folder), into=self.state.tree, strict=True)
        self.state.set_values({path: leaf for _, _, path, leaf in walk(dict(loaded))})

    def _saver(self) -> Any:
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        return SyncCheckpointSaverConfig()

    def _save(self, folder: Path) -> Any:
        """Save; the result is None, or of a save in the background a future."""
        own = {item: part for item, part in self.state.tree.items() if item != _VALUES or dist.get_rank() == 0}
        return self._manager.save(str(folder), own)


class TorchCheckpointingAsync(TorchCheckpointing):
    """The same with its saver for the background: copied by a thread, written by a process."""

    def begin(self, folder: Path) -> Pending:
        written = self._save(folder)
        return Pending.of(written, self._manager._staging_future)  # noqa: SLF001 - it has no other name

    def unlocked(self) -> AbstractContextManager[None]:
        lock: AbstractContextManager[None] = self._manager.lock()
        return lock

    def close(self) -> None:
        self._manager.close()

    def _saver(self) -> Any:
        from torch_checkpointing.config import AsyncCheckpointSaverConfig

        return AsyncCheckpointSaverConfig()


class TorchSnapshot(Way):
    """`torchsnapshot`. Knowing no DTensors, it is given ShardedTensors on the same memory; all else is replicated."""

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(site, name)
        self._tensors = {
            path: _sharded(leaf) if isinstance(leaf, DTensor) else leaf
            for _, _, path, leaf in walk(self.state.tree)
            if isinstance(leaf, torch.Tensor)
        }

    def state_dict(self) -> dict[str, Any]:
        """What is saved, and filled in place. Names have no slash: torchsnapshot 0.1.0 fails on one."""
        return {path.replace("/", "."): leaf for path, leaf in (self._tensors | self.state.values()).items()}

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over the values; tensors have been filled in place."""
        self.state.set_values({path: loaded[path.replace("/", ".")] for path in self.state.values()})

    def save(self, folder: Path) -> None:
        from torchsnapshot import Snapshot

        Snapshot.take(str(folder), {"state": self}, replicated=["**"])

    def load(self, folder: Path) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(folder)).restore({"state": self})


class TorchSnapshotAsync(TorchSnapshot):
    """`torchsnapshot.Snapshot.async_take`, which copies before it returns."""

    def begin(self, folder: Path) -> Pending:
        from torchsnapshot import Snapshot

        taken = Snapshot.async_take(str(folder), {"state": self}, replicated=["**"])
        return Pending(taken.wait, taken.done)


class Safetensors(Way):
    """Whole tensors in `safetensors` files, one per saving rank; a loading rank takes its slices from all files."""

    def save(self, folder: Path) -> None:
        """Gather each tensor, and write those that fall to this rank, in turns."""
        from safetensors.torch import save_file

        rank, world = dist.get_rank(), dist.get_world_size()
        own: dict[str, torch.Tensor] = {}
        for index, (_, _, path, leaf) in enumerate(walk(self.state.tree)):
            if isinstance(leaf, torch.Tensor):
                whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
                if index % world == rank:
                    own[path] = whole
        save_file(own, folder / f"{rank}.safetensors", {"values": json.dumps(self.state.values())})

    def load(self, folder: Path) -> None:
        from safetensors import safe_open

        leaves = {path: leaf for _, _, path, leaf in walk(self.state.tree)}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self.state.set_values(json.loads(file.metadata()["values"]))
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    leaf = leaves[name]
                    assert isinstance(leaf, torch.Tensor)
                    _copy(file.get_slice(name), leaf) if leaf.ndim else leaf.copy_(file.get_tensor(name))


def _gathered(data: object, group: dist.ProcessGroup | None = None) -> dict[int, object]:
    """`data` of each rank of `group`."""
    found: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, data, group)
    return dict(enumerate(found))


def _copy(stored: Any, leaf: torch.Tensor) -> None:
    """Fill `leaf` from its part of a `stored` tensor."""
    start, size = box(leaf)
    local(leaf).copy_(stored[tuple(slice(first, first + extent) for first, extent in zip(start, size, strict=True))])


def _sharded(leaf: DTensor) -> Any:
    """A ShardedTensor on the local memory of `leaf`. Collective."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

    start, _ = box(leaf)
    shard = Shard.from_tensor_and_offsets(leaf.to_local(), list(start), dist.get_rank())
    return ShardedTensor._init_from_local_shards([shard], leaf.shape)  # noqa: SLF001 - its one constructor
