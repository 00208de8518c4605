"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Rounds = Annotated[int, typer.Option(help="Rounds; in each, every contender takes its turn once.")]
World = Annotated[int, typer.Option(help="Ranks.")]
Gib = Annotated[float, typer.Option(help="Size of the state over all ranks, at least.")]
Contenders = Annotated[
    list[str] | None, typer.Option("--contender", help="Only this contender beside the raw limit; repeatable.")
]
Folder = Annotated[Path, typer.Option("--dir", exists=True, file_okay=False, help="A folder on the device to measure.")]
Name = Annotated[str, typer.Option(help="Name of the result file.")]
Results = Annotated[Path, typer.Option(help="Folder of the result file.")]
