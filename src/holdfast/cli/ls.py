"""``holdfast ls``: the checkpoints of a run."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.screen import print_json, size, when
from holdfast.format.records import Commit, Diverged
from holdfast.run.history import Run
from holdfast.run.paths import parse, storage_at


class Row(msgspec.Struct, frozen=True):
    """One checkpoint in the list."""

    place: str
    step: int
    created: float
    nbytes: int
    head: bool
    folder: str
    metrics: dict[str, str | float]
    diverged: Diverged


def ls(
    run: Annotated[str, typer.Argument(help="A run.", metavar="RUN")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the checkpoints of a run that lead to its head, newest first."""
    storage = storage_at(parse(run).root)
    rows = [_row(commit, head=number == 0) for number, commit in enumerate(Run.open(storage).lineage())]
    if as_json:
        print_json(rows)
        return
    console = Console()
    if not rows:
        console.print(f"{storage.uri}: no checkpoint has been committed yet.")
        return
    table = Table(title=storage.uri, title_justify="left", box=None, header_style="bold")
    marked = ("diverged",) if any(row.diverged.num_tensors for row in rows) else ()
    for name in ("", "place", "step", "saved", "size", "metrics", *marked):
        table.add_column(name, justify="right" if name in ("step", "size") else "left", overflow="fold")
    for row in rows:
        metrics = " ".join(f"{name}={float(value):.4g}" for name, value in row.metrics.items())
        head = "head" if row.head else ""
        diverged = [Text(_names(row.diverged))] if marked else []
        table.add_row(head, row.place, str(row.step), when(row.created), size(row.nbytes), metrics, *diverged)
    console.print(table)


def _names(diverged: Diverged) -> str:
    """The tensors of which a save stored one of several different copies, in few words."""
    rest = diverged.num_tensors - 1
    return "".join(diverged.names[:1]) + (f" and {rest} more" if rest > 0 else "")


def _row(commit: Commit, *, head: bool) -> Row:
    return Row(
        place=str(commit.place),
        step=commit.step,
        created=commit.created,
        nbytes=commit.nbytes,
        head=head,
        folder=commit.checkpoint,
        metrics=dict(commit.metrics),
        diverged=commit.diverged,
    )
