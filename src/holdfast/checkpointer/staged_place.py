"""Rank 0's step in a save into memory after all ranks have agreed on a plan: it takes a place, and stores nothing."""

from __future__ import annotations

from holdfast.agreement.planner import AgreedPlan
from holdfast.agreement.request import SaveRequest
from holdfast.checkpointer.snapshot_messages import Agreed
from holdfast.format import records
from holdfast.run.references import candidates_for
from holdfast.run.session import JOB


class StagedPlace:
    """The `Placing` of a save into memory: rank 0 sends the plan to all ranks, and the keepers store it later."""

    def __init__(self, request: SaveRequest, *, num_ranks: int, memory_only: bool) -> None:
        self._request = request
        self._num_ranks = num_ranks
        self._memory_only = memory_only

    def place(self, agreed: AgreedPlan) -> Agreed:
        """Take the next place of the run, and return the message about the checkpoint to stage for it."""
        run, identity = self._request.take_place(world_size=self._num_ranks)
        draft, diverged = agreed.memory.draft, agreed.diverged
        folder = records.folder_name(identity.step, identity.checkpoint_id)
        # A snapshot for memory alone leaves no record in storage; if it becomes durable later, all of it is written.
        still = () if self._memory_only else draft.still_files
        references = candidates_for(run, still, place=identity.place, folder=folder)
        return Agreed(
            folder,
            identity.checkpoint_id,
            identity.run_id,
            identity.place,
            JOB.incarnation(run),
            identity.step,
            identity.created,
            dict(identity.metrics),
            diverged,
            agreed.memory.plan_id,
            b"" if agreed.is_known else draft.encode(identity, diverged, references),
            references,
            self._memory_only,
        )
