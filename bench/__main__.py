"""The command line: ``python -m bench [COMMAND]``. Without a command, everything runs and the tables are rewritten."""

from __future__ import annotations

import sys

import typer

from bench.engine import engine
from bench.errors import BenchError
from bench.history import history
from bench.io import io
from bench.load import load
from bench.marked import README, TABLES
from bench.plan import plan
from bench.small import small
from bench.table import require_places, table
from bench.view import view

app = typer.Typer(no_args_is_help=False, add_completion=False)
for command in (engine, history, io, load, plan, small, view, table):
    app.command()(command)


@app.callback(invoke_without_command=True)
def everything(context: typer.Context) -> None:
    """Holdfast's benchmarks. Without a command: run all of them and rewrite the tables in docs/benchmarks.md."""
    if context.invoked_subcommand is not None:
        return
    # Seen before the long run rather than after it.
    require_places(TABLES, README)
    io()
    load()
    plan()
    small()
    view()
    engine()
    history()
    table()


def main() -> None:
    """Run the command line; a BenchError ends it with its message and status 1."""
    try:
        app()
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
