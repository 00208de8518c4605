"""``holdfast import``: bring a checkpoint of another system into a run."""

from __future__ import annotations

import msgspec

from holdfast.cli.screen import console, print_json, say
from holdfast.errors import printable
from holdfast.importing import import_by
from holdfast.reports import size
from holdfast.wording import count
from holdfast.workers import on_processes


class ImportDocument(msgspec.Struct, frozen=True):
    """The document that ``import --json`` prints. `kind` says what was imported, `kept` which data files an interrupted
    import had finished."""

    run: str
    place: str
    step: int
    kind: str
    num_tensors: int
    num_values: int
    nbytes: int
    kept: tuple[str, ...]
    written_nbytes: int


def import_checkpoint(
    source: str, run: str, *, step: int, as_json: bool, workers: int | None = 1, read_back: bool = False
) -> None:
    """Write the foreign checkpoint at `source` into a new run, as the checkpoint of `step`."""
    report = import_by(on_processes(workers), source, run, step, read_back=read_back, shown=not as_json)
    document = ImportDocument(
        report.path,
        report.place,
        report.step,
        report.kind,
        report.num_tensors,
        report.num_values,
        report.nbytes,
        report.kept,
        report.written_nbytes,
    )
    if as_json:
        print_json(document)
        return
    say(console(), f"{printable(document.run)}: step {step} at {document.place} is what {printable(source)} holds")
    what = f"{count(document.num_tensors, 'tensor')}, {size(document.nbytes)}"
    say(console(), f"  {document.kind}: {what}; it has no digests, so its bytes were not verified")
    if document.kept:
        say(console(), f"  {count(len(document.kept), 'file')} had been written before")
