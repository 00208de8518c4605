"""Contenders that not every environment has: other libraries for checkpoints. Each is imported where it is used."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.placing import box
from bench.state import Leaf, State, local, walk
from bench.way import Way

#: The part of the state's tree that has no tensors.
_VALUES = "progress"


class TorchCheckpointing(Way):
    """`torch_checkpointing`'s manager: every item resharded by its own resharder, saved synchronously, or with
    `background` by a process of its own.

    Its save gathers the ranks' metadata through CUDA tensors; here it is made to gather them as objects. Its direct
    writes are off: they are unaligned, which ext4 refuses.
    """

    def __init__(self, state: State, *, background: bool = False) -> None:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
        from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(state)
        config = CheckpointManager.Config(
            items={_VALUES: ItemSpec(layout=LayoutInfo(f"{_VALUES}.pt", TorchSerialization()), required=False)},
            default=ItemSpec(resharder=DefaultResharder()),
            save=AsyncCheckpointSaverConfig() if background else SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager = config.build()
        self._manager._metadata_manager._all_gather_pickled_data = _gathered  # noqa: SLF001 - see above
        logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)

    def save(self, folder: Path) -> None:
        """Save the state as it is, and values in a file for all ranks."""
        self.begun(folder)

    def begun(self, folder: Path) -> Any:
        """Save; the result is None, or of a save in the background a future."""
        own = {item: part for item, part in self.state.tree.items() if item != _VALUES or dist.get_rank() == 0}
        return self._manager.save(str(folder), own)

    def load(self, folder: Path) -> None:
        """Load into the state."""
        loaded = self._manager.load(str(folder), into=self.state.tree, strict=True)
        found = {path: leaf for _, _, path, leaf in walk(dict(loaded))}
        for parent, key, path, leaf in list(walk(self.state.tree)):
            if not isinstance(leaf, torch.Tensor):
                parent[key] = found[path]


class TorchSnapshot(Way):
    """`torchsnapshot`. Knowing no DTensors, it is given ShardedTensors on the same memory; all else is replicated."""

    def __init__(self, state: State) -> None:
        import torchsnapshot

        super().__init__(state)
        self._snapshot = torchsnapshot.Snapshot
        self._tensors = {
            path: _sharded(leaf) if isinstance(leaf, DTensor) else leaf
            for _, _, path, leaf in walk(state.tree)
            if isinstance(leaf, torch.Tensor)
        }

    def state_dict(self) -> dict[str, Any]:
        """The state that is saved, and filled in place. Names have no slash: torchsnapshot 0.1.0 fails on one."""
        return {path.replace("/", "."): leaf for path, leaf in (self._tensors | self.state.values()).items()}

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over the values; tensors have been filled in place."""
        for parent, key, path, leaf in list(walk(self.state.tree)):
            if not isinstance(leaf, torch.Tensor):
                parent[key] = loaded[path.replace("/", ".")]

    def save(self, folder: Path) -> None:
        """Take a snapshot."""
        self._snapshot.take(str(folder), {"state": self}, replicated=["**"])

    def load(self, folder: Path) -> None:
        """Restore the snapshot."""
        self._snapshot(str(folder)).restore({"state": self})


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
        """Copy this rank's slices into the state."""
        from safetensors import safe_open

        leaves: dict[str, Leaf] = {path: leaf for _, _, path, leaf in walk(self.state.tree)}
        values: dict[str, int | float] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                values |= json.loads(file.metadata()["values"])
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    leaf = leaves[name]
                    assert isinstance(leaf, torch.Tensor)
                    _copy(file.get_slice(name), leaf) if leaf.ndim else leaf.copy_(file.get_tensor(name))
        for parent, key, name, leaf in list(walk(self.state.tree)):
            if not isinstance(leaf, torch.Tensor):
                parent[key] = values[name]


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
