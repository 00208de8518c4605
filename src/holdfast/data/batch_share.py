"""The part of each global batch that one rank trains on."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.control.torch_store import member_of
from holdfast.options import checked_number


class BatchShare(NamedTuple):
    """The part of each global batch that one rank trains on."""

    global_batch_size: int
    rank: int
    world_size: int

    @property
    def size(self) -> int:
        """The number of samples of a rank's batch."""
        return self.global_batch_size // self.world_size


def batch_share(global_batch_size: int, rank: int | None, world_size: int | None) -> BatchShare:
    """The share of `rank`, checked. Without `rank` and `world_size`, all ranks of the job share the batches.

    Raises `ConfigurationError`, code ``config.no_process_group``, in one of several ranks without a process group, and
    `TypeError` or `ValueError` for numbers that make no sense.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither: then all ranks of the job share the batches")
    if rank is None or world_size is None:
        member = member_of(None)
        rank, world_size = (0, 1) if member is None else (member.rank, member.world_size)
    batch = checked_number("global_batch_size", global_batch_size, least=1, reason="a batch needs a sample")
    world_size = checked_number("world_size", world_size, least=1, reason="a job has at least one rank")
    rank = checked_number("rank", rank, least=0, reason="ranks are counted from 0")
    if rank >= world_size:
        raise ValueError(f"rank is {rank}, but it must be less than world_size, {world_size}")
    if batch % world_size:
        raise ValueError(
            f"global_batch_size is {batch}, no multiple of {world_size} ranks, so their parts would differ; "
            f"{batch - batch % world_size or world_size} is one"
        )
    return BatchShare(batch, rank, world_size)
