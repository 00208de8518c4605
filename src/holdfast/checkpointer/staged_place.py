"""What rank 0 does in a save into memory when all ranks have agreed on a plan: it stores nothing."""

from __future__ import annotations

from holdfast.agreement.planner import AgreedPlan
from holdfast.agreement.request import SaveRequest
from holdfast.checkpointer.messages import Agreed
from holdfast.format import records
from holdfast.run.session import JOB


class StagedPlace:
    """A plan is told to all ranks, and stored by those who make it durable."""

    def __init__(self, request: SaveRequest, *, num_ranks: int) -> None:
        self._request = request
        self._num_ranks = num_ranks

    def place(self, agreed: AgreedPlan) -> Agreed:
        """Take the next place of the run, and tell what is to be staged for it."""
        run, identity = self._request.take_place(world_size=self._num_ranks)
        draft, diverged = agreed.memory.draft, agreed.diverged
        return Agreed(
            records.folder_name(identity.step, identity.checkpoint_id),
            identity.checkpoint_id,
            identity.run_id,
            identity.place,
            JOB.incarnation(run),
            identity.step,
            identity.created,
            dict(identity.metrics),
            diverged,
            agreed.memory.plan_id,
            b"" if agreed.is_known else draft.encode(identity, diverged),
        )
