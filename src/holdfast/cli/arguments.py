"""Exit codes, arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

#: Exit codes: a finding (damage, a difference, a crash's leftover), wrong usage, a failure or refusal, a Ctrl-C.
FINDING = 1
USAGE = 2
FAILURE = 3
INTERRUPTED = 130

PATH_HELP = (
    "A run (its head), RUN@step=700, RUN@3.12 (epoch 3, number 12), or a checkpoint folder. RUN is a folder or a URL, "
    "such as s3://bucket/runs/a."
)

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The folder of a run, or its URL, such as s3://bucket/runs/a.")
]
PathArgument = Annotated[str, typer.Argument(metavar="PATH", help=PATH_HELP)]
CheckpointsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN@PLACE...", help="Checkpoints of runs: RUN@3.12, or RUN@step=700.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Processes that write; 1 is this one. Default: what pays."),
]
ReadBackOption = Annotated[bool, typer.Option("--read-back", help="Read each new file again, and compare its digest.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
EventsOption = Annotated[
    str, typer.Option("--events", metavar="FOLDER", help="The recorded events. Default: RUN.events, beside the run.")
]
