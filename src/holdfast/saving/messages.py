"""What ranks tell each other in a save, once they have agreed on a plan."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.agreement.messages import Compare, Questions
from holdfast.format.records import Place


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """Which checkpoint is being written: the full `path` of its manifest on rank 0, and its digest.

    `plan_id` names the plan; a rank that has taken part in it before knows its share already. `diverged` are the names
    of tensors whose copies were found to differ.
    """

    path: str
    folder: str
    checkpoint_id: str
    place: Place
    nbytes: int
    digest: str
    plan_id: str
    diverged: tuple[str, ...]


#: What rank 0 sends until the plan is placed.
ANSWERS: Final = Questions | Compare | Planned


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A rank's data file: its index (-1: the rank has none), size, and digest of its digest table."""

    index: int
    nbytes: int
    digest: str
