"""The history of the job in `recorded_job`, as a run would hold it."""

from __future__ import annotations

from holdfast.format.records import Commit, Diverged, Epoch, Place, SealDigest
from holdfast.telemetry.goodput_ledger import goodput_ledger
from holdfast.telemetry.page import RunPicture
from holdfast.telemetry.rank_saves import job_events
from holdfast.telemetry.run_figures import RecordedHistory
from tests.support.recorded_job import BEGUN_S, EVERY, EVERY_S, recorded_job


def recorded_commit(number: int) -> Commit:
    """The commit of save `number`."""
    step, checkpoint_id = (number + 1) * EVERY - 1, f"{number:016x}"
    return Commit(
        place=Place(1, number + 1),
        step=step,
        checkpoint=f"step-{step:010d}-{checkpoint_id}",
        checkpoint_id=checkpoint_id,
        seal=SealDigest(10, "0" * 32),
        nbytes=5 * 2**30 + number * 2**20,
        created=BEGUN_S + number * EVERY_S,
        metrics={},
        diverged=Diverged.of([]),
    )


def picture_of(*, num_ranks: int = 4, num_saves: int = 3, slow_rank: int | None = None) -> RunPicture:
    """The content of a page about the job."""
    epoch = Epoch(
        epoch=1, opened_from=None, why="start", created=BEGUN_S - 5, world_size=num_ranks, incarnation="0" * 32
    )
    commits = [recorded_commit(number) for number in reversed(range(num_saves))]
    history = RecordedHistory(commits, commits[0].place if commits else None, [epoch], 0)
    records = recorded_job(num_ranks=num_ranks, num_saves=num_saves, slow_rank=slow_rank)
    ended_s = BEGUN_S + num_saves * EVERY_S
    return RunPicture("/shared/runs/gpt", ended_s, history, job_events(records), goodput_ledger(records), [])
