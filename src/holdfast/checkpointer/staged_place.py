"""Rank 0's step in a save into memory after all ranks have agreed on a plan: it takes a place, and stores nothing."""

from __future__ import annotations

import logging
import time
from typing import Final

from holdfast.agreement.planner import AgreedPlan
from holdfast.agreement.request import SaveRequest
from holdfast.checkpointer.snapshot_messages import Agreed
from holdfast.errors import StorageError
from holdfast.format import records
from holdfast.plan.save import CheckpointIdentity
from holdfast.run.session import JOB

#: Time for which saves leave storage alone that has not answered.
_PAUSE_S: Final = 30.0

_log = logging.getLogger(__name__)


class AbsentStorage:
    """Whether saves of a job whose nodes have disks do without storage, because it did not answer a while ago."""

    #: Time for storage to answer such a save, which needs no more than some small records.
    PATIENCE_S: Final = 2.0

    def __init__(self) -> None:
        self._until_s = 0.0

    @property
    def is_left_alone(self) -> bool:
        """Whether the next save does not ask storage."""
        return time.monotonic() < self._until_s

    def note(self, error: StorageError) -> None:
        """Storage did not answer."""
        self._until_s = time.monotonic() + _PAUSE_S
        _log.warning("saves go to the disks of the nodes alone until storage answers again: %s", error.message)


class StagedPlace:
    """The `Placing` of a save into memory: rank 0 sends the plan to all ranks, and the keepers store it later. Where
    `absent` is given, the save goes to disks of the nodes first, and does not need storage."""

    def __init__(
        self, request: SaveRequest, *, num_ranks: int, memory_only: bool, absent: AbsentStorage | None = None
    ) -> None:
        self._request = request
        self._num_ranks = num_ranks
        self._memory_only = memory_only
        self._absent = absent

    def place(self, agreed: AgreedPlan) -> Agreed:
        """Take the next place of the run, and return the message about the checkpoint to stage for it."""
        identity, incarnation = self._taken()
        draft, diverged = agreed.memory.draft, agreed.diverged
        return Agreed(
            records.folder_name(identity.step, identity.checkpoint_id),
            identity.checkpoint_id,
            identity.run_id,
            identity.place,
            incarnation,
            identity.step,
            identity.created,
            dict(identity.metrics),
            diverged,
            agreed.memory.plan_id,
            b"" if agreed.is_known else draft.encode(identity, diverged),
            self._memory_only,
        )

    def _taken(self) -> tuple[CheckpointIdentity, str]:
        """The identity of the checkpoint, and the incarnation of its epoch. Where storage does not answer, the place is
        the next one in the epoch that this job has opened: the keepers find out whether another job has it by now."""
        if self._absent is not None and self._absent.is_left_alone and (unseen := self._unseen()) is not None:
            return unseen
        try:
            run, identity = self._request.take_place(world_size=self._num_ranks)
            return identity, JOB.incarnation(run)
        except StorageError as error:
            if self._absent is None or (unseen := self._unseen()) is None:
                raise
            self._absent.note(error)
            return unseen

    def _unseen(self) -> tuple[CheckpointIdentity, str] | None:
        request = self._request
        found = JOB.next_unseen(request.storage.untimed.resolved(), request.sources, request.step)
        if found is None:
            return None
        run_id, incarnation, place = found
        return request.identity(run_id, place), incarnation
