"""One call of `save`, and how it takes its place in the history of the run."""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass

from holdfast.errors import CorruptError, NotFoundError
from holdfast.format.records import Place
from holdfast.plan.save import CheckpointIdentity
from holdfast.run.history import Run
from holdfast.run.loads import NEVER_LOADED, Sources
from holdfast.run.session import JOB, Takeover
from holdfast.store.timed import TimedStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveRequest:
    """One call of `save`; `sources` says which checkpoints the state was loaded from."""

    storage: TimedStore
    step: int
    metrics: dict[str, float]
    takeover: Takeover
    created: float
    sources: Sources = NEVER_LOADED

    def take_place(self, *, world_size: int) -> tuple[Run, CheckpointIdentity]:
        """Take the next place of the run. Call it only once the state is known to be savable: opening an epoch after a
        rollback moves the head."""
        run = Run.create(self.storage)
        place = JOB.begin(run, takeover=self.takeover, world_size=world_size, sources=self.sources, step=self.step)
        before = JOB.note_step(run, self.step)
        _check_step(run, place, self.step, before)
        return run, self.identity(run.run_id, place)

    def identity(self, run_id: str, place: Place) -> CheckpointIdentity:
        """The identity of a checkpoint at `place`."""
        return CheckpointIdentity(
            checkpoint_id=secrets.token_hex(8),
            run_id=run_id,
            place=place,
            step=self.step,
            created=self.created,
            metrics=self.metrics,
        )


def _check_step(run: Run, place: Place, step: int, before: int | None) -> None:
    """Warn where a save has a lower step than the save `before` it in its epoch, or where the first save of an epoch
    does not have a greater step than the checkpoint that the epoch was opened from. In both cases the loop repeats a
    step, or its count is not that of `step`. Reads two small records, once per epoch."""
    if before is not None and step < before:
        _log.warning(
            "step %d is saved after step %d: pass as `step` the number of the last finished step, which only rises "
            "until a checkpoint is loaded",
            step,
            before,
        )
    if place.seq > 1:
        return
    with suppress(CorruptError, NotFoundError):  # the warning is only a hint: a damaged history must not fail a save
        epoch = run.epoch(place.epoch)
        if epoch.opened_from is None or epoch.why == "takeover":
            return
        before = run.commit(epoch.opened_from).step
        if step <= before:
            _log.warning(
                "step %d is saved after step %d was loaded: pass as `step` the number of the last finished step, and "
                "continue the loop at report.next_step, which was %d",
                step,
                before,
                before + 1,
            )
