"""Saves that find no space: what the policy does not keep is deleted at once, and the save goes on."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import ProcessGroup

from holdfast.checkpointer.pruning import Pruning
from holdfast.checkpointer.save_errors import FULL, by_hand
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
from holdfast.errors import HoldfastError, StorageError
from holdfast.saving import RoomMaker


class DiskRoom:
    """The room that deletions by a policy make for one save."""

    def __init__(self, pruning: Pruning) -> None:
        self._pruning = pruning
        #: The deletions that the save has counted on already.
        self._since = pruning.num_freed
        self._is_used_up = False

    def made(self, error: StorageError, channel: Channel, deadline: Deadline) -> bool:
        """As `RoomMaker.made`. The first rank deletes."""
        if error.code != FULL or self._is_used_up:
            return False

        def make(_: list[bytes]) -> str:
            return self._pruning.make_room(self._since, 0.9 * deadline.remaining_s())

        try:
            why = channel.exchange("room", b"", make, deadline, takes=bytes, gives=str)
        except HoldfastError as failure:
            raise error from failure
        self._since = self._pruning.num_freed
        self._is_used_up = bool(why)
        if why:
            error.details, error.action = (*error.details, why), by_hand(self._pruning.run_url)
        return not why


def once_it_fits(
    save: Callable[[RoomMaker], None], pruning: Pruning, *, step: int, group: ProcessGroup | None, timeout_s: float
) -> None:
    """Call `save`, the save of `step`. If it finds no space before it has a place (``storage.full``, on all ranks), and
    deletions make room, call it again. Collective over `group`.

    Raises what `save` raises; an error about space says why nothing was deleted, and what to do.
    """
    room = DiskRoom(pruning)
    while True:
        try:
            save(room)
        except StorageError as error:
            if error.code != FULL:
                raise
            deadline = Deadline(timeout_s)
            channel = default_channel(f"room for step {step}", group, deadline=deadline, step=step)
            is_made = room.made(error, channel, deadline)
            channel.await_readers(deadline)
            if not is_made:
                raise
        else:
            return
