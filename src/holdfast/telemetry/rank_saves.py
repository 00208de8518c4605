"""From recorded events to saves, restores and steps, as each rank saw them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple

from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.job_times import is_job

#: The ends of a save by the events that say so.
_OUTCOMES: Final = {
    "SaveCommitted": "committed",
    "SaveFailed": "failed",
    "SaveHeld": "held",
    "SaveSkipped": "skipped",
    "SaveUnwatched": "unwatched",
}
#: The phases of a save into memory by the events that end them. (With `SaveMemoryReady`, agreement has ended before.)
_ENDED_PHASES: Final = {
    "SavePlaced": "agree",
    "SaveStaged": "copy",
    "SaveSealed": "seal",
    "SaveHeld": "seal",
    "SaveCommitted": "store",
}
UNDER_WAY: Final = "under way"
#: The code by which a save is unprotected because nobody asked for more.
UNASKED: Final = "config.unprotected"


class PhaseSpan(NamedTuple):
    """A phase of a save or restore on one rank: when it began, in unix seconds, and how long it took."""

    phase: str
    begun_s: float
    seconds: float


@dataclass
class RankSave:
    """One save on one rank. Times are in unix seconds; ``ended_s`` is None while the save is under way. With
    `memory_only`, it is to stay in memory. `nbytes` is the size of this rank's part. `trouble` is why a try to make it
    durable failed, or why the save ended without a checkpoint. `protected_at_s` is when other nodes protected it;
    `unprotected` is why they did not, as `protect=` asks ("": they do, or no try has failed yet, or nobody asks).
    `waits_for` says what keeps the slot for which the save has waited ("": it has not waited for long)."""

    rank: int
    host: str
    step: int
    tier: str
    begun_s: float
    memory_only: bool = False
    place: str = ""
    outcome: str = UNDER_WAY
    nbytes: int = 0
    blocked: PhaseSpan | None = None
    ended_s: float | None = None
    spans: list[PhaseSpan] = field(default_factory=list)
    num_delays: int = 0
    trouble: str = ""
    protected_at_s: float | None = None
    unprotected: str = ""
    waits_for: str = ""

    @property
    def durable_s(self) -> float | None:
        """The time from the call until the checkpoint was durable; None if it is not."""
        return None if self.outcome != "committed" or self.ended_s is None else self.ended_s - self.begun_s

    @property
    def in_memory_at_s(self) -> float | None:
        """The time at which this rank's part lay whole in memory; None if it did not, or the save went to storage."""
        sealed = next((span for span in self.spans if span.phase == "seal"), None)
        if sealed is not None:
            return sealed.begun_s + sealed.seconds
        # A rank that looks late hears of the commit at once, and so of no seal.
        return self.ended_s if self.tier == "node memory" and self.outcome == "committed" else None

    @property
    def phase_now(self) -> str:
        """The phase that a save under way is in."""
        following = {"": "agree", "agree": "copy", "memory": "copy", "copy": "seal", "seal": "store"}
        return following.get(self.spans[-1].phase if self.spans else "", "store")

    @property
    def doing_now(self) -> str:
        """The words for the work of the rank on a save under way."""
        return f"in {self.phase_now}" if self.spans or not self.waits_for else "waiting for a slot"

    def seconds(self) -> dict[str, float]:
        """The time of each phase."""
        return {span.phase: span.seconds for span in self.spans}


class RankRestore(NamedTuple):
    """One restore on one rank. `step` is None where there was nothing to restore. `is_of_job`: the process trains; one
    that does not, such as an evaluation, changes nothing about the run."""

    rank: int
    host: str
    step: int | None
    place: str
    tier: str
    begun_s: float
    nbytes: int
    spans: list[PhaseSpan]
    is_of_job: bool


class RankSteps(NamedTuple):
    """The median times of steps of one rank up to `step`, at a moment in unix seconds. `process` is that of a job."""

    host: str
    process: int
    rank: int
    step: int
    at_s: float
    num_quiet: int
    quiet_s: float
    num_saving: int
    saving_s: float


class JobEvents(NamedTuple):
    """All that is known of the saves, restores and steps of a run, in the order of time."""

    saves: list[RankSave]
    restores: list[RankRestore]
    steps: list[RankSteps]
    num_dropped: int


def job_events(records: Iterable[EventRecord]) -> JobEvents:
    """Put the records of all processes together."""
    found = JobEvents([], [], [], 0)
    num_dropped = 0
    for _, process in groupby(sorted(records, key=_process_of), key=_process_of):
        num_dropped += _read_process(list(process), found)
    found.saves.sort(key=lambda each: each.begun_s)
    found.restores.sort(key=lambda each: each.begun_s)
    found.steps.sort(key=lambda each: each.at_s)
    return found._replace(num_dropped=num_dropped)


def _process_of(record: EventRecord) -> tuple[str, int, str]:
    """The process, and the run that it saves into: a process may save into several runs."""
    return record.host, record.process, record.run


def _read_process(records: list[EventRecord], found: JobEvents) -> int:
    """Add the events of one process and run to `found`. Returns the number of events that were dropped."""
    # One reading of the wall clock for the whole process: it may have been set in between.
    offset_s = records[0].unix_s - records[0].clock_s
    saves: dict[int, RankSave] = {}
    trains = is_job(records)
    num_dropped = 0
    for record in records:
        at_s, step = record.clock_s + offset_s, record.step
        match record.event:
            case "SaveBegun" if step is not None and _is_new(saves.get(step)):
                alone = bool(record.numbers.get("memory_only"))
                saves[step] = RankSave(record.rank, record.host, step, record.tier, at_s, alone)
                found.saves.append(saves[step])
            case "SaveBegun" if step is not None:
                saves[step].tier = record.tier  # it falls back from memory to storage, and begins again
                saves[step].spans.clear()
                saves[step].waits_for = ""
            case "StateRestored":
                begun_s = at_s - sum(record.seconds.values())
                spans = list(_laid_out(record.seconds, begun_s))
                nbytes = record.numbers.get("nbytes", 0)
                where = record.rank, record.host, step, record.place, record.tier
                found.restores.append(RankRestore(*where, begun_s, nbytes, spans, trains))
            case "StepsTimed" if step is not None:
                numbers, seconds = record.numbers, record.seconds
                quiet = numbers.get("quiet", 0), seconds.get("quiet", 0.0)
                saving = numbers.get("saving", 0), seconds.get("saving", 0.0)
                found.steps.append(RankSteps(record.host, record.process, record.rank, step, at_s, *quiet, *saving))
            case "EventsDropped":
                num_dropped += record.numbers.get("dropped", 0)
            case _ if step in saves:
                _go_on(saves[step], record, at_s)
    return num_dropped


def _is_new(save: RankSave | None) -> bool:
    return save is None or save.ended_s is not None


def _go_on(save: RankSave, record: EventRecord, at_s: float) -> None:
    """Note an event of a save."""
    match record.event:
        case "SaveWaiting":
            save.waits_for = record.message
        case "SavePlaced":
            save.place = record.place
        case "SaveStaged":
            save.nbytes = record.numbers.get("nbytes", 0)
        case "SaveDelayed":
            save.num_delays += 1
            save.trouble = record.message
        case "SaveProtected":
            save.protected_at_s = at_s
        case "ProtectionDelayed":
            save.unprotected = record.message
        case "SaveUnprotected" if record.error not in ("", UNASKED):
            save.unprotected = record.message or record.error
        case "SaveReturned":
            blocked_s = record.seconds.get("blocked", 0.0)
            save.blocked = PhaseSpan("blocked", at_s - blocked_s, blocked_s)
        case event if event in _OUTCOMES:
            save.outcome, save.ended_s = _OUTCOMES[event], at_s
            save.trouble = record.message or save.trouble
    if save.tier != "storage":
        save.spans.extend(_memory_phases(save, record, at_s))
    elif record.event == "SaveCommitted":
        save.spans.extend(_laid_out(record.seconds, at_s - sum(record.seconds.values())))


def _memory_phases(save: RankSave, record: EventRecord, at_s: float) -> Iterator[PhaseSpan]:
    """The phases of a save into memory that `record` ends."""
    last = save.spans[-1] if save.spans else PhaseSpan("", save.begun_s, 0.0)
    begun_s = last.begun_s + last.seconds
    if record.event == "SaveMemoryReady":
        waited_s = record.seconds.get("memory", 0.0)
        yield from _laid_out({"agree": max(at_s - waited_s - begun_s, 0.0), "memory": waited_s}, begun_s)
    elif record.event in _ENDED_PHASES and not (record.event == "SavePlaced" and save.spans):
        yield PhaseSpan(_ENDED_PHASES[record.event], begun_s, max(at_s - begun_s, 0.0))


def _laid_out(seconds: dict[str, float], begun_s: float) -> Iterator[PhaseSpan]:
    """Phases that follow each other."""
    for phase, duration_s in seconds.items():
        yield PhaseSpan(phase, begun_s, duration_s)
        begun_s += duration_s
