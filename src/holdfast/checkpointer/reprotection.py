"""The protection of a restored snapshot by the nodes of the new job, before that saves anything."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpointer.background import Background
from holdfast.checkpointer.peer_meeting import CopiesLeft, ProtectedPart
from holdfast.checkpointer.staging import Stager
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline


@dataclass(frozen=True)
class Reprotection:
    """The `Work` of a background thread: it introduces the keepers of the nodes to each other, and they do the rest.
    `left` are the files of the snapshot whose owners are lost."""

    stager: Stager
    part: ProtectedPart
    left: CopiesLeft | None
    channel: Channel
    deadline: Deadline

    def run(self, background: Background) -> None:
        """Have the nodes meet."""
        self.stager.protect_again(self.part, self.left, self.channel, self.deadline)

    def end(self, error: BaseException | None) -> None:
        """Leave the channel."""
        self.channel.leave()
