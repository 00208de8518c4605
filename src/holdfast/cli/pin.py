"""``holdfast pin`` and ``holdfast unpin``: keep checkpoints from being deleted, and no longer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.cli.screen import console, print_json, say
from holdfast.errors import printable
from holdfast.run.by_path import CommittedAt, checkpoint_at
from holdfast.run.paths import parse
from holdfast.run.pins import pin_checkpoint, unpin_checkpoint


class PinRow(msgspec.Struct, frozen=True):
    """One checkpoint. `changed` says whether the command changed anything; `by_run` that the path named the run alone,
    which stands for its head."""

    run: str
    place: str
    step: int
    by_run: bool
    pinned: bool
    changed: bool


class PinDocument(msgspec.Struct, frozen=True):
    """The document that ``pin --json`` and ``unpin --json`` print."""

    checkpoints: list[PinRow]


def pin(paths: Sequence[str], *, as_json: bool) -> None:
    """Pin checkpoints. Changes nothing unless all of `paths` name checkpoints."""
    found = [(path, checkpoint_at(path)) for path in paths]
    rows = [_row(path, each, pinned=True, changed=pin_checkpoint(*each)) for path, each in found]
    _tell(rows, as_json=as_json)


def unpin(paths: Sequence[str], *, as_json: bool) -> None:
    """Take back pins. Changes nothing unless all of `paths` name checkpoints."""
    found = [(path, checkpoint_at(path)) for path in paths]
    changed = [unpin_checkpoint(each.run, each.commit.place) for _, each in found]
    rows = [_row(path, each, pinned=False, changed=was) for (path, each), was in zip(found, changed, strict=True)]
    _tell(rows, as_json=as_json)


def _row(path: str, at: CommittedAt, *, pinned: bool, changed: bool) -> PinRow:
    target, commit = parse(path), at.commit
    by_run = target.step is None and target.place is None
    return PinRow(at.run.storage.location.url, str(commit.place), commit.step, by_run, pinned, changed)


def _tell(rows: list[PinRow], *, as_json: bool) -> None:
    if as_json:
        print_json(PinDocument(rows))
        return
    for row in rows:
        if row.changed:
            what = "is pinned" if row.pinned else "is not pinned any more"
        else:
            what = "was pinned already" if row.pinned else "was not pinned"
        head = ", the head now, " if row.by_run else " "
        say(console(), f"{printable(row.run)}: step {row.step} at {row.place}{head}{what}")
    if any(row.by_run and row.pinned for row in rows):
        say(console(), "Later checkpoints of the run are not pinned with it; RUN@PLACE names another one.")
