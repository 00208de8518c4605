"""The messages between ranks in a save after they have agreed on a plan."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.agreement.plan_messages import Compare, Questions
from holdfast.format.records import Place


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """The checkpoint that the ranks are to write. `path` is the full path of its manifest on rank 0, and `nbytes` and
    `digest` are the manifest's.

    `plan_id` names the plan; a rank that has taken part in it before knows its share already. `diverged` are the names
    of tensors whose copies differ.
    """

    path: str
    folder: str
    checkpoint_id: str
    place: Place
    nbytes: int
    digest: str
    plan_id: str
    diverged: tuple[str, ...]


#: The messages that rank 0 may send until the plan is placed, and the one that tells its place.
ANSWERS: Final = Questions | Compare | Planned


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A rank's data file: its index (-1: the rank has none; -2: it has given it up, because another rank has failed),
    size, and digest of its digest table."""

    index: int
    nbytes: int
    digest: str


#: The message of a rank that has given up its data file, because another rank has failed.
GIVEN_UP: Final = Written(-2, 0, "")
