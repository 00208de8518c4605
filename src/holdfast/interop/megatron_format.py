"""Folders of ``megatron.core.dist_checkpointing`` in the format ``torch_dist``, under the names of `megatron_state`.

Such a folder is one of DCP, whose names are Megatron's keys, and ``common.pt`` with all values that are no objects of
single ranks. Weights are ``model/<key>``. State of the optimizer is ``optimizer/state/model/<key>/<slot>``, or, in the
format ``dp_reshardable``, ``optimizer/buckets/<bucket>/<slot>``. In the format ``dp_zero_gather_scatter``, all buckets
of a buffer are one. Everything else is below ``megatron``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from holdfast.interop.dcp import MAX_METADATA_NBYTES, METADATA, read_metadata, require_files, state_of
from holdfast.interop.dcp_metadata import DcpMetadata, moved
from holdfast.interop.foreign_format import ForeignFolder, ForeignState
from holdfast.interop.megatron_iterations import COMMON, find_iteration, is_megatron
from holdfast.interop.megatron_names import MASTERS, optimizer_entry, random_shard, tensor_path
from holdfast.interop.megatron_values import OPTIMIZER, MegatronValues, unpacked


class MegatronFormat:
    """Folders of Megatron's distributed checkpoints: that of an iteration, or the one above it with the tracker."""

    kind: Final = "a Megatron checkpoint"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`; also a folder of Megatron's other formats, and one that lacks files."""
        return is_megatron(names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the metadata, ``common.pt`` and the objects of the optimizer."""
        found = find_iteration(folder)
        storage = folder.storage
        path = folder.path(found.prefix + METADATA)
        data = storage.read(found.prefix + METADATA, limit=MAX_METADATA_NBYTES)
        metadata = _renamed(read_metadata(path, data), found.prefix)
        folder = replace(folder, names=tuple(found.prefix + name for name in found.folder.names))
        require_files(folder, metadata, {item.file for _, item in metadata.values.values()})
        values = MegatronValues(found, metadata)
        return state_of(
            folder,
            path,
            _without_read_objects(metadata, reads_optimizer=values.reads_optimizer),
            kind=MegatronFormat.kind,
            data=data + storage.read(found.prefix + COMMON),
            more=values.tree,
            value_of=unpacked,
            step=values.iteration,
            described_by=(found.prefix + METADATA, found.prefix + COMMON),
        )


def _renamed(metadata: DcpMetadata, prefix: str) -> DcpMetadata:
    """The content with the paths that a live job has, and with files below `prefix`.

    A folder that any of Megatron's optimizers loads has the master weights twice.
    """
    first, second = (f"optimizer.state.{slot}." for slot in MASTERS)
    twice = {
        key for key in metadata.tensors if key.startswith(second) and first + key[len(second) :] in metadata.tensors
    }
    tensors = {
        key: moved(tensor, tensor_path(key), prefix) for key, tensor in metadata.tensors.items() if key not in twice
    }
    values = {
        key: (("model", key), item._replace(file=prefix + item.file)) for key, (_, item) in metadata.values.items()
    }
    return DcpMetadata(tensors, values)


def _without_read_objects(metadata: DcpMetadata, *, reads_optimizer: bool) -> DcpMetadata:
    """The content without the objects that are no extra states of modules: those were read, or are nothing to load.
    An optimizer in a format that is not read has no tensors, whose parts would be taken for others."""
    values = {
        key: value
        for key, value in metadata.values.items()
        if optimizer_entry(key) is None and random_shard(key) is None
    }
    tensors = {
        key: tensor for key, tensor in metadata.tensors.items() if reads_optimizer or tensor.path[0] != OPTIMIZER
    }
    return DcpMetadata(tensors, values)
