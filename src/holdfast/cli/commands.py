"""The commands and their options, as users see them. Each command imports its own module when it runs."""

from __future__ import annotations

import math
from typing import Annotated

import typer

#: Exit codes: a finding (damage, a difference, something to repair), wrong usage, a failure or refusal, a Ctrl-C.
FINDING = 1
USAGE = 2
FAILURE = 3
INTERRUPTED = 130

#: Most ranks of a plan: no job has more, and a plan of so many takes much memory and minutes.
_MAX_RANKS = 1 << 20

_PATH_HELP = "A run (its head), RUN@step=700, RUN@3.12 (epoch 3, number 12), or a checkpoint folder."

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]
PathArgument = Annotated[str, typer.Argument(metavar="PATH", help=_PATH_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def _seconds(value: float) -> float:
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is no number of seconds.")
    return value


NamesOption = Annotated[str, typer.Option("--names", metavar="GLOB", help="Only names that match, such as 'model/*'.")]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help without frames, which starts sooner
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"holdfast {version('holdfast')}")
        raise typer.Exit


@app.callback()
def holdfast(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at, check and repair checkpoints. Exit codes: 0 fine, 1 a finding, 2 wrong usage, 3 failure."""


@app.command()
def ls(run: RunArgument, *, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run. First what leads to its head, then what was abandoned."""
    from holdfast.cli.ls import ls

    if not ls(run, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def show(
    path: PathArgument,
    *,
    values: Annotated[bool, typer.Option("--values", help="Values too, and not only tensors.")] = False,
    names: NamesOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds. A tree of its tensors, or every tensor of the names asked for."""
    from holdfast.cli.show import show

    show(path, values=values, names=names, as_json=as_json)


@app.command()
def verify(
    path: PathArgument,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read all data and check every block's digest.")] = False,
    every: Annotated[bool, typer.Option("--all", help="All committed checkpoints of the run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that a checkpoint is what was sealed. Its files, sizes, headers and values; with --deep every byte."""
    from holdfast.cli.verify import verify

    if not verify(path, deep=deep, every=every, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_PATH_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    *,
    stat: Annotated[bool, typer.Option("--stat", help="Only how much differs, not what.")] = False,
    names: NamesOption = "",
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints, however they are divided. Names, shapes, dtypes, values, and every element."""
    from holdfast.cli.diff import diff

    if not diff(a, b, stat=stat, names=names, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def plan(
    path: PathArgument,
    *,
    on: Annotated[int, typer.Option("--on", metavar="N", min=1, max=_MAX_RANKS, help="How many ranks load.")],
    layout: Annotated[
        str, typer.Option("--layout", metavar="FILE", help="Layout rules (TOML); without, FSDP: axis 0 over all ranks.")
    ] = "",
    mapping: Annotated[str, typer.Option("--mapping", metavar="FILE", help="Rules of a mapping (TOML).")] = "",
    select: Annotated[
        list[str] | None, typer.Option("--select", metavar="GLOB", help="Only what matches; may be repeated.")
    ] = None,
    cast: Annotated[
        list[str] | None, typer.Option("--cast", metavar="GLOB", help="What may be cast; may be repeated.")
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes", metavar="N", min=0, max=_MAX_RANKS, help="How many nodes they are on; 0: one per 8 ranks."
        ),
    ] = 0,
    storage: Annotated[
        str, typer.Option("--storage", metavar="RATE", help="What a node reads at most, such as 10GB/s.")
    ] = "",
    all_storage: Annotated[
        str, typer.Option("--all-storage", metavar="RATE", help="What all nodes together read at most.")
    ] = "",
    network: Annotated[
        str, typer.Option("--network", metavar="RATE", help="What a node receives from others, such as 400Gbit/s.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Say what a load on other ranks would do. Names, bytes per rank, reads per file, seconds; reads no tensor."""
    from holdfast.cli.plan import plan

    if not plan(
        path,
        on=on,
        layout=layout,
        mapping=mapping,
        select=select or (),
        cast=cast or (),
        nodes=nodes,
        bandwidths=(storage, all_storage, network),
        as_json=as_json,
    ):
        raise typer.Exit(FINDING)


@app.command()
def doctor(
    run: RunArgument,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read all data too.")] = False,
    finish: Annotated[bool, typer.Option("--finish", help="Commit what is complete and was never committed.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Delete what nobody can finish; asks first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --remove: also what may be in progress.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find what crashes left behind in a run. Says what it means, and repairs it on request."""
    from holdfast.cli.doctor import doctor

    if not doctor(run, deep=deep, finish=finish, remove=remove, force=force, yes=yes, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def keeper(
    run: RunArgument,
    *,
    node_dir: Annotated[str, typer.Option("--node-dir", help="A folder in memory, as trainers name it.")] = "/dev/shm",  # noqa: S108 - made private in it
    idle_s: Annotated[
        float, typer.Option("--idle-s", callback=_seconds, help="End after so long without trainers and work.")
    ] = 1800.0,
    grace_s: Annotated[
        float, typer.Option("--grace-s", callback=_seconds, help="On SIGTERM, persist for so long at most.")
    ] = 60.0,
) -> None:
    """Keep the snapshots of a run on this node. For a prolog or a sidecar: trainers start one where there is none."""
    from holdfast.cli.runs import parse_run
    from holdfast.keeper.__main__ import serve

    if not serve(parse_run(run).root, node_dir=node_dir, idle_s=idle_s, grace_s=grace_s):
        raise typer.Exit(FINDING)


@app.command()
def node(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Only what this run has; without, all runs.")] = "",
    *,
    node_dir: Annotated[str, typer.Option("--node-dir", help="A folder in memory, as trainers name it.")] = "/dev/shm",  # noqa: S108 - it is looked at
    free: Annotated[
        bool, typer.Option("--free", help="Free snapshots that are durable and that no trainer has any more.")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Have keepers make durable what they have, and end; trainers start new ones.")
    ] = False,
    grace_s: Annotated[
        float, typer.Option("--grace-s", callback=_seconds, help="With --stop: wait for so long at most.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """List what lies in this node's memory. Its runs, ranks, steps, states, sizes and owners; frees it on request."""
    from holdfast.cli.node import node

    if not node(run, node_dir=node_dir, free=free, stop=stop, grace_s=grace_s, as_json=as_json):
        raise typer.Exit(FAILURE)


@app.command()
def rollback(
    run: RunArgument,
    *,
    to: Annotated[str, typer.Option("--to", metavar="PLACE|step=N", help="Where to go back to: 3.12, or step=700.")],
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make an earlier checkpoint the head. Nothing is deleted; what came after it is abandoned."""
    from holdfast.cli.change import rollback

    if not rollback(run, to, yes=yes, as_json=as_json):
        raise typer.Exit(FAILURE)


@app.command()
def rm(
    paths: Annotated[
        list[str], typer.Argument(metavar="RUN@PLACE...", help="Checkpoints of runs: RUN@3.12, or RUN@step=700.")
    ],
    *,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete checkpoints of a run for good. The head, and what other checkpoints need, are refused."""
    from holdfast.cli.change import rm

    if not rm(paths, yes=yes, as_json=as_json):
        raise typer.Exit(FAILURE)
