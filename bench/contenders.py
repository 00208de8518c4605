"""The contenders: who saves and loads what, in the order of the tables.

Those of other libraries, and those of PyTorch that save in the background, are here, each set up for its shortest pause
on a CPU. Optional packages are imported where they are used. The others are in `bench/ways.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save
from torch.distributed.tensor import DTensor

from bench import ways
from bench.benchmark import chosen
from bench.costs import give_back
from bench.schema import RAW
from bench.state import VALUES, box, local
from bench.ways import Dcp, Pending, Way

Registry: TypeAlias = Mapping[str, type[Way]]


class DcpThread(Dcp):
    """torch.distributed.checkpoint.async_save, its stager copying in the background, written by a thread.

    Its stager is kept from save to save, with the memory that it copies into. (Pinned memory is for GPUs.) Its thread
    exchanges messages, so it has a group of its own.
    """

    name = "dcp-async-thread"
    kind = AsyncCheckpointerType.THREAD
    save = Way.save
    _stager: DefaultStager | None = None
    _begun: AsyncSaveResponse | None = None

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def begin(self, folder: Path) -> Pending:
        if self._begun is not None:
            self._begun.upload_completion.result()  # it needs the stager's memory
        self._stager = self._stager or self._new_stager()
        begun = async_save(
            self.state.tree,
            checkpoint_id=folder,
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        assert isinstance(begun, AsyncSaveResponse)
        self._begun = begun
        return Pending.of(begun.upload_completion, begun.staging_completion)

    def unlocked(self) -> AbstractContextManager[None]:
        if self._begun is not None:
            self._begun.staging_completion.result()
        return nullcontext()

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
        self._stager = self._begun = None
        give_back()

    def _new_stager(self) -> DefaultStager:
        shared = self.kind == AsyncCheckpointerType.PROCESS
        return DefaultStager(StagingOptions(False, shared, use_async_staging=True, use_non_blocking_copy=False))


class DcpProcess(DcpThread):
    """The same, written by a process; memory that is shared with it spares it a copy."""

    name = "dcp-async-process"
    kind = AsyncCheckpointerType.PROCESS

    def rest(self) -> None:
        """Keep the stager: the process keeps its shared memory until its next save anyway."""


class TorchCheckpointing(Way):
    """CheckpointManager, synchronous, DefaultResharder for every item.

    Its save gathers the ranks' metadata through CUDA tensors; here it is made to gather them as objects. Its direct
    writes are off: they are unaligned, which ext4 refuses.
    """

    name = package = "torch_checkpointing"
    saver = "SyncCheckpointSaverConfig"

    @cached_property
    def _manager(self) -> Any:
        from torch_checkpointing import CheckpointManager, ItemSpec, config
        from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        manager = CheckpointManager.Config(
            items={VALUES: ItemSpec(layout=LayoutInfo(f"{VALUES}.pt", TorchSerialization()), required=False)},
            default=ItemSpec(resharder=DefaultResharder()),
            save=getattr(config, self.saver)(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        ).build()
        manager._metadata_manager._all_gather_pickled_data = _gathered  # noqa: SLF001 - see above
        logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
        return manager

    def begin(self, folder: Path) -> Pending:
        """Save the state as it is, and values in a file for all ranks."""
        own = {item: part for item, part in self.state.tree.items() if item != VALUES or dist.get_rank() == 0}
        written = self._manager.save(str(folder), own)  # a future, of a save in the background
        return Pending() if written is None else Pending.of(written, self._manager._staging_future)  # noqa: SLF001

    def load(self, folder: Path) -> None:
        loaded = self._manager.load(str(folder), into=self.state.tree, strict=True)
        self.state.values.update(loaded[VALUES])


class TorchCheckpointingAsync(TorchCheckpointing):
    """CheckpointManager, copied by a thread, written by a process, DefaultResharder for every item."""

    name = "torch_checkpointing-async"
    saver = "AsyncCheckpointSaverConfig"

    def unlocked(self) -> AbstractContextManager[None]:
        lock: AbstractContextManager[None] = self._manager.lock()
        return lock

    def close(self) -> None:
        self._manager.close()


class TorchSnapshot(Way):
    """Snapshot.take/restore, defaults, ShardedTensors in place of DTensors, all else replicated.

    It knows no DTensors; the ShardedTensors are on the same memory.
    """

    name = package = "torchsnapshot"

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        """Each tensor by a name without a slash: torchsnapshot 0.1.0 fails on one."""
        leaves = {path.replace("/", "."): leaf for path, leaf in self.state.leaves().items()}
        return leaves | {name: _sharded(leaf) for name, leaf in leaves.items() if isinstance(leaf, DTensor)}

    def state_dict(self) -> dict[str, Any]:
        return self._tensors | self.state.values

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over the values; tensors have been filled in place."""
        self.state.values.update({name: loaded[name] for name in self.state.values})

    def save(self, folder: Path) -> None:
        import_module(self.package).Snapshot.take(str(folder), {"state": self}, replicated=["**"])

    def load(self, folder: Path) -> None:
        import_module(self.package).Snapshot(str(folder)).restore({"state": self})


class TorchSnapshotAsync(TorchSnapshot):
    """Snapshot.async_take, which copies before it returns; ShardedTensors in place of DTensors, all else replicated."""

    name = "torchsnapshot-async"

    def begin(self, folder: Path) -> Pending:
        taken = import_module(self.package).Snapshot.async_take(str(folder), {"state": self}, replicated=["**"])
        return Pending(taken.wait, taken.done)


class Safetensors(Way):
    """Files of whole tensors, one per saving rank; a loading rank takes slices from all (safe_open)."""

    name = package = "safetensors"
    io = "mapped"

    def save(self, folder: Path) -> None:
        """Gather each tensor, and write those that fall to this rank, in turns."""
        from safetensors.torch import save_file

        rank, world = dist.get_rank(), dist.get_world_size()
        own: dict[str, torch.Tensor] = {}
        for index, (path, leaf) in enumerate(self.state.leaves().items()):
            whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
            if index % world == rank:
                own[path] = whole
        save_file(own, folder / f"{rank}.safetensors", {"values": json.dumps(self.state.values)})

    def load(self, folder: Path) -> None:
        from safetensors import safe_open

        leaves = self.state.leaves()
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self.state.values.update(json.loads(file.metadata()["values"]))
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    leaf = leaves[name]
                    whole = file.get_slice(name) if leaf.ndim else file.get_tensor(name)
                    local(leaf).copy_(whole[box(leaf)])


def _registry(*kinds: type[Way]) -> Registry:
    return {kind.name: kind for kind in kinds}


_TORCH = (ways.Raw, ways.TorchSave, ways.Dcp)
_TORCH_ASYNC = (DcpThread, DcpProcess)
_PEERS = (TorchCheckpointing, TorchSnapshot, Safetensors)
_PEERS_ASYNC = (TorchSnapshotAsync, TorchCheckpointingAsync)
#: Those that save and load while training waits.
SAVING = _registry(*_TORCH, *_PEERS, ways.Holdfast, ways.HoldfastLater)
#: Those that save a live training state, with or without a wait for the device.
BACKGROUND = _registry(*_TORCH, *_TORCH_ASYNC, *_PEERS_ASYNC, ways.HoldfastLive, ways.HoldfastBackground)
#: Those of them that are measured beside a loop of Python, and beside a training loop.
BESIDE_PYTHON = _registry(ways.HoldfastBackground, *_TORCH_ASYNC)
BESIDE_TRAINING = _registry(ways.Raw, *BESIDE_PYTHON.values())
#: Names in `SAVING`, and in `BACKGROUND` and the registries beside loops.
LATER = ways.HoldfastLater.name
OURS, OURS_SYNC, THREAD = ways.HoldfastBackground.name, ways.HoldfastLive.name, DcpThread.name


def select(
    names: Sequence[str] | None, known: Registry, usual: Sequence[str] | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The raw limit and those of `names`, or the `usual` ones, that can take part, in the order of the tables; and why
    the others cannot. BenchError for an unknown name."""
    found = {RAW, *chosen(usual if names is None else names, known, kind="contender")}
    absent = {name: reason for name in known if name in found and (reason := why_absent(known[name].package))}
    return tuple(name for name in known if name in found and name not in absent), absent


def why_absent(package: str) -> str:
    """Why a contender cannot take part that needs `package`; nothing where it can."""
    return "it is not installed; `make bench` installs it" if package and find_spec(package) is None else ""


def _gathered(data: object, group: dist.ProcessGroup | None = None) -> dict[int, object]:
    found: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, data, group)
    return dict(enumerate(found))


def _sharded(leaf: DTensor) -> Any:
    """A ShardedTensor on the local memory of `leaf`. Collective."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

    starts = [part.start for part in box(leaf)]
    shard = Shard.from_tensor_and_offsets(leaf.to_local(), starts, dist.get_rank())
    return ShardedTensor._init_from_local_shards([shard], leaf.shape)  # noqa: SLF001 - its one constructor
