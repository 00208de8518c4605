"""A warning before the disk of a run is full: how many more saves fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from holdfast.checkpointer.save_errors import by_hand
from holdfast.policy.forecast import HORIZON, saves_that_fit
from holdfast.policy.keep import CheckpointFacts, KeepPolicy
from holdfast.store.base import Location
from holdfast.wording import count

_log = logging.getLogger(__name__)


class SpaceForecast:
    """Logs one warning when the disk of the run will soon be full.

    It looks at the disk when a loop starts, and after each commit. An object store has no size, so it never warns about
    one.
    """

    def __init__(self, policy: KeepPolicy | None, run: Callable[[], Location]) -> None:
        self._policy = policy
        self._run = run
        self._has_warned = False

    @property
    def is_due(self) -> bool:
        """Whether a further look may tell something."""
        return not self._has_warned and self._run().folder is not None

    def free_nbytes(self) -> int | None:
        """The free space of the disk now; None where nobody says, or where no further look is due. Ask before looking
        for the checkpoints of the run: then no checkpoint takes space that is not in their list."""
        folder = self._run().folder
        if self._has_warned or folder is None:
            return None
        space = os.statvfs(folder)
        return space.f_bavail * space.f_frsize if space.f_blocks else None

    def look(self, free: int | None, lineage: Sequence[CheckpointFacts], *, is_saving: bool) -> None:
        """Warn if fewer than `HORIZON` further saves fit into the `free` space. `lineage` are the checkpoints that
        stay, newest first. With `is_saving`, a save may have taken its space before `free` was asked for."""
        if free is None or not lineage:
            return
        free += lineage[0].coming_nbytes if is_saving else 0
        number = saves_that_fit(free, lineage, self._policy)
        if number is None:
            return
        self._has_warned = True
        _log.warning("%s", self._text(number, free, lineage))

    def _text(self, number: int, free: int, lineage: Sequence[CheckpointFacts]) -> str:
        url = self._run().url
        after = f"will be full after {count(number, 'more save')}" if number else "has no room for the next save"
        if self._policy is None:
            kept = "The Checkpointer has no `keep`, so it deletes no older checkpoint."
        else:
            bare = saves_that_fit(free, lineage, None)
            without = f"{HORIZON} or more" if bare is None else f"{bare:,}"
            kept = f"This counts the deletions of keep={self._policy!r}; without them it would be {without}."
        return (
            f"the disk of '{url}' {after}: a checkpoint takes {lineage[0].coming_nbytes:,} bytes, and {free:,} bytes "
            f"are free. {kept} {by_hand(url)}"
        )
