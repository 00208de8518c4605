"""The trainer's way to a keeper: find one at work, or start one that outlives the trainer."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread, current_thread
from typing import Final

import holdfast
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.keeper.daemon import GRACE_S
from holdfast.node_memory.inventory import LOG_NAME
from holdfast.node_memory.keeper_lock import is_kept, require_protocol, require_signer
from holdfast.node_memory.keeper_starts import MAX_STARTS, starts
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.signing import has_keys

_NUM_TRIES: Final = 3
_KILLED: Final = -9
_INFO: Final = " INFO "
#: A keeper that takes longer to start is killed. (Python itself may lie on a file system that hangs.)
_START_LIMIT_S: Final = 20.0

_log = logging.getLogger(__name__)
#: The threads that start keepers early, by folder.
_early: Final[dict[Path, Thread]] = {}


def ensure_keeper(folder: NodeFolder, run: str) -> None:
    """Return when a keeper of `folder` is at work. Starts one where there is none, which takes a few tenths of a
    second. Before that, pauses for some seconds at most if earlier keepers died soon after their start
    (`holdfast.node_memory.keeper_starts`). If this process has signing keys, replaces a keeper that has none, which
    makes its slots durable first: an earlier job started it, and its environment stays as it was.

    The keeper has its own session, no parent and none of this process's descriptors. So whatever ends this process does
    not end the keeper, except for the end of a container or of a Slurm step. Any number of processes may call this at
    the same time.

    Raises:
        ConfigurationError: the keeper could not start, or too many of them died soon after their start; the error says
            why. Or the contents of `folder` are another version's, see `require_protocol`, or a keeper without keys did
            not end, see `require_signer`.
    """
    require_protocol(folder, timeout_s=2 * GRACE_S)
    if has_keys():
        require_signer(folder, timeout_s=2 * GRACE_S)
    if is_kept(folder):
        return
    early = _early.get(folder.path)
    if early is not None and early is not current_thread():
        early.join()
        if is_kept(folder):
            return
    time.sleep(starts(folder).pause_s)
    num_starts = starts(folder).number  # others may have started one meanwhile
    if num_starts >= MAX_STARTS:
        if is_kept(folder):  # another process or thread started the last one, and it has not died
            return
        raise _no_keeper(folder, run, f"{num_starts} of them died before they had made anything durable")
    log = _open_log(folder)
    try:
        fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
        tries = (_started(run, folder.node_dir, log) for _ in range(_NUM_TRIES))
        status = next((status for status in tries if status >= 0), _KILLED)
    finally:
        os.close(log)
    if status:
        raise _no_keeper(folder, run, f"status {status}")


def start_early(folder: Path, run: str) -> None:
    """Begin to start a keeper of `folder` in the background, unless that has begun: it takes some tenths of a second,
    and the next `ensure_keeper` of this process waits for the rest of them. A failure is left to that call, too."""
    early = _early.get(folder)
    if early is None or not early.is_alive():
        _early[folder] = Thread(target=_start_early, args=(folder, run), name="holdfast-keeper", daemon=True)
        _early[folder].start()


def _start_early(folder: Path, run: str) -> None:
    try:
        with NodeFolder.at(folder) as opened:
            ensure_keeper(opened, run)
    except (HoldfastError, OSError) as error:
        _log.info("no keeper was started early: %s", error)
    finally:
        _early.pop(folder, None)


def _started(run: str, node_dir: Path, log: int) -> int:
    """Start a keeper, and wait until it keeps the run or fails. Returns its exit status: 0 if it keeps the run, below 0
    if a signal killed it before or it took too long to start."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "holdfast.keeper", run, "--node-dir", str(node_dir), "--detach"],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_import_paths())},
            timeout=_START_LIMIT_S,
        ).returncode
    except subprocess.TimeoutExpired:
        return _KILLED


def _import_paths() -> list[str]:
    """The import paths by which the keeper finds this same holdfast package."""
    before = os.environ.get("PYTHONPATH")
    return [str(Path(holdfast.__file__).parent.parent), *([before] if before else [])]


def _open_log(folder: NodeFolder) -> int:
    """A descriptor of the keepers' log. What is no file of this user alone is removed; where that fails, a keeper goes
    without a log."""
    with suppress(ConfigurationError):
        return folder.open_or_create(LOG_NAME)
    if folder.discard(LOG_NAME):
        return folder.open_or_create(LOG_NAME)
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _no_keeper(folder: NodeFolder, run: str, how: str) -> ConfigurationError:
    return ConfigurationError(
        f"The keeper of '{run}' did not start ({how}): {_last_words(folder)}.",
        code="config.keeper",
        action=f"See '{folder.path / LOG_NAME}'.",
        path=str(folder.path),
    )


def _last_words(folder: NodeFolder) -> str:
    """The last line of the keepers' log that can say why one died. Another keeper may have logged its start since."""
    text = ""
    with suppress(OSError, ConfigurationError), os.fdopen(folder.open(LOG_NAME), "rb") as file:
        text = file.read().decode(errors="replace")
    reasons = [line for line in text.splitlines() if _INFO not in line]
    return reasons[-1].rstrip(".") if reasons else "its log says nothing"
