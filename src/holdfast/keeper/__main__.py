"""``python -m holdfast.keeper RUN``: the keeper's process. Usually `ensure_keeper` starts it; it ends when it is idle.

Exit codes: 0 everything is durable, 1 it was told to end and could not make everything durable in time, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from threading import Event
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.keeper.daemon import GRACE_S, IDLE_S, keep
from holdfast.keeper.log import BoundedLog
from holdfast.node_disk.disk_folder import use_disk
from holdfast.node_memory.inventory import name_of
from holdfast.node_memory.keeper_lock import require_protocol, require_signer, try_lock
from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR, NodeFolder
from holdfast.run.paths import parse
from holdfast.signing import has_keys
from holdfast.store.urls import absolute, location_of

#: More open files than a keeper needs for some hundred ranks on its node.
_NUM_FILES: Final = 1 << 16

_log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Keep the run that `arguments` name, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.keeper", description="Make snapshots of one run durable.")
    parser.add_argument("run", help="the run, as trainers name it")
    parser.add_argument("--node-dir", default=str(DEFAULT_NODE_DIR), help="a folder in memory")
    parser.add_argument("--local", help="a folder on a disk of this node, as trainers name it")
    parser.add_argument(
        "--idle-s", type=float, default=IDLE_S, help="end after this many seconds without trainers or work"
    )
    parser.add_argument(
        "--grace-s", type=float, default=GRACE_S, help="on SIGTERM, persist for at most this many seconds"
    )
    parser.add_argument("--detach", action="store_true", help="continue in the background once the keeper is ready")
    given = parser.parse_args(arguments)
    try:
        owes_nothing = serve(
            given.run,
            node_dir=given.node_dir,
            local=given.local,
            idle_s=given.idle_s,
            grace_s=given.grace_s,
            detach=given.detach,
        )
    except HoldfastError as error:
        _log.error("%s", error)
        return 2
    return 0 if owes_nothing else 1


def serve(
    run: str,
    *,
    node_dir: str,
    local: str | None = None,
    idle_s: float,
    grace_s: float,
    detach: bool = False,
) -> bool:
    """Keep `run` on this node until SIGTERM, or until there is nothing to keep; also what earlier jobs left of it in
    the folder `local` on a disk. Returns whether everything is durable then, or another keeper is at work. With
    `detach`, a child does this in the background, and the calling process ends once the keeper's lock is taken.

    Raises `ConfigurationError` where `node_dir` or `local` cannot be used, its contents are another version's, or this
    process has signing keys and a keeper without any did not end.
    """
    handlers = [BoundedLog(is_bounded=detach)]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=handlers)
    over = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    os.nice(19)  # training goes first
    _raise_file_limit()
    uri = name_of(parse(run).location)
    with NodeFolder(uri, node_dir=Path(absolute(node_dir))) as folder:
        if local is not None:
            use_disk(folder, Path(absolute(local)), location_of(uri))
        require_protocol(folder, timeout_s=2 * GRACE_S)
        if has_keys():
            require_signer(folder, timeout_s=2 * GRACE_S)
        lock = try_lock(folder, signs=has_keys())
        if lock is None:
            _log.info("another keeper is at work in '%s'", folder.path)
            return True
        _log.info("keeping the snapshots of '%s' in '%s'", uri, folder.path)
        # The child shares the lock. Once its parent has ended, no program that ends whole trees of processes, or waits
        # for them, finds it.
        if detach and os.fork():
            os._exit(0)
        return keep(folder, uri, lock, is_over=over.is_set, idle_s=idle_s, grace_s=grace_s)


def _raise_file_limit() -> None:
    """Let this process open as many files as the system allows, within reason. It has one for each slot of the node's
    ranks, for each copy, and for each connection, however few its trainer may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
