"""The memory of jobs that save into one run in turn: on a node, each of those that live has a folder of its own.

Else one job would take the slots that another one counts on. The first job has the folder that all jobs have; further
ones have folders beside it. A job that comes back finds a folder that nobody has, with what an earlier one left there.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Final

from holdfast.node_memory.claims import take_turn
from holdfast.node_memory.node_folder import NodeFolder, turn_dir

#: The folders that this process has for itself, by its pid, the folder in memory that its user named, the run and the
#: rank; each with the descriptor whose lock says so, which this process holds until it ends.
_taken: Final[dict[tuple[int, Path, str, int], tuple[Path, int]]] = {}


def dir_in_turn(node_dir: Path, run: str, *, rank: int) -> Path:
    """`node_dir`, or a folder in it: the first one that no other living process has for `rank` of `run`. From now on
    this process has it, until it ends.

    Raises as `NodeFolder`, and OSError.
    """
    key = os.getpid(), node_dir, run, rank
    if key not in _taken:
        for number in count():
            path = turn_dir(node_dir, number)
            with NodeFolder(run, node_dir=path) as folder:
                lock = take_turn(folder, rank)
            if lock is not None:
                _taken[key] = path, lock
                break
    return _taken[key][0]
