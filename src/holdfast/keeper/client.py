"""How a trainer gets a keeper: by finding one at work, or by starting one that outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import holdfast
from holdfast.errors import ConfigurationError
from holdfast.keeper.daemon import is_kept
from holdfast.keeper.node_folder import NodeFolder

_LOG_NAME: Final = "keeper.log"
_LOOK_S: Final = 0.02


def ensure_keeper(folder: NodeFolder, run: str, *, timeout_s: float = 30.0) -> None:
    """Return when a keeper of `folder` is at work; starts one where there is none.

    It has a session of its own and none of this process's descriptors, so that nothing that ends this process ends it,
    but for the end of a container or of a Slurm step. Any number of processes may call this at once.

    Raises:
        ConfigurationError: a keeper was started and ended at once; says what it said.
    """
    if is_kept(folder):
        return
    child = _start(folder, run)
    end = time.monotonic() + timeout_s
    while not is_kept(folder):
        status = child.poll()
        # 0 is what one says that finds another at work.
        if (status or time.monotonic() > end) and not is_kept(folder):
            raise ConfigurationError(
                f"The keeper of '{run}' did not start (status {status}): {_last_words(folder) or 'it said nothing'}.",
                code="config.keeper",
                action=f"See '{folder.path / _LOG_NAME}'.",
                path=str(folder.path),
            )
        time.sleep(_LOOK_S)


def _start(folder: NodeFolder, run: str) -> subprocess.Popen[bytes]:
    log = os.open(folder.path / _LOG_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        node_dir = folder.path.parent.parent
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.keeper", run, "--node-dir", str(node_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_import_paths())},
        )
    finally:
        os.close(log)


def _import_paths() -> list[str]:
    """Where the keeper finds this very holdfast."""
    before = os.environ.get("PYTHONPATH")
    return [str(Path(holdfast.__file__).parent.parent), *([before] if before else [])]


def _last_words(folder: NodeFolder) -> str:
    lines = (folder.path / _LOG_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else ""
