"""A trace of saves and restores in the JSON form of Chrome, which Perfetto opens (https://ui.perfetto.dev)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from holdfast.telemetry.rank_saves import JobEvents, PhaseSpan, RankSave

#: The track of the thread that trains; the tracks of saves in the background follow.
_TRAINING: Final = 1

Argument = str | int | float


class TraceEvent(msgspec.Struct, frozen=True):
    """One event of a trace. `ph` is its kind: ``X`` has a duration, ``i`` has none, ``M`` names a track. Times are in
    microseconds; `pid` is the rank, `tid` the track."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: int = 0
    dur: int = 0
    cat: str = ""
    args: dict[str, Argument] = {}


class Trace(msgspec.Struct, frozen=True, rename="camel"):
    """The document of a trace."""

    trace_events: list[TraceEvent]
    display_time_unit: str = "ms"


def trace_of(job: JobEvents) -> Trace:
    """The trace of all saves and restores, for each rank and phase. It begins at 0 with the first of them."""
    begins = [*(each.begun_s for each in job.saves), *(each.begun_s for each in job.restores)]
    return Trace(list(_Tracks(min(begins, default=0.0)).events(job)))


class _Tracks:
    """The tracks of all ranks. Saves of a rank that overlap have different tracks, because events of one track nest."""

    def __init__(self, begun_s: float) -> None:
        self._begun_s = begun_s
        #: For each rank, the time until which each of its tracks for saves is taken.
        self._taken: dict[int, list[float]] = {}
        self._hosts: dict[int, str] = {}

    def events(self, job: JobEvents) -> Iterator[TraceEvent]:
        """All events."""
        for restore in job.restores:
            self._hosts[restore.rank] = restore.host
            about: dict[str, Argument] = {"place": restore.place, "tier": restore.tier, "nbytes": restore.nbytes}
            name = "nothing to restore" if restore.step is None else f"restore of step {restore.step}"
            yield from self._nested(name, restore.rank, _TRAINING, restore.spans, about, restore.begun_s)
        for save in job.saves:
            self._hosts[save.rank] = save.host
            yield from self._save(save)
        for rank, host in sorted(self._hosts.items()):
            yield TraceEvent("process_name", "M", rank, 0, args={"name": f"rank {rank} on {host}"})
            yield TraceEvent("process_sort_index", "M", rank, 0, args={"sort_index": rank})
            yield TraceEvent("thread_name", "M", rank, _TRAINING, args={"name": "training"})
            for number in range(len(self._taken.get(rank, ()))):
                yield TraceEvent("thread_name", "M", rank, _TRAINING + 1 + number, args={"name": "background saves"})

    def _save(self, save: RankSave) -> Iterator[TraceEvent]:
        about: dict[str, Argument] = {
            "place": save.place,
            "tier": save.tier,
            "nbytes": save.nbytes,
            "outcome": save.outcome,
            "delays": save.num_delays,
        }
        if save.unprotected:
            about["unprotected"] = save.unprotected
        if save.blocked is not None:
            yield self._event(f"save of step {save.step}", save.rank, _TRAINING, save.blocked, about, cat="blocked")
        name = f"step {save.step}" if save.outcome == "committed" else f"step {save.step}: {save.outcome}"
        track = self._track(save)
        yield from self._nested(name, save.rank, track, save.spans, about, save.begun_s)
        if save.protected_at_s is not None:
            at = round(1e6 * (save.protected_at_s - self._begun_s))
            yield TraceEvent(f"step {save.step} is protected", "i", save.rank, track, at, cat="protection")

    def _track(self, save: RankSave) -> int:
        """The first track that is free while `save` lasts."""
        taken = self._taken.setdefault(save.rank, [])
        ends = max((span.begun_s + span.seconds for span in save.spans), default=save.begun_s)
        begins = min((span.begun_s for span in save.spans), default=save.begun_s)
        number = next((at for at, until in enumerate(taken) if until <= begins), len(taken))
        if number == len(taken):
            taken.append(ends)
        taken[number] = ends
        return _TRAINING + 1 + number

    def _nested(
        self, name: str, rank: int, track: int, spans: list[PhaseSpan], about: dict[str, Argument], begun_s: float
    ) -> Iterator[TraceEvent]:
        """The whole, and its phases in it."""
        begins = min((span.begun_s for span in spans), default=begun_s)
        ends = max((span.begun_s + span.seconds for span in spans), default=begun_s)
        yield self._event(name, rank, track, PhaseSpan(name, begins, ends - begins), about, cat="whole")
        for span in spans:
            yield self._event(span.phase, rank, track, span, {}, cat="phase")

    def _event(
        self, name: str, rank: int, track: int, span: PhaseSpan, about: dict[str, Argument], *, cat: str
    ) -> TraceEvent:
        # Both ends are rounded, so that what follows each other, or nests, still does.
        begun, ended = (round(1e6 * (at_s - self._begun_s)) for at_s in (span.begun_s, span.begun_s + span.seconds))
        return TraceEvent(name, "X", rank, track, begun, ended - begun, cat, about)
