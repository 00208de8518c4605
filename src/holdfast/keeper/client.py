"""How a trainer gets a keeper: by finding one at work, or by starting one that outlives it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import holdfast
from holdfast.errors import ConfigurationError
from holdfast.keeper.daemon import GRACE_S
from holdfast.node_memory.inventory import LOG_NAME
from holdfast.node_memory.keeper_lock import is_kept, require_protocol
from holdfast.node_memory.node_folder import NodeFolder

_NUM_TRIES: Final = 3
_KILLED: Final = -9
#: A keeper that takes longer to begin (because Python itself lies on a file system that hangs, say) is killed.
_START_LIMIT_S: Final = 20.0


def ensure_keeper(folder: NodeFolder, run: str) -> None:
    """Return when a keeper of `folder` is at work; starts one where there is none, in a few tenths of a second.

    It has a session of its own, no parent and none of this process's descriptors, so that nothing that ends this
    process ends it, but for the end of a container or of a Slurm step. Any number of processes may call this at once.

    Raises:
        ConfigurationError: a keeper was started and could not begin, and says why; or what is there is another
            version's, see `require_protocol`.
    """
    require_protocol(folder, timeout_s=2 * GRACE_S)
    if is_kept(folder):
        return
    log = folder.open_or_create(LOG_NAME)
    try:
        fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
        tries = (_started(run, folder.node_dir, log) for _ in range(_NUM_TRIES))
        status = next((status for status in tries if status >= 0), _KILLED)
    finally:
        os.close(log)
    if status:
        raise ConfigurationError(
            f"The keeper of '{run}' did not start (status {status}): {_last_words(folder)}.",
            code="config.keeper",
            action=f"See '{folder.path / LOG_NAME}'.",
            path=str(folder.path),
        )


def _started(run: str, node_dir: Path, log: int) -> int:
    """Start a keeper. Its status when it keeps the run, or could not; below 0 if something killed it before, or it took
    too long to begin."""
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
    """Where the keeper finds this very holdfast."""
    before = os.environ.get("PYTHONPATH")
    return [str(Path(holdfast.__file__).parent.parent), *([before] if before else [])]


def _last_words(folder: NodeFolder) -> str:
    lines = (folder.path / LOG_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1].rstrip(".") if lines else "it said nothing"
