"""The contenders: who saves and loads what, in the order of the tables; each is set up for its shortest pause on a CPU.

Optional packages are imported where they are used.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

import holdfast
from bench.raw import RAW_WAYS, RawImage
from bench.schema import OURS, RAW, BenchError
from bench.state import VALUES, box, local
from bench.ways import Pending, Site, Way

Registry: TypeAlias = Mapping[str, type[Way]]

#: Snapshots that holdfast keeps in the memory of the node, per rank.
GENERATIONS = 2
SYNCED = "fsync of each file"


class Raw(Way):
    """The raw limit, one file per rank: in the way that the name of the entrant says, or in the first one.

    Beside a loop it shows what writing alone takes from the cores: the host of a virtual device may do that on the same
    ones.
    """

    name, durable = RAW, "fdatasync"

    def __init__(self, site: Site, entrant: str) -> None:
        super().__init__(site, entrant)
        self._way = RAW_WAYS[entrant.removeprefix(RAW).strip() or next(iter(RAW_WAYS))]
        self._pool = ThreadPoolExecutor(1)

    @property
    def memory(self) -> RawImage:
        return self.site.image

    def save(self, folder: Path) -> None:
        self.memory.write(rank_file(folder), self._way)

    def begin(self, folder: Path) -> Pending:
        return Pending.of(self._pool.submit(self.save, folder))

    def load(self, folder: Path) -> None:
        self.memory.read(rank_file(folder), self._way)

    def close(self) -> None:
        self._pool.shutdown()


class TorchSave(Way):
    """torch.save/torch.load, one file per rank, or one for all ranks where all hold the same."""

    name, durable = "torch.save", SYNCED

    def save(self, folder: Path) -> None:
        if self.state.is_sharded() or dist.get_rank() == 0:
            with self._file(folder).open("wb") as file:
                torch.save(self.state.tensors() | self.state.values, file)
                file.flush()
                os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        loaded = torch.load(self._file(folder), map_location="cpu", weights_only=True)
        self.state.values.update({name: loaded[name] for name in self.state.values})
        for path, tensor in self.state.tensors().items():
            tensor.copy_(loaded[path])

    def _file(self, folder: Path) -> Path:
        return rank_file(folder) if self.state.is_sharded() else folder / "all-ranks"


class Dcp(Way):
    """torch.distributed.checkpoint.save/load, defaults."""

    name, durable = "dcp", SYNCED

    def save(self, folder: Path) -> None:
        dcp_save(self.state.tree, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        dcp_load(self.state.tree, checkpoint_id=folder)


class DcpThread(Dcp):
    """torch.distributed.checkpoint.async_save, its stager copying in the background, written by a thread.

    Its stager is kept from save to save, with the memory that it copies into. (Pinned memory is for GPUs.) Its thread
    exchanges messages, so it has a group of its own.
    """

    name = "dcp-async-thread"
    kind = AsyncCheckpointerType.THREAD
    save = Way.save

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    @cached_property
    def _stager(self) -> DefaultStager:
        shared = self.kind == AsyncCheckpointerType.PROCESS
        return DefaultStager(StagingOptions(False, shared, use_async_staging=True, use_non_blocking_copy=False))

    def begin(self, folder: Path) -> Pending:
        begun = async_save(
            self.state.tree,
            checkpoint_id=folder,
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        assert isinstance(begun, AsyncSaveResponse)
        return Pending.of(begun.upload_completion, begun.staging_completion)

    def close(self) -> None:
        self._stager.close()


class DcpProcess(DcpThread):
    """The same, written by a process; memory that is shared with it spares it a copy."""

    name = "dcp-async-process"
    kind = AsyncCheckpointerType.PROCESS


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


class Holdfast(Way):
    """holdfast.save/load, defaults, each save into a new run."""

    name = OURS
    durable = "fsync of files and folders, sealed and committed"

    def __init__(self, site: Site, entrant: str) -> None:
        super().__init__(site, entrant)
        self.steps = itertools.count()

    @property
    def _saved(self) -> dict[str, Any]:
        return self.state.tree

    def save(self, folder: Path) -> None:
        holdfast.save(folder, self._saved, next(self.steps))

    def load(self, folder: Path) -> None:
        holdfast.load(folder, into=self._saved)


class HoldfastLater(Holdfast):
    """holdfast.save/load, defaults, all saves into one run: after the warm-up each of them is a later save."""

    name, one_run = "holdfast-later", True


class HoldfastLive(HoldfastLater):
    """holdfast.save of the live objects, defaults, all saves into one run."""

    name = "holdfast-sync"

    @property
    def _saved(self) -> dict[str, Any]:
        return self.site.live.objects


class HoldfastBackground(HoldfastLive):
    """holdfast.Checkpointer of the live objects, defaults, all saves into one run. Its guard is in the optimizer."""

    name = OURS
    save = Way.save

    @cached_property
    def checkpointer(self) -> holdfast.Checkpointer:
        memory = holdfast.Memory(generations=GENERATIONS, node_dir=self.site.node_dir)
        return holdfast.Checkpointer(self.place(""), self._saved, memory=memory)

    def begin(self, folder: Path) -> Pending:
        handle = self.checkpointer.save(next(self.steps))
        staged, durable = handle.staged, handle.durable

        def wait() -> None:
            durable.wait()
            if handle.place is None:
                raise BenchError("holdfast did not save into memory: there is too little of it.")

        def persist_s() -> float:
            assert staged.seconds is not None
            assert durable.seconds is not None
            return durable.seconds - staged.seconds

        return Pending(wait, lambda: durable.is_over, lambda: staged.is_over, persist_s=persist_s)

    def close(self) -> None:
        """End the background threads; keeper and memory stay."""
        self.checkpointer.close()


def _registry(*kinds: type[Way]) -> Registry:
    return {kind.name: kind for kind in kinds}


#: Those that save and load while training waits; of all layouts, and of many small tensors.
SAVING = _registry(Raw, TorchSave, Dcp, Holdfast)
LOADING = _registry(Raw, TorchSave, Dcp, TorchCheckpointing, TorchSnapshot, Safetensors, Holdfast)
MANY = _registry(Dcp, Holdfast, HoldfastLater)
#: Those that save a live training state, with or without a wait for the device.
BACKGROUND = _registry(
    *(Raw, TorchSave, Dcp, DcpThread, DcpProcess, TorchSnapshotAsync, TorchCheckpointingAsync),
    *(HoldfastLive, HoldfastBackground),
)
#: Those of them that are measured beside a loop of Python, and beside a training loop.
BESIDE_PYTHON = _registry(HoldfastBackground, DcpThread, DcpProcess)
BESIDE_TRAINING = _registry(Raw, HoldfastBackground, DcpThread, DcpProcess)
LATER, OURS_SYNC, THREAD = HoldfastLater.name, HoldfastLive.name, DcpThread.name


def why_absent(package: str) -> str:
    """The reason why a contender that needs `package` cannot take part; empty where it can."""
    return "" if not package or find_spec(package) else "it is not installed; `make bench` installs it"


def rank_file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}"


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
