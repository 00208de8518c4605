"""Rank 0's step in a save into memory after all ranks have agreed on a plan: it takes a place, and stores nothing.

A look at the store tells at once whether another job has taken over the run. But training waits for the place, so a
store in trouble must not hold it up: then rank 0 takes the next place of its own epoch. The keeper looks again before
it commits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Final, NamedTuple

from holdfast.agreement.planner import AgreedPlan
from holdfast.agreement.request import SaveRequest
from holdfast.checkpointer.snapshot_messages import Agreed
from holdfast.errors import HoldfastError
from holdfast.format import records
from holdfast.format.manifest import Candidate
from holdfast.plan.save import CheckpointIdentity, ManifestTemplate
from holdfast.run.references import candidates_for
from holdfast.run.session import JOB
from holdfast.store.timed import TimedStore
from holdfast.store.trouble import is_store_trouble
from holdfast.store.urls import open_store

_log = logging.getLogger(__name__)

#: The time for which a save waits for the store, if it can do without.
_PATIENCE_S: Final = 2.0


class _Taken(NamedTuple):
    """The checkpoint at the place that was taken, the incarnation of its epoch, and what it may refer to."""

    identity: CheckpointIdentity
    incarnation: str
    references: tuple[Candidate, ...]


class StagedPlace:
    """The `Placing` of a save into memory: rank 0 sends the plan to all ranks, and the keepers store it later."""

    def __init__(self, request: SaveRequest, *, num_ranks: int, memory_only: bool) -> None:
        self._request = request
        self._num_ranks = num_ranks
        self._memory_only = memory_only

    def place(self, agreed: AgreedPlan) -> Agreed:
        """Take the next place of the run, and return the message about the checkpoint to stage for it."""
        draft, diverged = agreed.memory.draft, agreed.diverged
        # A snapshot for memory alone leaves no record in storage; if it becomes durable later, all of it is written.
        identity, incarnation, references = self._taken(draft, () if self._memory_only else draft.still_files)
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
            b"" if agreed.is_known else draft.encode(identity, diverged, references),
            references,
            self._memory_only,
        )

    def _taken(self, draft: ManifestTemplate, still: Collection[int]) -> _Taken:
        """Take a place, for a checkpoint by `draft` whose files `still` may be those of earlier ones."""
        location = self._request.storage.location
        if self._request.takeover == "always" or not JOB.can_begin_unseen(location, self._request.sources):
            return self._looked(self._request, draft, still)
        with TimedStore(open_store(location), timeout_s=_PATIENCE_S) as storage:
            try:
                return self._looked(replace(self._request, storage=storage), draft, still)
            except HoldfastError as error:
                unseen = JOB.begin_unseen(location, self._request.sources) if is_store_trouble(error) else None
                if unseen is None:
                    raise
                _log.warning(
                    "step %d is saved to memory, while the store is in trouble: %s", self._request.step, error.message
                )
                return _Taken(self._request.identity(unseen.run_id, unseen.place), unseen.incarnation, ())

    def _looked(self, request: SaveRequest, draft: ManifestTemplate, still: Collection[int]) -> _Taken:
        run, identity = request.take_place(world_size=self._num_ranks)
        folder = records.folder_name(identity.step, identity.checkpoint_id)
        found = candidates_for(run, still, place=identity.place, folder=folder, digests=draft.digests)
        return _Taken(identity, JOB.incarnation(run), found)
