"""Records in ``references/``: a checkpoint may need still files of an earlier one.

As in ``pins/``, the name of a record says everything that others must know, so one listing tells all that is needed.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from holdfast.format.records import Place, Record, Seconds, commit_name, parse_commit_name, parse_folder

REFERENCES: Final = "references"
_SUFFIX: Final = ".json"
_NAME: Final = re.compile(r"([0-9]{10}-[0-9]{10})\.(step-[0-9]+-[0-9a-f]{16})\.(step-[0-9]+-[0-9a-f]{16})\.json")


class Reference(Record, frozen=True, kw_only=True, tag="reference"):
    """The record that the checkpoint in the folder `checkpoint`, at `place`, may need the still files in the folder
    `holder`."""

    place: Place
    checkpoint: str
    holder: str
    created: Seconds


class ReferenceName(NamedTuple):
    """The facts in the name of a record, as in `Reference`."""

    place: Place
    checkpoint: str
    holder: str

    @property
    def key(self) -> str:
        """The key of the record."""
        place = commit_name(self.place).removesuffix(_SUFFIX)
        return f"{REFERENCES}/{place}.{self.checkpoint}.{self.holder}{_SUFFIX}"


def parse_reference_name(name: str) -> ReferenceName | None:
    """The facts in the name of a file in ``references/``, or None where it is the name of no such record."""
    match = _NAME.fullmatch(name)
    place = None if match is None else parse_commit_name(match[1] + _SUFFIX)
    if match is None or place is None or any(parse_folder(folder) is None for folder in match.groups()[1:]):
        return None
    return ReferenceName(place, match[2], match[3])
