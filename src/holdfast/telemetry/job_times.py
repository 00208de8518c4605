"""From the recorded events of one process to the use that it made of its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median
from typing import Final, NamedTuple

from holdfast.telemetry.event_record import EventRecord

#: The events of the loop's steps.
_OF_STEPS: Final = ("FirstStepEnded", "StepsTimed")
#: Two events of one process agree on its start up to so many seconds.
_SAME_START_S: Final = 1.0


class Use(Enum):
    """A use of time."""

    START = auto()
    RESTORE = auto()
    STEPS = auto()
    SAVE = auto()
    OTHER = auto()
    #: A first step, with what the job does before it. It becomes a usual step and a part of the start.
    FIRST_STEP = auto()


class UsedTime(NamedTuple):
    """A time, in unix seconds, and its use. Where it is used for steps: for those from `first` to `last`, of which the
    ones with a save under way took ``saving_s``. `stretch` is the index of the stretch in its job."""

    begun_s: float
    ended_s: float
    use: Use
    stretch: int
    first: int = 0
    last: int = -1
    saving_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended_s - self.begun_s

    def within(self, begun_s: float, ended_s: float) -> UsedTime | None:
        """The part of it between two moments; None if there is none."""
        begins, ends = max(self.begun_s, begun_s), min(self.ended_s, ended_s)
        if ends <= begins:
            return None
        return self._replace(begun_s=begins, ended_s=ends, saving_s=self.saving_s * (ends - begins) / self.seconds)


@dataclass
class Stretch:
    """The steps of a job from a restore (or its start) to the next restore (or its end).

    It goes on from `step`, which is -1 where there was nothing to restore, and None if no event says it. That step was
    saved at `place`, and was in storage if `is_stored`. `saved` has the places of the stretch's own saves, with their
    steps.
    """

    step: int | None = None
    place: str = ""
    is_restored: bool = False
    is_stored: bool = False
    saved: dict[str, int] = field(default_factory=dict)
    first: int | None = None
    last: int | None = None

    @property
    def origin(self) -> int:
        """The step before its first one."""
        if self.step is not None:
            return self.step
        return -1 if self.first is None else self.first - 1

    @property
    def is_begun(self) -> bool:
        """Whether it has any effect on the run."""
        return self.is_restored or self.first is not None or bool(self.saved)


@dataclass(frozen=True)
class Prediction:
    """The prediction of the policy `Auto`: for saves every ``interval_s`` of a job that fails every ``mttf_s``, the
    share `wasted` of the time of training."""

    interval_s: float
    mttf_s: float
    wasted: float


@dataclass(frozen=True)
class JobTimes:
    """The use of the time of one process, from its start to its last event, in unix seconds. ``opened_s`` is when it
    first called its `Checkpointer`. `is_closed`: it has closed it; `is_early`: before training had ended. `slow_share`
    is the share of the time of steps with a save under way that these steps take longer than others."""

    host: str
    world_size: int
    begun_s: float
    opened_s: float
    ended_s: float
    is_closed: bool
    is_early: bool
    used: list[UsedTime]
    stretches: list[Stretch]
    slow_share: float
    prediction: Prediction | None


def processes(records: Iterable[EventRecord]) -> list[list[EventRecord]]:
    """The records of each process and run, in the order of its clock. A process number that is used again, as in a
    container that was started again, is another process."""
    found: list[list[EventRecord]] = []
    present: dict[tuple[str, int, str], list[EventRecord]] = {}
    started: dict[tuple[str, int, str], list[tuple[float, list[EventRecord]]]] = {}
    for record in records:
        key = record.host, record.process, record.run
        if record.event == "CheckpointerOpened":
            begun_s = record.clock_s - record.seconds.get("age", 0.0)
            known = started.setdefault(key, [])
            same = next((each for at_s, each in known if abs(at_s - begun_s) <= _SAME_START_S), None)
            if same is None:
                same = []
                found.append(same)
                known.append((begun_s, same))
            present[key] = same
        elif key not in present:
            present[key] = []
            found.append(present[key])
        present[key].append(record)
    for each in found:
        each.sort(key=lambda record: record.clock_s)
    return found


def is_job(records: Iterable[EventRecord]) -> bool:
    """Whether a process trained: it told of a step or a save. One that only restores, as for an evaluation, is no job,
    and neither is one that was killed before its first step."""
    return any(record.event in _OF_STEPS or record.event.startswith("Save") for record in records)


def job_times(records: list[EventRecord]) -> JobTimes:
    """The use of time by the process of `records`, which are in the order of its clock."""
    reading = _UseOfTime(records)
    for record in records:
        reading.read(record)
    return reading.finish()


class _UseOfTime:
    """Goes through the events of a process. Each one says what the time before it was used for, back to the end of what
    an earlier event told of: so no time is used twice, whatever the records say."""

    def __init__(self, records: list[EventRecord]) -> None:
        first, last = records[0], records[-1]
        self._records = records
        # One reading of the wall clock for the whole process: it may have been set in between.
        self._offset_s = first.unix_s - first.clock_s
        age_s = first.seconds.get("age", 0.0) if first.event == "CheckpointerOpened" else 0.0
        self._opened_s = first.unix_s
        self._begun_s = self._end_s = first.unix_s - age_s
        self._ended_s = last.clock_s + self._offset_s
        self._counts_steps = any(record.event in _OF_STEPS for record in records)
        self._has_trained = self._is_closed = self._is_early = False
        self._used: list[UsedTime] = []
        self._stretches = [Stretch()]
        self._prediction: Prediction | None = None

    def read(self, record: EventRecord) -> None:
        """Go on to the next event."""
        at_s, seconds = record.clock_s + self._offset_s, record.seconds
        match record.event:
            case "CheckpointerOpened":
                self._use(at_s, 0.0, Use.OTHER)
                self._is_closed = False
            case "StateRestored":
                self._restore(record)  # `RestoreReturned` says how long all of it took
            case "RestoreReturned" | "RestoreFailed":
                self._use(at_s, seconds.get("took", 0.0), Use.RESTORE)
            case "FirstStepEnded" if record.step is not None:
                self._use(at_s, self._left_s(at_s), Use.FIRST_STEP, record.step, record.step)
            case "StepsTimed" if record.step is not None:
                self._steps(record, at_s, record.step)
            case "SavePlaced" if record.step is not None:
                self._stretches[-1].saved[record.place] = record.step
            case "SaveReturned" if record.step is not None:
                self._saved(record.step, at_s, seconds.get("blocked", 0.0))
            case "IntervalChosen":
                wasted = record.numbers.get("wasted_ppm", 0) / 1e6
                self._prediction = Prediction(seconds.get("interval", 0.0), seconds.get("mttf", 0.0), wasted)
            case "CheckpointerClosed":
                self._use(at_s, seconds.get("waited", 0.0), Use.SAVE)
                self._is_closed, self._is_early = True, bool(record.numbers.get("early"))

    def finish(self) -> JobTimes:
        """The use of all time."""
        self._use(self._ended_s, 0.0, Use.OTHER)
        usual_s = self._usual_s()
        return JobTimes(
            self._records[0].host,
            self._records[0].world_size,
            self._begun_s,
            self._opened_s,
            self._ended_s,
            self._is_closed,
            self._is_early,
            [part for each in self._used for part in _without_start(each, usual_s)],
            self._stretches,
            self._slow_share(usual_s),
            self._prediction,
        )

    def _left_s(self, at_s: float) -> float:
        """The time until `at_s` that no event has told of yet."""
        return max(at_s - self._end_s, 0.0)

    def _use(
        self, at_s: float, seconds: float, use: Use, first: int = 0, last: int = -1, *, saving_s: float = 0.0
    ) -> None:
        """The last `seconds` before `at_s` were used so, and the time before them for nothing that is known."""
        begun_s = max(at_s - seconds, self._end_s)
        if begun_s > self._end_s:
            gap = Use.OTHER if self._has_trained else Use.START
            self._used.append(UsedTime(self._end_s, begun_s, gap, self._here))
            self._end_s = begun_s
        has_steps = last >= first
        if has_steps:
            stretch = self._stretches[-1]
            stretch.first = first if stretch.first is None else stretch.first
            stretch.last = last
            self._has_trained = True
        self._end_s = max(at_s, begun_s)
        if has_steps or self._end_s > begun_s:
            self._used.append(UsedTime(begun_s, self._end_s, use, self._here, first, last, saving_s))

    @property
    def _here(self) -> int:
        return len(self._stretches) - 1

    def _restore(self, record: EventRecord) -> None:
        if self._stretches[-1].is_begun:
            self._stretches.append(Stretch())
        stretch = self._stretches[-1]
        stretch.step = -1 if record.step is None else record.step
        stretch.place = record.place
        stretch.is_restored, stretch.is_stored = True, record.tier == "storage"

    def _steps(self, record: EventRecord, at_s: float, step: int) -> None:
        number = sum(_counts(record))
        if number:
            totals = record.seconds.get("quiet_total", 0.0), record.seconds.get("saving_total", 0.0)
            total_s = min(sum(totals), self._left_s(at_s))
            saving_s = total_s * totals[1] / sum(totals) if sum(totals) else 0.0
            self._use(at_s, total_s, Use.STEPS, step - number + 1, step, saving_s=saving_s)

    def _saved(self, step: int, at_s: float, blocked_s: float) -> None:
        if not self._counts_steps:  # a loop without calls of `step`: all that it does between saves are steps
            last = self._stretches[-1].last
            first = (self._stretches[-1].origin if last is None else last) + 1
            begun_s = at_s - blocked_s
            if first <= step and self._left_s(begun_s):
                self._use(begun_s, self._left_s(begun_s), Use.STEPS, first, step)
        self._use(at_s, blocked_s, Use.SAVE)
        self._has_trained = True

    def _usual_s(self) -> float:
        """The usual time of a step without a save under way; 0 if there was none."""
        timed = (record for record in self._records if record.event == "StepsTimed")
        return median([record.seconds.get("quiet", 0.0) for record in timed if _counts(record)[0]] or [0.0])

    def _slow_share(self, usual_s: float) -> float:
        timed = [record for record in self._records if record.event == "StepsTimed"]
        all_s = sum(record.seconds.get("saving_total", 0.0) for record in timed)
        more_s = sum(_counts(record)[1] * (record.seconds.get("saving", 0.0) - usual_s) for record in timed)
        return min(max(more_s / all_s, 0.0), 1.0) if all_s and usual_s else 0.0


def _counts(record: EventRecord) -> tuple[int, int]:
    """The numbers of steps without and with a save under way."""
    return record.numbers.get("quiet", 0), record.numbers.get("saving", 0)


def _without_start(used: UsedTime, usual_s: float) -> Iterator[UsedTime]:
    """A first step as a usual step, and as a part of the start before it; all other times as they are."""
    if used.use is not Use.FIRST_STEP:
        yield used
        return
    begun_s = used.ended_s - min(usual_s, used.seconds)
    if begun_s > used.begun_s:
        yield used._replace(ended_s=begun_s, use=Use.START, first=0, last=-1)
    yield used._replace(begun_s=begun_s, use=Use.STEPS)
