"""The `holdfast` command. Starts without torch.

Exit codes: 0 fine, 1 a finding, 2 wrong usage, 3 failure.
"""

from __future__ import annotations

import sys

import typer

from holdfast.cli.ls import ls
from holdfast.cli.screen import explain
from holdfast.cli.verify import verify
from holdfast.errors import ConfigurationError, HoldfastError

app = typer.Typer(
    help="Look at, check and repair checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.command()(ls)
app.command()(verify)


@app.callback()
def _root() -> None:
    """Holdfast keeps the state of large-model training safe."""


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except HoldfastError as error:
        explain(error)
        sys.exit(2 if isinstance(error, ConfigurationError) else 3)
