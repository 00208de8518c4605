"""One save, as far as it goes on in the background: everything that it has taken, and how it gives that back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpointer.background import Background
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.messages import Agreed
from holdfast.checkpointer.staging import Stager
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.records import Place
from holdfast.node_memory.node_folder import memory_error
from holdfast.node_memory.slots import Slot
from holdfast.run.session import Sources
from holdfast.snapshot.capture import Snapshot
from holdfast.snapshot.device import Queued
from holdfast.snapshot.guard import Hold
from holdfast.snapshot.routes import Routes
from holdfast.state.flatten import FlatState

_log = logging.getLogger(__name__)


@dataclass
class Job:
    """The owner of one save in the background. It holds the guard (`hold`), and from when all ranks have agreed the
    checkpoint's id (`agreed`: the others count on this rank's part) and a slot. `end` gives all of that back.

    `taken` is the state, or why there is none, and `sources` what it was loaded from. `is_awaited`: whoever saves waits
    until this is settled, and raises what fails until then.
    """

    handle: Handle
    metrics: dict[str, float]
    channel: Channel
    deadline: Deadline
    stager: Stager
    hold: Hold
    taken: Snapshot | Exception
    sources: Sources
    needed: Place | None
    is_awaited: bool
    go_on: Callable[[Job, Background], None]
    agreed: Agreed | None = None
    slot: Slot | None = None
    is_settled: bool = False
    is_finished: bool = False

    def run(self, background: Background) -> None:
        """Agree with all ranks, copy, and hand over to the keeper."""
        self.go_on(self, background)

    def settle(self, background: Background) -> None:
        """Note that there is a place for it in the history, and a slot: the next save may come."""
        self.is_settled = True
        background.settle()

    def flat(self) -> FlatState:
        """All of the state."""
        if isinstance(self.taken, Exception):
            raise self.taken
        return self.taken.flat()

    @property
    def queued(self) -> Queued:
        """What devices had been given to do by then: what is done with the state in the background comes after it."""
        return self.taken.queued if isinstance(self.taken, Snapshot) else Queued(())

    def copy(self, flat: FlatState, routes: Routes) -> None:
        """Copy it into its slot."""
        assert isinstance(self.taken, Snapshot)
        self.taken.copy(flat.tensors, routes)

    def release(self) -> None:
        """Let training change what it likes: it is copied, or will not be."""
        if isinstance(self.taken, Snapshot):
            self.taken.end()
        self.hold.release()

    def end(self, error: BaseException | None) -> None:
        """Give back what it holds, and where it did not finish, tell in the handle and the log that nothing will come
        of it."""
        self.release()
        self.channel.leave()
        if self.is_finished:
            return
        if self.agreed is not None:
            self.stager.fail(self.agreed.checkpoint_id, self._quiet_slot(), error)
        if not self.is_awaited or self.is_settled:
            self._tell(error)
        self.is_finished = True

    def _quiet_slot(self) -> Slot | None:
        """The slot, when nothing writes to it any more: an error in the middle of a copy leaves calls under way that
        devices were given before. None where a device cannot say; its slot is not used again."""
        try:
            self.queued.await_copies()
        except RuntimeError:
            _log.exception("a slot is lost: nobody knows whether step %d is still being copied to it", self.handle.step)
            return None
        return self.slot

    def _tell(self, error: BaseException | None) -> None:
        step = self.handle.step
        if isinstance(error, OSError):
            error = memory_error(self.stager.node_dir, error)
        if isinstance(error, HoldfastError):
            self.handle.fail(error)
            _log.error("step %d is not saved: %s", step, error)
            return
        self.handle.fail(
            StorageError(
                f"step {step} could not be staged: {error!r}.",
                code="storage.memory",
                action="Look at the traceback in the log; the next save is another chance.",
                step=step,
            )
        )
        _log.error("step %d could not be staged", step, exc_info=error)
