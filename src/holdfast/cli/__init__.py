"""The `holdfast` command. Starts without torch.

Exit codes: 0 fine, 1 a finding, 2 wrong usage, 3 failure, 130 interrupted.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, Protocol, runtime_checkable

from holdfast.cli.arguments import FAILURE, INTERRUPTED, USAGE
from holdfast.cli.commands import app
from holdfast.errors import ConfigurationError, HoldfastError, StorageError

#: Errors of a write to standard output. (Errors of stores are `StorageError`s, and others name a file.)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

#: Commands that go on from what they have done when somebody calls them again.
_GOES_ON: Final = frozenset({"cp", "export", "import"})


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    if sys.stdout is None or sys.stderr is None:  # somebody closed them (``>&-``): only the exit code counts
        nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding cannot express is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # End as other commands do when the reader of their output closes the pipe; exit code 1 would mean "a finding".
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _start_soon()
    try:
        run(sys.argv[1:])
    finally:
        # All objects die with the process: a last garbage collection would take a tenth of a short command's time.
        gc.freeze()


def _start_soon() -> None:
    """Turn off work of the process that takes a fifth of a short command's time, and that no command needs."""
    # Collect garbage rarely: imports make many objects and hardly any garbage.
    gc.set_threshold(100_000)
    # By default OpenBLAS starts a thread per core as soon as numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def run(arguments: Sequence[str]) -> NoReturn:
    """Run the command in `arguments`, and raise `SystemExit` with its exit code."""
    try:
        status = app(arguments, prog_name="holdfast", standalone_mode=False) or 0
        sys.stdout.flush()  # here, where a full disk is a failure; at the end of the interpreter it would be status 120
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - Python's own status, 1, would say "a finding"
        status = _status(error, as_json="--json" in arguments)
    if status == INTERRUPTED and next(iter(arguments), "") in _GOES_ON:
        sys.stderr.write("interrupted: what is done stays; the same command goes on from there\n")
    sys.exit(status)


@runtime_checkable
class _Misuse(Protocol):
    """The exception that the parser of options raises. (Its module depends on the version of typer.)"""

    exit_code: int

    def format_message(self) -> str:
        """The error in one sentence."""

    def show(self) -> None:
        """Print the usage and the error on standard error."""


def _status(error: BaseException, *, as_json: bool) -> int:
    """The exit code for `error`. Explains the error first: as JSON on standard output, or in words."""
    if _was_interrupted(error):
        return INTERRUPTED
    if isinstance(error, HoldfastError):
        known, status = error, USAGE if isinstance(error, ConfigurationError) else FAILURE
    elif isinstance(error, _Misuse):
        if not as_json:
            error.show()
            return error.exit_code
        known, status = _usage(error), error.exit_code
    elif isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
        known, status, as_json = _full_output(error), FAILURE, False
    else:
        traceback.print_exception(error)
        if not as_json:
            return FAILURE
        known, status = _unexpected(error), FAILURE
    from holdfast.cli.screen import explain, print_error

    try:
        (print_error if as_json else explain)(known)
        sys.stdout.flush()
    except OSError:
        # The output takes nothing, as on a full disk. Python flushes it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if as_json:
            with suppress(OSError):  # standard error may be as full
                explain(known)
    return status


def _full_output(error: OSError) -> StorageError:
    return StorageError(
        f"standard output takes no more: {error.strerror or error}.",
        code="storage.output",
        action="Make room where it goes, or send it elsewhere.",
    )


def _usage(error: _Misuse) -> ConfigurationError:
    return ConfigurationError(error.format_message(), code="config.usage", action="See holdfast --help.")


def _unexpected(error: BaseException) -> HoldfastError:
    return HoldfastError(
        f"{type(error).__name__}: {error}",
        code="unexpected",
        action="This is a defect of holdfast: report it with the traceback on standard error.",
    )


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether `error` is a Ctrl-C, or was raised while one unwound: such an error only says that work was cut off."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
