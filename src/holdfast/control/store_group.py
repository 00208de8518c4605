"""Ranks of several jobs that meet at a store of their own: a trainer and the workers of an inference engine."""

from __future__ import annotations

import torch.distributed as dist

from holdfast.control.channel import Channel
from holdfast.control.channel_members import ChannelMembers
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import GroupStore, Member, TorchMeeting


class StoreGroup:
    """This process as rank `rank` of `world_size` processes that share `store`. Every rank makes the same channels in
    the same order, as with `default_channel`. The group keeps the store alive. `members` name the ranks in messages."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, members: ChannelMembers) -> None:
        self.rank = rank
        self.world_size = world_size
        self.members = members
        self._store = store
        self._member = Member(GroupStore(store), "holdfast-jobs", rank, world_size)

    def channel(self, label: str, *, deadline: Deadline) -> Channel:
        """A channel between all ranks of the group, for one operation."""
        meeting = TorchMeeting(self._member, deadline=deadline)
        return Channel(meeting, rank=self.rank, world_size=self.world_size, label=label, members=self.members)
