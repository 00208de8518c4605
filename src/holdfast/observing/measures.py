"""The measures that dashboards show, by one name everywhere."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from holdfast.checkpointer.events import (
    Event,
    EventsDropped,
    EventSource,
    RecoveryPointAged,
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveFailed,
    SaveHeld,
    SaveProtected,
    SaveReturned,
    SaveSealed,
    SaveSkipped,
    SaveStaged,
    SaveUnprotected,
    SaveUnwatched,
    StateRestored,
    StepsTimed,
)
from holdfast.telemetry.rank_saves import UNASKED


class Measure(NamedTuple):
    """A measure: its name, kind, unit and meaning. A ``duration`` is a histogram where there are such; a ``counter``
    only rises. `labels` are the names of its labels."""

    name: str
    kind: Literal["duration", "counter", "gauge"]
    unit: Literal["seconds", "bytes", ""]
    meaning: str
    labels: tuple[str, ...] = ()


BLOCKED: Final = Measure("save_blocked", "duration", "seconds", "time for which a save kept training")
STAGED: Final = Measure("save_staged", "duration", "seconds", "from the call until this rank's part is copied")
PROTECTED: Final = Measure(
    "save_protected", "duration", "seconds", "from the call until the memory of other nodes protects the checkpoint"
)
DURABLE: Final = Measure("save_durable", "duration", "seconds", "from the call until the checkpoint is durable")
SAVES: Final = Measure("saves", "counter", "", "saves by the way in which they ended", ("outcome",))
UNPROTECTED: Final = Measure(
    "saves_unprotected",
    "counter",
    "",
    "saves that are not protected as protect= asks, by the code of the error",
    ("code",),
)
DELAYS: Final = Measure("save_delays", "counter", "", "failed tries to make a checkpoint durable")
SAVED: Final = Measure("saved", "counter", "bytes", "bytes of this rank's parts of durable checkpoints")
DURABLE_STEP: Final = Measure("durable_step", "gauge", "", "step of the newest durable checkpoint")
RECOVERY_POINT: Final = Measure(
    "recovery_point_timestamp", "gauge", "seconds", "when the state of the newest durable checkpoint was taken"
)
RECOVERY_POINT_AGE: Final = Measure(
    "recovery_point_age", "gauge", "seconds", "age of the newest durable state when a save began or failed"
)
RECOVERY_POINT_STEPS: Final = Measure(
    "recovery_point_age_steps", "gauge", "", "the same in steps: those that a failure would undo"
)
MISSED: Final = Measure("saves_missed", "gauge", "", "saves in a row that made no checkpoint")
MEMORY_RECOVERY_POINT: Final = Measure(
    "memory_recovery_point_timestamp", "gauge", "seconds", "when the newest state in memory was taken"
)
RESTORE: Final = Measure("restore", "duration", "seconds", "time of a restore, by tier", ("tier",))
STEP: Final = Measure(
    "step", "gauge", "seconds", "median time of recent steps, with and without a save under way", ("saving",)
)
DROPPED: Final = Measure("events_dropped", "counter", "", "events that listeners were too slow to hear")
MEASURES: Final = (
    *(BLOCKED, STAGED, PROTECTED, DURABLE, SAVES, UNPROTECTED, DELAYS, SAVED),
    *(DURABLE_STEP, RECOVERY_POINT, RECOVERY_POINT_AGE, RECOVERY_POINT_STEPS, MISSED),
    *(MEMORY_RECOVERY_POINT, RESTORE, STEP, DROPPED),
)

_OUTCOMES: Final = {
    SaveCommitted: "committed",
    SaveHeld: "held",
    SaveSkipped: "skipped",
    SaveFailed: "failed",
    SaveUnwatched: "unwatched",
}


class Reading(NamedTuple):
    """A new value of a measure: of a duration or a gauge; for a counter, the amount by which it rises."""

    measure: Measure
    value: float
    labels: tuple[str, ...] = ()


class _Begun(NamedTuple):
    clock_s: float
    unix_s: float


class Readings:
    """Turns the events of one process into readings. It remembers when saves that are under way began."""

    def __init__(self) -> None:
        self._begun: dict[tuple[EventSource, int], _Begun] = {}
        #: The begin of saves to memory until it is known whether they are protected, which may come after their end.
        self._unclear: dict[tuple[EventSource, int], float] = {}

    def of(self, event: Event, source: EventSource) -> list[Reading]:
        """The readings that `event` gives."""
        match event:
            case SaveBegun():
                self._begun.setdefault((source, event.step), _Begun(event.at.clock_s, event.at.unix_s))
                if event.tier == "storage":  # no event tells whether such a save is protected
                    self._unclear.pop((source, event.step), None)
                else:
                    self._unclear[source, event.step] = event.at.clock_s
                return []
            case SaveProtected() | SaveUnprotected():
                return self._protected(event, source)
            case SaveReturned():
                return [Reading(BLOCKED, event.blocked_s)]
            case SaveStaged() | SaveSealed():
                return self._under_way(event, source)
            case SaveDelayed() | EventsDropped():
                return [Reading(DELAYS, 1) if isinstance(event, SaveDelayed) else Reading(DROPPED, event.number)]
            case SaveCommitted() | SaveHeld() | SaveSkipped() | SaveFailed() | SaveUnwatched():
                return [Reading(SAVES, 1, (_OUTCOMES[type(event)],)), *self._ended(event, source)]
            case _:
                return _of_job(event)

    def _under_way(self, event: SaveStaged | SaveSealed, source: EventSource) -> list[Reading]:
        begun = self._begun.get((source, event.step))
        if begun is None:
            return []
        if isinstance(event, SaveStaged):
            return [Reading(STAGED, event.at.clock_s - begun.clock_s)]
        return [Reading(MEMORY_RECOVERY_POINT, begun.unix_s)]

    def _protected(self, event: SaveProtected | SaveUnprotected, source: EventSource) -> list[Reading]:
        begun_s = self._unclear.pop((source, event.step), None)
        if isinstance(event, SaveProtected):
            return [] if begun_s is None else [Reading(PROTECTED, event.at.clock_s - begun_s)]
        return [Reading(UNPROTECTED, 1, (event.error.code,))] if event.error.code != UNASKED else []

    def _ended(
        self, event: SaveCommitted | SaveHeld | SaveSkipped | SaveFailed | SaveUnwatched, source: EventSource
    ) -> list[Reading]:
        begun = self._begun.pop((source, event.step), None)
        if isinstance(event, SaveSkipped | SaveFailed):
            self._unclear.pop((source, event.step), None)
        if isinstance(event, SaveHeld) and begun is not None:
            return [Reading(MEMORY_RECOVERY_POINT, begun.unix_s)]
        if not isinstance(event, SaveCommitted):
            return []
        found = [Reading(SAVED, event.nbytes), Reading(DURABLE_STEP, event.step)]
        if begun is not None:
            durable_s = event.at.clock_s - begun.clock_s
            found += [Reading(DURABLE, durable_s), Reading(RECOVERY_POINT, begun.unix_s)]
        return found


def _of_job(event: Event) -> list[Reading]:
    """The readings of an event that is about no single save."""
    match event:
        case RecoveryPointAged():
            steps = Reading(RECOVERY_POINT_STEPS, max(event.step - event.durable_step, 0))
            return [Reading(RECOVERY_POINT_AGE, event.age_s), steps, Reading(MISSED, event.num_missed)]
        case StepsTimed():
            quiet, saving = Reading(STEP, event.quiet_s, ("no",)), Reading(STEP, event.saving_s, ("yes",))
            return [*([quiet] if event.num_quiet else []), *([saving] if event.num_saving else [])]
        case StateRestored() if event.report.load is not None and event.report.tier is not None:
            return [Reading(RESTORE, sum(event.report.load.seconds.values()), (event.report.tier,))]
        case _:
            return []
