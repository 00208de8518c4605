"""``holdfast cp``: copy a run, or one checkpoint of it, to another place."""

from __future__ import annotations

import msgspec

from holdfast.cli.screen import console, print_json, say
from holdfast.copying import copy_by
from holdfast.errors import printable
from holdfast.reports import CopyReport, size
from holdfast.wording import count


class CopyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document that ``cp --json`` prints: the fields of `CopyReport`, with null for a head that there is not."""

    source: str
    path: str
    head: str | None
    step: int | None
    copied: tuple[str, ...]
    present: tuple[str, ...]
    vanished: tuple[str, ...]
    removed: tuple[str, ...]
    damaged: tuple[str, ...]
    num_kept: int
    written_nbytes: int
    seconds: float


def cp(src: str, dst: str, *, skip_damaged: bool, read_back: bool, as_json: bool) -> bool:
    """Copy the run or checkpoint `src` into the run `dst`, and print a report. Returns False where a damaged checkpoint
    was left out."""
    report = copy_by(src, dst, read_back=read_back, skip_damaged=skip_damaged, shown=not as_json)
    if as_json:
        print_json(CopyDocument(**vars(report) | {"head": report.head or None}))
    else:
        _show(report)
    return not report.damaged


def _of_these(present: tuple[str, ...]) -> str:
    """The checkpoints that were to be copied and were there already."""
    return f"{count(len(present), 'checkpoint')} of the source" if len(present) > 1 else f"checkpoint {present[0]}"


def _show(report: CopyReport) -> None:
    screen = console()
    what = f"copied {count(len(report.copied), 'checkpoint')}, {size(report.written_nbytes)}"
    if report.written_nbytes and not report.copied:
        what = f"brought back {size(report.written_nbytes)} that the copy had lost"
    say(screen, f"{what} in {report.seconds:.1f} s; every byte verified")
    where = printable(report.path)
    head = f"its head is step {report.step} at {report.head}" if report.head else "it has no head"
    there = f"; it had {_of_these(report.present)} before" if report.present else ""
    say(screen, f"{where}: {head}{there}")
    if report.num_kept:
        say(screen, f"  {count(report.num_kept, 'file')} had been written before")
    for places, why in (
        (report.vanished, "deleted from the source before its turn"),
        (report.removed, "not copied, because it was removed in the copy, or left out of an earlier one"),
        (report.damaged, "not copied, because it is damaged; see holdfast verify --deep"),
    ):
        for place in places:
            say(screen, f"  {place}: {why}")
