"""``holdfast compact``: make checkpoints independent of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.cli.screen import console, print_json, say
from holdfast.errors import printable
from holdfast.reports import size
from holdfast.run.by_path import CommittedAt, checkpoint_at
from holdfast.run.compaction import compact_checkpoint


class CompactedRow(msgspec.Struct, frozen=True):
    """One checkpoint, and the bytes that were copied into its folder."""

    run: str
    place: str
    step: int
    copied_nbytes: int


class CompactDocument(msgspec.Struct, frozen=True):
    """The document that ``compact --json`` prints."""

    checkpoints: list[CompactedRow]


def compact(paths: Sequence[str], *, as_json: bool) -> None:
    """Make checkpoints self-contained. Changes nothing unless all of `paths` name checkpoints."""
    found = [checkpoint_at(path) for path in paths]
    rows = [_compacted(each, quiet=as_json) for each in found]
    if as_json:
        print_json(CompactDocument(rows))


def _compacted(at: CommittedAt, *, quiet: bool) -> CompactedRow:
    copied = compact_checkpoint(at.run, at.commit)
    if not quiet:
        what = f"{size(copied)} copied; it needs" if copied else "it needed"
        name = f"{printable(at.run.storage.location.url)}: step {at.commit.step} at {at.commit.place}"
        say(console(), f"{name}: {what} no earlier checkpoint")
    return CompactedRow(at.run.storage.location.url, str(at.commit.place), at.commit.step, copied)
