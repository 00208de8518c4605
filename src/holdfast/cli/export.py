"""``holdfast export``: write a checkpoint for another system."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.cli.amounts import bytes_in
from holdfast.cli.option_files import rules_in
from holdfast.cli.screen import console, print_json, say
from holdfast.errors import ConfigurationError, printable
from holdfast.exporting import export_by
from holdfast.reports import ExportReport, size
from holdfast.wording import count
from holdfast.workers import on_processes


class ExportOptions(NamedTuple):
    """The options of the command, as the user wrote them; "" for those that are left out. `workers` is None for as many
    processes as pay."""

    to: str
    select: tuple[str, ...]
    mapping: str
    dtype: str
    shard_size: str
    config: str
    adapter: str
    workers: int | None
    read_back: bool


class ExportDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document that ``--json`` prints: the fields of `ExportReport`."""

    step: int
    place: str
    path: str
    to: str
    num_tensors: int
    num_values: int
    files: tuple[str, ...]
    kept: tuple[str, ...]
    written_nbytes: int
    read_nbytes: int
    verified: bool
    seconds: float


def export(path: str, dst: str, options: ExportOptions, *, as_json: bool) -> None:
    """Export the checkpoint at `path` into the new folder `dst`, and print a report."""
    shard_nbytes = bytes_in(options.shard_size)
    if not shard_nbytes:
        raise _invalid(f"--shard-size {options.shard_size} is no size.", "Write it as 5GB or 512MiB.")
    rules = rules_in(options.mapping)
    try:
        report = export_by(
            on_processes(options.workers),
            path,
            dst,
            options.to,
            select=options.select or None,
            mapping=rules or None,
            dtype=options.dtype or None,
            shard_nbytes=shard_nbytes,
            config=options.config or None,
            adapter=options.adapter or None,
            read_back=options.read_back,
            shown=not as_json,
        )
    except ValueError as error:  # a dtype or a glob that is wrong by itself
        raise _invalid(f"{error}.", "Correct the option.") from error
    if as_json:
        print_json(ExportDocument(**vars(report)))
    else:
        _show(report)


def _invalid(problem: str, action: str) -> ConfigurationError:
    return ConfigurationError(problem, code="config.export", action=action)


def _show(report: ExportReport) -> None:
    screen = console()
    say(screen, report.summary)
    files = count(len(report.files), "file")
    read = f"read {size(report.read_nbytes)}" + (", all of it verified" if report.verified else ", without digests")
    say(screen, f"{files} with tensors in {printable(report.path)}; {read}")
    if report.kept:
        say(screen, f"{count(len(report.kept), 'file')} had been written before")
