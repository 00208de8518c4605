"""The scope of each contender's figures."""

from __future__ import annotations

import msgspec

from bench.contenders import LATER
from bench.results import RAW, ContenderMetadata

_HOLDFAST = ContenderMetadata(
    name="holdfast",
    description="holdfast.save/load, defaults, each save into a new run",
    durable="fsync of files and folders, sealed and committed",
    verified="digest of every block read",
    io="direct where the filesystem takes it",
)
_ALL = (
    ContenderMetadata(
        name=RAW,
        description="pwritev/preadv loops, one file per rank",
        durable="fdatasync",
        verified="no",
        io="direct",
    ),
    ContenderMetadata(
        name="torch.save",
        description="torch.save/torch.load, one file per rank, or one for all ranks where all hold the same",
        durable="fsync of each file",
        verified="no",
        io="buffered",
    ),
    ContenderMetadata(
        name="dcp",
        description="torch.distributed.checkpoint.save/load, defaults",
        durable="fsync of each file",
        verified="no",
        io="buffered",
    ),
    ContenderMetadata(
        name="torch_checkpointing",
        description="CheckpointManager, synchronous, DefaultResharder for every item",
        durable="no",
        verified="no",
        io="buffered",
    ),
    ContenderMetadata(
        name="torchsnapshot",
        description="Snapshot.take/restore, defaults, ShardedTensors in place of DTensors, all else replicated",
        durable="no",
        verified="no",
        io="buffered",
    ),
    ContenderMetadata(
        name="safetensors",
        description="files of whole tensors, one per saving rank; a loading rank takes slices from all (safe_open)",
        durable="no",
        verified="no",
        io="mapped",
    ),
    _HOLDFAST,
    msgspec.structs.replace(_HOLDFAST, name=LATER, description="holdfast.save/load, defaults, all saves into one run"),
)


def metadata(name: str, *, direct: bool) -> ContenderMetadata:
    """What the figures of contender `name` include."""
    (found,) = (each for each in _ALL if each.name == name)
    if name == RAW and not direct:
        return msgspec.structs.replace(found, io="buffered: the filesystem refused O_DIRECT")
    return found
