"""``holdfast release``: take checkpoints out of quarantine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.cli.screen import console, print_json, say
from holdfast.errors import printable
from holdfast.run.by_path import CommittedAt, checkpoint_at
from holdfast.run.quarantine import lift


class ReleasedRow(msgspec.Struct, frozen=True):
    """One checkpoint. `changed` says whether it was in quarantine."""

    run: str
    place: str
    step: int
    changed: bool


class ReleaseDocument(msgspec.Struct, frozen=True):
    """The document that ``release --json`` prints."""

    checkpoints: list[ReleasedRow]


def release(paths: Sequence[str], *, as_json: bool) -> None:
    """Take checkpoints out of quarantine. Changes nothing unless all of `paths` name checkpoints."""
    found = [checkpoint_at(path) for path in paths]
    rows = [_row(each, changed=lift(each.run.storage, each.commit.place)) for each in found]
    if as_json:
        print_json(ReleaseDocument(rows))
        return
    for row in rows:
        what = "is out of quarantine; nothing was read" if row.changed else "was not in quarantine"
        say(console(), f"{printable(row.run)}: step {row.step} at {row.place} {what}")


def _row(at: CommittedAt, *, changed: bool) -> ReleasedRow:
    return ReleasedRow(at.run.storage.location.url, str(at.commit.place), at.commit.step, changed)
