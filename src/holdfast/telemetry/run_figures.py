"""The figures of a run that the page and the screen show, from its history and its recorded events."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from holdfast.errors import CorruptError, NotFoundError
from holdfast.format.records import Commit, Epoch, Place
from holdfast.run.history import Run
from holdfast.telemetry.rank_saves import RankRestore, RankSave, RankSteps
from holdfast.wording import duration

#: The columns of the heat map beside the phases: the time that the call kept training, and all until it is durable.
BLOCKED, DURABLE = "blocked", "durable"
#: The phases in their order: of saves into memory, then of saves to storage.
_PHASES: Final = ("agree", "memory", "copy", "seal", "store", "describe", "plan", "compare", "write", "commit")
#: For values of a normal distribution: the standard error of their median times the root of their number, and their
#: standard deviation, in standard deviations and in median absolute deviations.
_ERROR_OF_MEDIAN: Final = 1.2533
_DEVIATION: Final = 1.4826
#: A difference of so many standard errors is more than chance.
_NUM_ERRORS: Final = 2


class RecordedHistory(NamedTuple):
    """The commits of a run, newest first, its head, and the epochs that can be read. `num_unreadable` counts records
    that cannot."""

    commits: list[Commit]
    head: Place | None
    epochs: list[Epoch]
    num_unreadable: int


def recorded_history(run: Run) -> RecordedHistory:
    """Read the records of `run`. Those that are damaged are counted, and `holdfast doctor` says more about them."""
    commits: list[Commit] = []
    epochs: list[Epoch] = []
    num_unreadable = 0
    for place in run.places():
        try:
            commits.append(run.commit(place))
        except (CorruptError, NotFoundError):
            num_unreadable += 0 if run.is_removed(place) else 1
    for number in run.epochs():
        try:
            epochs.append(run.epoch(number))
        except (CorruptError, NotFoundError):
            num_unreadable += 1
    try:
        head = run.head_place()
    except CorruptError:
        head = None
    return RecordedHistory(commits, head, epochs, num_unreadable)


@dataclass(frozen=True)
class JobSave:
    """One save of a job: what each of its ranks recorded of it."""

    step: int
    by_rank: dict[int, RankSave]

    @property
    def ranks(self) -> Collection[RankSave]:
        """The records of all ranks, in no order."""
        return self.by_rank.values()

    @property
    def place(self) -> str:
        """The place of the checkpoint; "" before ranks have agreed on one."""
        return next((each.place for each in self.ranks if each.place), "")

    def has_room_for(self, save: RankSave) -> bool:
        """Whether `save`, of the same step, is another rank's part of this one."""
        return save.rank not in self.by_rank and (not save.place or self.place in ("", save.place))

    @property
    def memory_only(self) -> bool:
        """Whether it is to stay in memory."""
        return any(each.memory_only for each in self.ranks)

    @property
    def begun_s(self) -> float:
        """The time at which the first rank began."""
        return min(each.begun_s for each in self.ranks)

    @property
    def blocked_s(self) -> float:
        """The time for which the save kept training: that of the slowest rank."""
        return max((each.blocked.seconds for each in self.ranks if each.blocked is not None), default=0.0)

    @property
    def durable_at_s(self) -> float | None:
        """The time at which the checkpoint was durable, as the first rank saw it; None if it is not."""
        return min(
            (each.ended_s for each in self.ranks if each.ended_s is not None and each.outcome == "committed"),
            default=None,
        )

    @property
    def durable_s(self) -> float | None:
        """The time from the first call until the checkpoint was durable; None if it is not."""
        return None if self.durable_at_s is None else self.durable_at_s - self.begun_s

    @property
    def in_memory_at_s(self) -> float | None:
        """The time at which the parts of all ranks lay whole in memory; None if one of them did not."""
        moments = [each.in_memory_at_s for each in self.ranks]
        known = [at_s for at_s in moments if at_s is not None]
        return max(known) if len(known) == len(moments) else None

    @property
    def protected_s(self) -> float | None:
        """The time from the first call until other nodes protected the checkpoint, as the first rank saw it; None if no
        rank saw that."""
        seen = [each.protected_at_s for each in self.ranks if each.protected_at_s is not None]
        return min(seen) - self.begun_s if seen else None

    @property
    def unprotected(self) -> str:
        """Why other nodes do not protect the checkpoint, as `protect=` asks; "" if they do, or that is not known."""
        if self.protected_s is not None:
            return ""
        return next((each.unprotected for each in self.ranks if each.unprotected), "")

    @property
    def nbytes(self) -> int:
        """The size of all parts."""
        return sum(each.nbytes for each in self.ranks)

    @property
    def outcome(self) -> str:
        """The end of the save: committed if one rank saw that, else the end that most ranks saw."""
        outcomes = [each.outcome for each in self.ranks]
        return "committed" if "committed" in outcomes else max(outcomes, key=outcomes.count)

    @property
    def trouble(self) -> str:
        """The first trouble that a rank tells of."""
        return next((each.trouble for each in self.ranks if each.trouble), "")


def job_saves(saves: Iterable[RankSave]) -> list[JobSave]:
    """Put what the ranks recorded of each save together, in the order of time.

    A step that was saved again, after a restart, is another save: it has another place, and a rank takes part once. A
    rank that has not agreed on a place yet, or ended before, belongs to the newest save that lacks this rank.
    """
    found: list[JobSave] = []
    newest: dict[int, JobSave] = {}
    for each in sorted(saves, key=lambda save: save.begun_s):
        save = newest.get(each.step)
        if save is None or not save.has_room_for(each):
            save = newest[each.step] = JobSave(each.step, {})
            found.append(save)
        save.by_rank[each.rank] = each
    return found


class HeatRow(NamedTuple):
    """One phase in the heat map: the median time on each rank that recorded it."""

    phase: str
    seconds: Mapping[int, float]

    @property
    def typical_s(self) -> float:
        """The time on the rank in the middle."""
        return median(self.seconds.values())


def heat_rows(saves: Iterable[RankSave]) -> list[HeatRow]:
    """The rows of the heat map, over committed saves."""
    found: dict[str, dict[int, list[float]]] = {}
    for save in saves:
        if save.durable_s is None:
            continue
        seconds = {DURABLE: save.durable_s, **save.seconds()}
        if save.blocked is not None:
            seconds[BLOCKED] = save.blocked.seconds
        for phase, duration_s in seconds.items():
            found.setdefault(phase, {}).setdefault(save.rank, []).append(duration_s)
    known = [phase for phase in (BLOCKED, *_PHASES) if phase in found]
    others = sorted(found.keys() - {*known, DURABLE})
    return [
        HeatRow(phase, {rank: median(each) for rank, each in sorted(found[phase].items())})
        for phase in (*known, *others, DURABLE)
        if phase in found
    ]


class RecoveryPoint(NamedTuple):
    """A moment, in unix seconds, and how old the newest durable state was then."""

    at_s: float
    age_s: float


def recovery_points(saves: Iterable[JobSave]) -> list[RecoveryPoint]:
    """The age of the newest durable state over time: it rises until a checkpoint is durable, and then falls to the time
    that this checkpoint took."""
    return _ages((save.durable_at_s, save.begun_s) for save in saves)


def memory_points(saves: Iterable[JobSave]) -> list[RecoveryPoint]:
    """The age of the newest state in memory over time, as `recovery_points`."""
    return _ages((save.in_memory_at_s, save.begun_s) for save in saves)


def _ages(states: Iterable[tuple[float | None, float]]) -> list[RecoveryPoint]:
    """The age of the newest state over time, from the moments at which each was safe (None: never) and was taken."""
    points: list[RecoveryPoint] = []
    newest_s: float | None = None
    safe = [(safe_at_s, begun_s) for safe_at_s, begun_s in states if safe_at_s is not None]
    for safe_at_s, begun_s in sorted(safe):
        if newest_s is not None and begun_s <= newest_s:
            continue
        if newest_s is not None:
            points.append(RecoveryPoint(safe_at_s, safe_at_s - newest_s))
        newest_s = begun_s
        points.append(RecoveryPoint(safe_at_s, safe_at_s - begun_s))
    return points


def last_job_restored_s(restores: Iterable[RankRestore]) -> float:
    """The time at which a job last began to restore, in unix seconds; 0 if none did."""
    return max((each.begun_s for each in restores if each.is_of_job), default=0.0)


def newest_in_memory(saves: Iterable[JobSave], restores: Iterable[RankRestore]) -> JobSave | None:
    """The save with the newest state that lies in memory, as far as its job knows; None if there is none. What lay
    there before the newest restore of a job counts for nothing: it may have gone with its node."""
    since_s = last_job_restored_s(restores)
    found = (save for save in saves if save.in_memory_at_s is not None and save.begun_s >= since_s)
    return max(found, key=lambda save: save.begun_s, default=None)


def missed_in_a_row(saves: Iterable[JobSave]) -> int:
    """The number of the last saves that made no checkpoint, of those that were to make one."""
    number = 0
    for save in saves:
        if save.outcome in ("failed", "skipped") and not save.memory_only:
            number += 1
        elif save.outcome == "committed":
            number = 0
    return number


class ProtectionFigures(NamedTuple):
    """Of how many saves is it known whether other nodes protect them, and of how many they do; the median time until
    then (None: of none); and why the newest one that they do not protect has no protection ("": there is none)."""

    num_known: int
    num_protected: int
    protected_s: float | None
    why_not: str

    def __str__(self) -> str:
        after = "" if self.protected_s is None else f" after {duration(self.protected_s)}"
        told = f"{self.num_protected:,} of {self.num_known:,} saves protected{after}"
        if self.num_known == 1:
            told = f"protected{after}" if self.num_protected else ""
        return "; ".join(filter(None, [told, f"not protected: {self.why_not}" if self.why_not else ""]))


def protection_figures(saves: Iterable[JobSave]) -> ProtectionFigures | None:
    """The figures of `saves`; None where no job asked for protection, or none of them is that far."""
    known = [save for save in saves if save.protected_s is not None or save.unprotected]
    if not known:
        return None
    times = [save.protected_s for save in known if save.protected_s is not None]
    why_not = next((save.unprotected for save in reversed(known) if save.unprotected), "")
    return ProtectionFigures(len(known), len(times), median(times) if times else None, why_not)


class StepFigures(NamedTuple):
    """The median time of a step without a save under way, in the newest job; and by which share of that time a save
    under way makes `num_saving` steps slower. ``slowdown`` is None where chance alone may explain what was measured."""

    quiet_s: float
    slowdown: float | None
    num_saving: int

    @property
    def slowdown_text(self) -> str:
        """The slow-down for humans."""
        return "not measurable" if self.slowdown is None else f"{100 * self.slowdown:+.1f} %"


def step_figures(steps: Iterable[RankSteps]) -> StepFigures | None:
    """The figures of all steps; None where no process had steps of both kinds.

    Each process is compared with itself alone, because the steps of another job may take another time.
    """
    processes: dict[tuple[str, int], list[RankSteps]] = {}
    for each in sorted(steps, key=lambda each: each.at_s):
        processes.setdefault((each.host, each.process), []).append(each)
    found = [own for each in processes.values() if (own := _compared(each)) is not None]
    num_saving = sum(each.num_saving for each in found)
    if not found:
        return None
    usual_s = sum(each.num_saving * each.quiet_s for each in found)
    more_s = sum(each.num_saving * each.more_s for each in found)
    error_s = math.hypot(*(each.num_saving * each.error_s for each in found))
    slowdown = more_s / usual_s if usual_s and more_s > _NUM_ERRORS * error_s else None
    newest_s = next(own.quiet_s for each in reversed(processes.values()) if (own := _compared(each)) is not None)
    return StepFigures(newest_s, slowdown, num_saving)


class _ComparedSteps(NamedTuple):
    """The steps of one process: the median without a save, by how much those with one take longer, and the standard
    error of that, as far as it is known."""

    quiet_s: float
    num_saving: int
    more_s: float
    error_s: float


def _compared(steps: Sequence[RankSteps]) -> _ComparedSteps | None:
    """The comparison of the `steps` of one process; None where there were none of one of the two kinds."""
    quiet = [each.quiet_s for each in steps if each.num_quiet]
    saving = [each.saving_s for each in steps if each.num_saving]
    if not quiet or not saving:
        return None
    quiet_s = median(quiet)
    deviation_s = _DEVIATION * median([abs(each - quiet_s) for each in quiet])
    error_s = _ERROR_OF_MEDIAN * deviation_s * math.sqrt(1 / len(quiet) + 1 / len(saving))
    return _ComparedSteps(quiet_s, sum(each.num_saving for each in steps), median(saving) - quiet_s, error_s)
