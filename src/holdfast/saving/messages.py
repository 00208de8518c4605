"""The messages between ranks in a save after they have agreed on a plan."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.agreement.plan_messages import Compare, Questions
from holdfast.format.manifest import Candidate
from holdfast.format.records import FileSeal, Place


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """The checkpoint that the ranks are to write. `path` is the full path of its manifest on rank 0, and `nbytes` and
    `digest` are the manifest's.

    `plan_id` names the plan; a rank that has taken part in it before knows its share already. `diverged` are the names
    of tensors whose copies differ, and `references` the candidates of still files.
    """

    path: str
    folder: str
    checkpoint_id: str
    place: Place
    nbytes: int
    digest: str
    plan_id: str
    diverged: tuple[str, ...]
    references: tuple[Candidate, ...]


#: The messages that rank 0 may send until the plan is placed, and the one that tells its place.
ANSWERS: Final = Questions | Compare | Planned


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The entries of the seal for a rank's data files."""

    files: tuple[FileSeal, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that the rank wrote."""
        return sum(file.nbytes for file in self.files if not file.is_referenced)

    @property
    def referenced_nbytes(self) -> int:
        """The bytes that the rank did not write, because an earlier checkpoint has them."""
        return sum(file.nbytes for file in self.files if file.is_referenced)


#: The message of a rank that has given up its data files, because another rank has failed.
GIVEN_UP: Final = Written(())
