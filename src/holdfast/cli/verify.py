"""``holdfast verify``: is every byte what was written?"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast.cli.screen import print_json, size
from holdfast.errors import CorruptError
from holdfast.run.checkpoint import Checkpoint
from holdfast.run.history import resolve
from holdfast.run.paths import parse
from holdfast.run.verify import Finding, verify_checkpoint


class Report(msgspec.Struct, frozen=True):
    """What was verified and what was found."""

    path: str
    place: str
    step: int
    nbytes: int
    num_tensors: int
    num_files: int
    seconds: float
    findings: list[Finding]


def verify(
    path: Annotated[str, typer.Argument(help="A run (its head), RUN@step=700, RUN@3.12, or a checkpoint folder.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Read a whole checkpoint and check every byte against the digests that were sealed."""
    start = time.monotonic()
    try:
        checkpoint = Checkpoint(resolve(parse(path)))
    except CorruptError as error:
        _tell(None, [Finding(error.code, error.path or path, error.message)], as_json=as_json)
        raise typer.Exit(1) from None
    nbytes = sum(file.nbytes for file in checkpoint.seal.files)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress:
        task = progress.add_task("verify", total=nbytes)
        findings = verify_checkpoint(checkpoint, progress=lambda count: progress.advance(task, count))
    report = Report(
        path=checkpoint.folder,
        place=str(checkpoint.seal.place),
        step=checkpoint.seal.step,
        nbytes=nbytes,
        num_tensors=len(checkpoint.manifest.body.names),
        num_files=len(checkpoint.seal.files),
        seconds=time.monotonic() - start,
        findings=findings,
    )
    _tell(report, findings, as_json=as_json)
    if findings:
        raise typer.Exit(1)


def _tell(report: Report | None, findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print_json(report if report is not None else {"findings": findings})
        return
    console = Console()
    for finding in findings:
        console.print(f"[bold red]damaged[/] [dim]{finding.code}[/] {finding.message}", soft_wrap=True)
    if report is not None and not findings:
        console.print(
            f"[bold green]sound[/] step {report.step}, place {report.place}: {report.num_tensors} tensors, "
            f"{size(report.nbytes)} in {report.num_files} files, every block verified in {report.seconds:.1f} s",
            soft_wrap=True,
        )
