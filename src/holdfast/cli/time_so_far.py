"""The ledger of time as ``holdfast top`` shows it: the shares of the time so far."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from holdfast.cli.recorded import events_in
from holdfast.cli.screen import Listing
from holdfast.run.history import Run
from holdfast.telemetry.goodput_ledger import Part, RunLedger, goodput_ledger
from holdfast.wording import count, duration

#: The columns, and the parts that each of them sums up.
_COLUMNS: Final = {
    "goodput": (Part.GOODPUT,),
    "provisional": (Part.PROVISIONAL,),
    "wasted": (Part.WASTED,),
    "saves": (Part.SAVE, Part.SLOW_DOWN),
    "restores": (Part.RESTORE,),
    "recovery": (Part.RECOVERY,),
    "start": (Part.START,),
    "other": (Part.OTHER,),
}
#: A ledger of many jobs takes a second. The next one waits so many times as long as the last one took.
_PATIENCE: Final = 20.0


class TimeSoFar:
    """The ledger of time of all jobs on `run`, from the events of their first rank in `folder`, and from the commits of
    the run. It is made anew as often as it costs a small share of the time."""

    def __init__(self, run: Run, folder: Path | None) -> None:
        self._run = run
        self._folder = folder
        self._ledger = RunLedger([])
        self._is_cut = False
        self._next_s = 0.0

    def shown(self) -> Iterator[RenderableType]:
        """The ledger as it is now; nothing where no time is known."""
        begun_s = time.perf_counter()
        if begun_s >= self._next_s:
            self._look()
            ended_s = time.perf_counter()
            self._next_s = ended_s + _PATIENCE * (ended_s - begun_s)
        if self._ledger.wall_s:
            yield self._about()
            yield _table(self._ledger)

    def _look(self) -> None:
        recorded = events_in(self._folder, of_first_rank_only=True)
        committed: Collection[str] = {str(place) for place in self._run.places()}
        self._ledger = goodput_ledger(recorded.records, committed)
        self._is_cut = recorded.num_cut > 0

    def _about(self) -> Text:
        jobs = count(len(self._ledger.jobs), "job")
        disruptions = count(self._ledger.num_disruptions, "disruption")
        cut = ", as far as its events were read" if self._is_cut else ""
        return Text(f"time so far: {duration(self._ledger.wall_s)} in {jobs}, with {disruptions}{cut}")


def _table(ledger: RunLedger) -> Listing:
    made = Listing(*_COLUMNS, right=tuple(_COLUMNS))
    seconds = ledger.seconds
    shares = (sum(seconds[part] for part in parts) / ledger.wall_s for parts in _COLUMNS.values())
    made.add_row(*(f"{100 * share:.1f} %" for share in shares))
    return made
