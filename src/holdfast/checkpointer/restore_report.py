"""The report of a restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.reports import LoadReport

#: Where a checkpoint was read from, or a save goes.
Tier = Literal["node memory", "storage"]


@dataclass(frozen=True, repr=False)
class RestoreReport:
    """What was restored: `step` (None: there was nothing yet), at `place`, from `tier` ("node memory" or "storage").

    ``next_step`` is where the loop goes on. `load` says the rest.
    """

    step: int | None
    place: str | None
    tier: Tier | None
    load: LoadReport | None

    @property
    def next_step(self) -> int:
        """The step after the one that was restored; 0 where there was none."""
        return 0 if self.step is None else self.step + 1

    def __repr__(self) -> str:
        if self.load is None:
            return "<RestoreReport: there was nothing to restore; the next step is 0>"
        return f"<RestoreReport from {self.tier}: {self.load!r}>"
