"""The `holdfast` command. Starts without torch.

Exit codes: 0 fine, 1 a finding, 2 wrong usage, 3 failure.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from holdfast.cli.commands import FAILURE, app
from holdfast.errors import ConfigurationError, HoldfastError


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding cannot express is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # As other commands do when what reads their output has enough; status 1 would say "a finding".
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    run(sys.argv[1:])


def run(arguments: Sequence[str]) -> NoReturn:
    """Do what `arguments` say, and raise `SystemExit` with the exit code."""
    try:
        app(arguments, prog_name="holdfast")
    except HoldfastError as error:
        from holdfast.cli.screen import explain

        explain(error)
        sys.exit(2 if isinstance(error, ConfigurationError) else FAILURE)
    except Exception:  # noqa: BLE001 - Python's own status for an error, 1, would say "a finding"
        traceback.print_exc()
        sys.exit(FAILURE)
    raise AssertionError("the application exits by itself")
