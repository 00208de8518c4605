"""The commands, their options and their help texts. Each command imports its own module when it runs."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from holdfast.cli.advise_command import advise
from holdfast.cli.arguments import (
    FAILURE,
    FINDING,
    PATH_HELP,
    CheckpointsArgument,
    EventsOption,
    JsonOption,
    PathArgument,
    RunArgument,
    YesOption,
)
from holdfast.cli.copy_commands import compact, cp, export, import_checkpoint

#: Limit for the ranks of a plan. No job has more, and a plan for so many takes minutes and much memory.
_MAX_RANKS = 1 << 20


def _seconds(value: float) -> float:
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is not a number of seconds.")
    return value


NamesOption = Annotated[
    str, typer.Option("--names", metavar="GLOB", help="Limit the command to names that match, such as 'model/*'.")
]

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
    """Inspect, check and repair checkpoints. Exit codes: 0 success, 1 a finding, 2 wrong usage, 3 failure."""


@app.command()
def ls(run: RunArgument, *, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run. First the head and the checkpoints that led to it, then abandoned ones."""
    from holdfast.cli.ls import ls

    if not ls(run, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def show(
    path: PathArgument,
    *,
    values: Annotated[bool, typer.Option("--values", help="Show values too, not only tensors.")] = False,
    names: NamesOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the contents of a checkpoint. Prints a tree of its tensors; with --names, each tensor that matches."""
    from holdfast.cli.show import show

    show(path, values=values, names=names, as_json=as_json)


@app.command()
def verify(
    path: PathArgument,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read all data and check every block's digest.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Check all committed checkpoints of the run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a checkpoint for damage. Verifies files, sizes, headers and values; with --deep every byte.

    With --deep, it takes a checkpoint that it finds whole out of quarantine.
    """
    from holdfast.cli.verify import verify

    if not verify(path, deep=deep, every=every, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=PATH_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare A with.")],
    *,
    stat: Annotated[bool, typer.Option("--stat", help="Print totals only, not each difference.")] = False,
    names: NamesOption = "",
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints, whatever their layouts. Compares names, shapes, dtypes, values, and every element."""
    from holdfast.cli.diff import diff

    if not diff(a, b, stat=stat, names=names, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def plan(
    path: PathArgument,
    *,
    on: Annotated[int, typer.Option("--on", metavar="N", min=1, max=_MAX_RANKS, help="Number of ranks that load.")],
    layout: Annotated[
        str,
        typer.Option("--layout", metavar="FILE", help="Layout rules (TOML). Default: FSDP, axis 0 over all ranks."),
    ] = "",
    mapping: Annotated[str, typer.Option("--mapping", metavar="FILE", help="Rules of a mapping (TOML).")] = "",
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="GLOB", help="Load only names that match; may be repeated."),
    ] = None,
    cast: Annotated[
        list[str] | None,
        typer.Option("--cast", metavar="GLOB", help="Allow casts of the tensors that match; may be repeated."),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes", metavar="N", min=0, max=_MAX_RANKS, help="Number of nodes of these ranks; 0: one per 8 ranks."
        ),
    ] = 0,
    storage: Annotated[
        str, typer.Option("--storage", metavar="RATE", help="Highest read rate of one node, such as 10GB/s.")
    ] = "",
    all_storage: Annotated[
        str, typer.Option("--all-storage", metavar="RATE", help="Highest read rate of all nodes together.")
    ] = "",
    network: Annotated[
        str, typer.Option("--network", metavar="RATE", help="Highest receive rate of one node, such as 400Gbit/s.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Predict a load on other ranks. Prints names, bytes per rank, reads per file, and seconds; reads no tensor."""
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


app.command()(export)


app.command()(advise)


# Arguments after the script belong to the script.
@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def prove(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script that trains, and its arguments.")
    ],
    *,
    nproc: Annotated[int, typer.Option("--nproc", metavar="N", min=1, help="Ranks of the job, on this machine.")] = 1,
    then: Annotated[int, typer.Option("--then", metavar="N", min=0, help="Ranks after each kill; 0: the same.")] = 0,
    kills: Annotated[int, typer.Option("--kills", metavar="N", min=1, help="How often to kill the job.")] = 2,
    every: Annotated[int, typer.Option("--every", metavar="STEPS", min=1, help="Steps from save to save.")] = 1,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="What decides when to kill.")] = 0,
    atol: Annotated[float, typer.Option("--atol", metavar="X", help="With --then: how far numbers may differ.")] = 1e-5,
    folder: Annotated[
        str, typer.Option("--dir", metavar="DIR", help="Keep all checkpoints and logs in this new folder.")
    ] = "",
    node_dir: Annotated[str, typer.Option("--node-dir", help="A folder in memory.")] = "/dev/shm",  # noqa: S108 - made private in it
    as_json: JsonOption = False,
) -> None:
    """Prove that a script resumes. Runs it with and without kills, and compares all that it saves."""
    from holdfast.cli.prove import show_proof
    from holdfast.proving.proof import Script

    chosen = Script(
        arguments=tuple(script),
        num_ranks=nproc,
        every=every,
        num_kills=kills,
        seed=seed,
        other_ranks=then or None,
    )
    if not show_proof(chosen, folder=folder, node_dir=node_dir, atol=atol, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def doctor(
    run: RunArgument,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read all data too, and check every block's digest.")] = False,
    finish: Annotated[
        bool, typer.Option("--finish", help="Commit checkpoints that are complete but were never committed.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete leftovers that cannot be finished; asks first.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --remove: also delete saves that may be in progress.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the leftovers of crashes in a run. Explains each finding, and repairs it on request."""
    from holdfast.cli.doctor import doctor

    if not doctor(run, deep=deep, finish=finish, remove=remove, force=force, yes=yes, as_json=as_json):
        raise typer.Exit(FINDING)


@app.command()
def keeper(
    run: RunArgument,
    *,
    node_dir: Annotated[str, typer.Option("--node-dir", help="A folder in memory, as trainers name it.")] = "/dev/shm",  # noqa: S108 - made private in it
    local: Annotated[
        str | None, typer.Option("--local", help="A folder on a disk of this node, as trainers name it.")
    ] = None,
    idle_s: Annotated[
        float,
        typer.Option("--idle-s", callback=_seconds, help="End after this many seconds without trainers or work."),
    ] = 1800.0,
    grace_s: Annotated[
        float, typer.Option("--grace-s", callback=_seconds, help="On SIGTERM, persist for at most this many seconds.")
    ] = 60.0,
) -> None:
    """Make snapshots of a run on this node durable. For a prolog or a sidecar: trainers start a keeper if none runs."""
    from holdfast.keeper.__main__ import serve
    from holdfast.run.by_path import parse_run

    if not serve(parse_run(run).root, node_dir=node_dir, local=local, idle_s=idle_s, grace_s=grace_s):
        raise typer.Exit(FINDING)


@app.command()
def node(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or its URL. Default: all runs.")] = "",
    *,
    node_dir: Annotated[str, typer.Option("--node-dir", help="A folder in memory, as trainers name it.")] = "/dev/shm",  # noqa: S108 - it is looked at
    free: Annotated[
        bool,
        typer.Option(
            "--free", help="Free durable snapshots of ranks whose trainers have ended, of RUN or of all your runs."
        ),
    ] = False,
    stop: Annotated[
        bool,
        typer.Option("--stop", help="Tell keepers to make their snapshots durable and end; trainers start new ones."),
    ] = False,
    grace_s: Annotated[
        float, typer.Option("--grace-s", callback=_seconds, help="With --stop: wait for at most this many seconds.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """List snapshots in this node's memory. Shows run, rank, step, state, size and owner; can free durable ones."""
    from holdfast.cli.node import node

    if not node(run, node_dir=node_dir, free=free, stop=stop, grace_s=grace_s, as_json=as_json):
        raise typer.Exit(FAILURE)


app.command(name="import")(import_checkpoint)
app.command()(cp)


@app.command("request-save")
def request_save(run: RunArgument) -> None:
    """Ask the job that trains on a run to save soon. The job needs the policy OnRequest."""
    from holdfast.cli.change import request_save

    request_save(run)


@app.command()
def rollback(
    run: RunArgument,
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="PLACE|step=N", help="The checkpoint to go back to: 3.12, or step=700.")
    ],
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make an earlier checkpoint the head. Deletes nothing, but abandons the checkpoints after it."""
    from holdfast.cli.change import rollback

    if not rollback(run, to, yes=yes, as_json=as_json):
        raise typer.Exit(FAILURE)


@app.command()
def rm(
    paths: CheckpointsArgument,
    *,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete checkpoints of a run for good. Refuses the head, and checkpoints that an epoch was opened from."""
    from holdfast.cli.change import rm

    if not rm(paths, yes=yes, as_json=as_json):
        raise typer.Exit(FAILURE)


@app.command()
def prune(
    run: RunArgument,
    *,
    keep_last: Annotated[
        list[int] | None, typer.Option("--keep-last", metavar="N", min=1, help="Keep the newest N checkpoints.")
    ] = None,
    keep_every: Annotated[
        list[int] | None,
        typer.Option(
            "--keep-every", metavar="N", min=1, help="Keep checkpoints whose step is a multiple of N; may be repeated."
        ),
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-best",
            metavar="METRIC[:N[:max]]",
            help="Keep the N (default: 1) with the smallest metric, or the greatest; may be repeated.",
        ),
    ] = None,
    keep_for: Annotated[
        list[str] | None,
        typer.Option("--keep-for", metavar="TIME", help="Keep checkpoints that are younger, such as 12h or 7d."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing; only say what would go, and why.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the checkpoints that no given policy keeps. Never the head, nor what is pinned or needed; asks first."""
    from holdfast.cli.prune import KeepOptions, prune

    options = KeepOptions(keep_last or (), keep_every or (), keep_best or (), keep_for or ())
    if not prune(run, options, dry_run=dry_run, yes=yes, as_json=as_json):
        raise typer.Exit(FAILURE)


@app.command()
def gc(
    run: RunArgument,
    *,
    grace: Annotated[
        str,
        typer.Option(
            "--grace", metavar="TIME", help="Keep temporary files, and parts of saves, that are younger; at least 1min."
        ),
    ] = "15min",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing; only say what would go, its bytes, and why.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete what no checkpoint needs. Parts of killed saves, rests of deletions, temporary files; asks first.

    Never a checkpoint, nor what the newest job may be saving. It may run while jobs save and read.
    """
    from holdfast.cli.collection import collect_garbage

    if not collect_garbage(run, grace=grace, dry_run=dry_run, yes=yes, as_json=as_json):
        raise typer.Exit(FAILURE)


@app.command()
def pin(paths: CheckpointsArgument, *, as_json: JsonOption = False) -> None:
    """Keep checkpoints from being deleted. Until somebody unpins them; a run stands for its head."""
    from holdfast.cli.pin import pin

    pin(paths, as_json=as_json)


@app.command()
def unpin(paths: CheckpointsArgument, *, as_json: JsonOption = False) -> None:
    """Take back the pins of checkpoints. Deletes nothing."""
    from holdfast.cli.pin import unpin

    unpin(paths, as_json=as_json)


app.command()(compact)


@app.command()
def release(paths: CheckpointsArgument, *, as_json: JsonOption = False) -> None:
    """Take checkpoints out of quarantine, unread. After a repair, verify --deep does so once it has read them."""
    from holdfast.cli.release import release

    release(paths, as_json=as_json)


@app.command()
def report(
    run: RunArgument,
    *,
    events: EventsOption = "",
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The page. Default: RUN-report.html, here.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Write no page; print the ledger of time as one JSON document.")
    ] = False,
) -> None:
    """Write a page about a run. Shows ranks and phases, times, sizes and ledgers; one file that loads nothing."""
    from holdfast.cli.report import report

    report(run, events=events, out=out, as_json=as_json)


@app.command()
def trace(
    run: RunArgument,
    *,
    events: EventsOption = "",
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The trace. Default: RUN-trace.json, here.")] = "",
) -> None:
    """Write a trace of all saves and restores. Shows each rank and phase; Perfetto opens it (ui.perfetto.dev)."""
    from holdfast.cli.trace import trace

    trace(run, events=events, out=out)


@app.command()
def top(run: RunArgument, *, events: EventsOption = "") -> None:
    """Show the saves of a running job, live, until Ctrl-C."""
    from holdfast.cli.top import top

    top(run, events=events)
