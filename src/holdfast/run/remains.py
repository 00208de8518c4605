"""Folders in ``checkpoints/`` without a visible checkpoint: what may be deleted of each, and its deletion.

Policies (`holdfast.run.retention`) and ``holdfast gc`` (`holdfast.run.garbage`) delete them in the same way. Each
deletion begins with a new look at the folder, and is one of `holdfast.run.removal`: a process may be killed anywhere in
it, and anybody may go on with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from holdfast.errors import ConfigurationError
from holdfast.format.records import CHECKPOINTS, Place, parse_folder
from holdfast.run.history import Run
from holdfast.run.holds import is_held
from holdfast.run.removal import abandon, remove_place
from holdfast.run.uncommitted import RunRecords, Uncommitted

#: ``half_removed``: an older deletion has left files, because it was interrupted or a reader used them. ``cut_off``: a
#: save that was cut off has left its parts. ``needed``: an older deletion has left the still files that other
#: checkpoints refer to. ``kept``: nobody may delete the folder without looking at it.
Fate = Literal["half_removed", "cut_off", "needed", "kept"]


class Remnant(NamedTuple):
    """A folder without a visible checkpoint. `place` must be hidden before its files are deleted, if there is one.
    Where the folder stays, `kind` is a stable word for the `reason`, which is a clause."""

    folder: str
    fate: Fate
    place: Place | None = None
    kind: str = ""
    reason: str = ""


def remnants(run: Run, *, epoch: int, grace_s: float = 0.0) -> Iterator[Remnant]:
    """Find the folders without a visible checkpoint, while `epoch` is the newest epoch. Changes nothing."""
    known = RunRecords.of(run)
    for folder in run.storage.list(CHECKPOINTS):
        found = remnant(run, known, folder, epoch=epoch, grace_s=grace_s)
        if found is not None:
            yield found


def remnant(run: Run, known: RunRecords, folder: str, *, epoch: int, grace_s: float = 0.0) -> Remnant | None:
    """Look at one folder. None where it is that of a visible checkpoint, or has nothing that takes space."""
    if parse_folder(folder) is None or known.is_committed(folder):
        return None
    there = Uncommitted(run, known, folder)
    if there.is_empty:
        return None
    if there.is_kept_for_others:
        return Remnant(folder, "needed", kind="referenced", reason="other checkpoints refer to its still files")
    if there.is_half_removed:
        return Remnant(folder, "half_removed", there.place_to_hide())
    objection = there.objection(epoch, grace_s=grace_s)
    return Remnant(folder, "cut_off") if objection is None else Remnant(folder, "kept", None, *objection)


def delete_remnant(run: Run, found: Remnant) -> bool | None:
    """Delete the files of a folder that is ``half_removed`` or ``cut_off``; durable on return.

    Returns False where still files stay for other checkpoints, and None where somebody needs all files.
    """
    try:
        if found.place is not None:
            return remove_place(run, found.place, found.folder)
        abandon(run, found.folder)
    except ConfigurationError as error:
        if not is_held(error):
            raise
        return None
    return True
