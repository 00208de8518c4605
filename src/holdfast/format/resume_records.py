"""Records in ``resumes/``: a job has resumed a checkpoint, and has not ended in an orderly way since.

The name of a record says everything that others must know. So one listing tells how many jobs resumed a checkpoint.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from holdfast.format.records import (
    Ordinal,
    Place,
    Record,
    Seconds,
    commit_name,
    epoch_name,
    parse_commit_name,
    parse_epoch_name,
)

RESUMES: Final = "resumes"
_NAME: Final = re.compile(r"([0-9]{10}-[0-9]{10})\.([0-9]{10})-[0-9a-f]{16}\.json")
_SUFFIX: Final = ".json"


class Resume(Record, frozen=True, kw_only=True, tag="resume"):
    """The record of a job that resumed the checkpoint at `place`, when `newest_epoch` was the newest epoch of the run.
    `holder` says who, for people."""

    place: Place
    newest_epoch: Ordinal
    created: Seconds
    holder: str


class ResumeName(NamedTuple):
    """The facts in the name of a record in ``resumes/``."""

    place: Place
    newest_epoch: int


def resume_key(resume: Resume, token: str) -> str:
    """The key of `resume`; `token` are 16 random hexadecimal digits."""
    place = commit_name(resume.place).removesuffix(_SUFFIX)
    return f"{RESUMES}/{place}.{epoch_name(resume.newest_epoch).removesuffix(_SUFFIX)}-{token}{_SUFFIX}"


def parse_resume_name(name: str) -> ResumeName | None:
    """The facts in the name of a file in ``resumes/``, or None where it is the name of no such record."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    place, epoch = parse_commit_name(match[1] + _SUFFIX), parse_epoch_name(match[2] + _SUFFIX)
    return None if place is None or epoch is None else ResumeName(place, epoch)
