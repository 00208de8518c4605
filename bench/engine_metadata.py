"""The scope of the figures of each contender of ``bench engine``."""

from __future__ import annotations

from bench.engine_contenders import OURS, OURS_SYNC, PROCESS, THREAD
from bench.metadata import metadata
from bench.results import ContenderMetadata

_DCP = "torch.distributed.checkpoint.async_save, its stager kept and copying in the background"
_SYNCED, _SEALED = "fsync of each file", "fsync of files and folders, sealed and committed"
_DIRECT = "direct where the filesystem takes it"

_OWN = (
    ContenderMetadata(
        name=THREAD, description=f"{_DCP}, written by a thread", durable=_SYNCED, verified="no", io="buffered"
    ),
    ContenderMetadata(
        name=PROCESS,
        description=f"{_DCP} into shared memory, written by a process",
        durable=_SYNCED,
        verified="no",
        io="buffered",
    ),
    ContenderMetadata(
        name="torchsnapshot-async",
        description="Snapshot.async_take, defaults, ShardedTensors in place of DTensors, all else replicated",
        durable="no",
        verified="no",
        io="buffered",
    ),
    ContenderMetadata(
        name="torch_checkpointing-async",
        description="CheckpointManager with its saver for the background, DefaultResharder for every item",
        durable="no",
        verified="no",
        io="buffered",
    ),
    ContenderMetadata(
        name=OURS_SYNC,
        description="holdfast.save, defaults, all saves into one run",
        durable=_SEALED,
        verified="no",
        io=_DIRECT,
    ),
    ContenderMetadata(
        name=OURS,
        description="holdfast.Checkpointer, defaults, all saves into one run",
        durable=_SEALED,
        verified="no",
        io=_DIRECT,
    ),
)


def engine_metadata(name: str, *, direct: bool) -> ContenderMetadata:
    """What the figures of contender `name` include."""
    for each in _OWN:
        if each.name == name:
            return each
    return metadata(name, direct=direct)
