"""The ledger of time: what the jobs on a run used their time for, and which of it made progress that lasts.

A step counts as progress if the newest state contains it: no later job did it again, or left it aside. Such steps are
wasted. A step that no committed checkpoint contains yet is provisional: a failure now would waste it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.job_times import JobTimes, Prediction, Stretch, Use, is_job, job_times, processes


class Part(StrEnum):
    """A part of the time of a run. The names are those of Google's ml-goodput-measurement, except for the first three:
    it has no name for progress that may still be lost, and counts the slow-down as a deviation of step times."""

    GOODPUT = "GOODPUT"
    PROVISIONAL = "PROVISIONAL"
    SLOW_DOWN = "SLOW_DOWN_WHILE_SAVING"
    SAVE = "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"
    WASTED = "WASTED_PROGRESS_FROM_DISRUPTION"
    RESTORE = "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"
    RECOVERY = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
    START = "PROGRAM_STARTUP"
    OTHER = "OTHER"


_PARTS: Final = {Use.START: Part.START, Use.RESTORE: Part.RESTORE, Use.SAVE: Part.SAVE, Use.OTHER: Part.OTHER}
#: The fates of steps.
_FATES: Final = (Part.GOODPUT, Part.PROVISIONAL, Part.WASTED)
#: The parts that the policy `Auto` predicts, and all parts of the time of training.
_PREDICTED: Final = (Part.SAVE, Part.SLOW_DOWN, Part.WASTED)
_TRAINING: Final = (Part.GOODPUT, Part.PROVISIONAL, *_PREDICTED)


JobEnd = Literal["closed", "early", "unknown"]


@dataclass(frozen=True)
class JobLedger:
    """The ledger of one job, and of the time before it in which the run stood still.

    `seconds` has all parts; together they are ``wall_s``. `steps` counts steps that made progress (`Part.GOODPUT`), may
    still be lost (`Part.PROVISIONAL`) and were wasted (`Part.WASTED`). ``paused_s`` is the time between a job that had
    ended on purpose and this one; it is no part of the ledger. `end` says how the job ended: "closed", on purpose;
    "early", by a preemption or an exception; or "unknown": it was killed, never closed its
    `Checkpointer`, or still runs.
    """

    begun_s: float
    host: str
    world_size: int
    end: JobEnd
    wall_s: float
    paused_s: float
    seconds: Mapping[Part, float]
    steps: Mapping[Part, int]
    prediction: Prediction | None


class WasteComparison(NamedTuple):
    """The shares of the time of training that `Auto` expected saves and work done again to take, and that they took."""

    predicted: float
    realised: float


@dataclass(frozen=True)
class RunLedger:
    """The ledger of a run: of its jobs, in their order."""

    jobs: Sequence[JobLedger]

    @property
    def wall_s(self) -> float:
        """The time of all jobs, and of the times between them that were no planned pause."""
        return sum(job.wall_s for job in self.jobs)

    @property
    def paused_s(self) -> float:
        """The planned pauses."""
        return sum(job.paused_s for job in self.jobs)

    @property
    def seconds(self) -> dict[Part, float]:
        """All parts of ``wall_s``."""
        return {part: sum(job.seconds[part] for job in self.jobs) for part in Part}

    @property
    def steps(self) -> dict[Part, int]:
        """The numbers of steps that made progress, may still be lost, and were wasted."""
        return {
            part: sum(job.steps[part] for job in self.jobs) for part in (Part.GOODPUT, Part.PROVISIONAL, Part.WASTED)
        }

    @property
    def num_disruptions(self) -> int:
        """The number of jobs that ended before their time and were followed by another one."""
        return sum(job.end != "closed" for job in self.jobs[:-1])

    @property
    def comparison(self) -> WasteComparison | None:
        """The predicted and the realised waste of the jobs that predicted it, by their time of training; None if there
        are none."""
        rows = [(job, job.prediction.wasted) for job in self.jobs if job.prediction is not None]
        training_s = sum(_sum_of(job, _TRAINING) for job, _ in rows)
        if not training_s:
            return None
        return WasteComparison(
            sum(predicted * _sum_of(job, _TRAINING) for job, predicted in rows) / training_s,
            sum(_sum_of(job, _PREDICTED) for job, _ in rows) / training_s,
        )


def _sum_of(job: JobLedger, parts: Iterable[Part]) -> float:
    return sum(job.seconds[part] for part in parts)


def goodput_ledger(records: Iterable[EventRecord], committed: Collection[str] = ()) -> RunLedger:
    """The ledger from the `records` of all processes of all jobs on a run. `committed` are the places of checkpoints
    that are known to be committed, beside those that the records tell of.

    The clock of a job is that of its first rank. Wall clocks only say how jobs follow each other. Processes that only
    restore are no jobs, so a run may be evaluated while it is trained.
    """
    all_processes = [each for each in processes(records) if is_job(each)]
    committed = {*committed, *(place for each in all_processes for place in _committed(each))}
    first_rank = min((each[0].rank for each in all_processes), default=0)
    jobs = [job_times(each) for each in all_processes if each[0].rank == first_rank]
    jobs.sort(key=lambda job: job.opened_s)
    fates = iter(_fates([stretch for job in jobs for stretch in job.stretches], committed))
    lines: list[JobLedger] = []
    before: _JobTurn | None = None
    for turn in _in_turn(jobs):
        lines.append(_line(turn, before, [next(fates) for _ in turn.job.stretches]))
        before = turn
    return RunLedger(lines)


class _JobTurn(NamedTuple):
    """The time of a job, in unix seconds, in which no other job has its time."""

    job: JobTimes
    begun_s: float
    ended_s: float


def _in_turn(jobs: Sequence[JobTimes]) -> list[_JobTurn]:
    """The turns of jobs, which are in the order in which they opened their `Checkpointer`.

    A job that is started while another one trains has its turn when that one ends; if the other one does not notice
    that it is replaced, when the new one opens its `Checkpointer`.
    """
    turns: list[_JobTurn] = []
    for job in jobs:
        begun_s = job.begun_s
        if turns:
            begun_s = max(begun_s, min(turns[-1].ended_s, job.opened_s))
            turns[-1] = turns[-1]._replace(ended_s=min(turns[-1].ended_s, begun_s))
        turns.append(_JobTurn(job, begun_s, job.ended_s))
    return turns


def _committed(records: Sequence[EventRecord]) -> Iterable[str]:
    """The places of checkpoints that a process knows to be committed."""
    places: dict[int, str] = {}
    for record in records:
        if record.event == "SavePlaced" and record.step is not None:
            places[record.step] = record.place
        elif record.event == "SaveCommitted" and record.step in places:
            yield places[record.step]


class _Fate(NamedTuple):
    """The fate of the steps of a stretch: the newest state contains those after `origin` and up to `kept`, and a
    committed checkpoint those up to `sure`. The others are wasted."""

    origin: int
    kept: float
    sure: float

    def of(self, first: int, last: int) -> dict[Part, int]:
        """The numbers of steps from `first` to `last` by their fate."""
        begins, ends = max(first - 1, self.origin), min(last, self.kept)
        kept = max(int(ends) - begins, 0)
        good = max(int(min(ends, self.sure)) - begins, 0)
        return {Part.GOODPUT: good, Part.PROVISIONAL: kept - good, Part.WASTED: last - first + 1 - kept}


def _fates(stretches: Sequence[Stretch], committed: Collection[str]) -> list[_Fate]:
    """Follow the history back from the newest state, from each restore to the stretch that had saved what it read."""
    before = [_saved_by(stretches[:at], each.place, each.origin) for at, each in enumerate(stretches)]
    sure = [max((step for place, step in each.saved.items() if place in committed), default=-1) for each in stretches]
    for at, parent in reversed(list(enumerate(before))):
        origin = stretches[at].origin
        if parent is not None and (sure[at] >= origin or stretches[at].is_stored):
            sure[parent] = max(sure[parent], origin)
    kept: dict[int, float] = {}
    at_last: int | None = max((at for at, each in enumerate(stretches) if each.is_begun), default=None)
    bound = float("inf")
    while at_last is not None:
        kept[at_last] = bound
        bound = min(bound, stretches[at_last].origin)
        at_last = before[at_last]
    return [_Fate(each.origin, kept.get(at, -1.0), sure[at]) for at, each in enumerate(stretches)]


def _saved_by(stretches: Sequence[Stretch], place: str, step: int) -> int | None:
    """The stretch that saved `step` at `place`. If the event that names the place is lost: the last one that saved into
    the same epoch of the run, or the last one that did this step."""
    epoch = place.partition(".")[0]
    newest_first = [(at, stretches[at]) for at in reversed(range(len(stretches)))]
    for is_it in (
        lambda each: place in each.saved,
        lambda each: bool(epoch) and any(known.partition(".")[0] == epoch for known in each.saved),
        lambda each: each.first is not None and each.last is not None and each.first <= step <= each.last,
    ):
        found = next((at for at, each in newest_first if is_it(each)), None)
        if found is not None:
            return found
    return None


def _line(turn: _JobTurn, before: _JobTurn | None, fates: Sequence[_Fate]) -> JobLedger:
    """The ledger of a job, whose stretches have these `fates`, and which follows the job of `before`."""
    job = turn.job
    gap_s = 0.0 if before is None else turn.begun_s - before.ended_s
    is_planned = before is not None and before.job.is_closed and not before.job.is_early
    standstill_s, paused_s = (0.0, gap_s) if is_planned else (gap_s, 0.0)
    steps = Counter[Part]()
    for each in job.used:
        if each.use is Use.STEPS:
            steps.update(fates[each.stretch].of(each.first, each.last))
    return JobLedger(
        begun_s=turn.begun_s,
        host=job.host,
        world_size=job.world_size,
        end="unknown" if not job.is_closed else "early" if job.is_early else "closed",
        wall_s=turn.ended_s - turn.begun_s + standstill_s,
        paused_s=paused_s,
        seconds=_seconds(turn, fates, standstill_s),
        steps={part: steps[part] for part in _FATES},
        prediction=job.prediction,
    )


def _seconds(turn: _JobTurn, fates: Sequence[_Fate], standstill_s: float) -> dict[Part, float]:
    """The parts of a job's time."""
    seconds = dict.fromkeys(Part, 0.0)
    seconds[Part.RECOVERY] = standstill_s
    for each in turn.job.used:
        used = each.within(turn.begun_s, turn.ended_s)
        if used is None:
            continue
        if used.use in _PARTS:
            seconds[_PARTS[used.use]] += used.seconds
            continue
        number = used.last - used.first + 1
        slow_s = used.saving_s * turn.job.slow_share
        for part, steps in fates[used.stretch].of(used.first, used.last).items():
            share = steps / number
            lost_s = 0.0 if part is Part.WASTED else slow_s
            seconds[part] += (used.seconds - lost_s) * share
            seconds[Part.SLOW_DOWN] += lost_s * share
    return seconds
