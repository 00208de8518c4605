"""The `holdfast` command. Starts without torch.

Exit codes: 0 fine, 1 a finding, 2 wrong usage, 3 failure, 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from holdfast.cli.commands import FAILURE, INTERRUPTED, USAGE, app
from holdfast.errors import ConfigurationError, HoldfastError


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding cannot express is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # As other commands do when what reads their output has enough; status 1 would say "a finding".
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _start_soon()
    try:
        run(sys.argv[1:])
    finally:
        # What is left dies with the process: a last search for garbage in it takes a tenth of a short command.
        gc.freeze()


def _start_soon() -> None:
    """Spare the process what a fifth of a short command would go into, and no command needs."""
    # Imports make many objects and hardly any garbage.
    gc.set_threshold(100_000)
    # A thread per core, for linear algebra, as soon as numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def run(arguments: Sequence[str]) -> NoReturn:
    """Do what `arguments` say, and raise `SystemExit` with the exit code."""
    try:
        app(arguments, prog_name="holdfast")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - Python's own status, 1, would say "a finding"
        sys.exit(_status(error))
    raise AssertionError("the application exits by itself")


def _status(error: BaseException) -> int:
    """The exit code for `error`, which is explained first."""
    if _was_interrupted(error):
        return INTERRUPTED
    if isinstance(error, HoldfastError):
        from holdfast.cli.screen import explain

        explain(error)
        return USAGE if isinstance(error, ConfigurationError) else FAILURE
    traceback.print_exception(error)
    return FAILURE


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether `error` is a Ctrl-C, or came up while one unwound: what breaks in work that is left is no news."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
