"""Writes the runs of `tests.released.states` with whatever version of holdfast is imported, into one archive.

PYTHONPATH=<checkout of the version>/src:. python -m tests.released.write <name of the version>
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

import torch.distributed as dist

import holdfast
from tests.jobs.layout_cells import Cell, filled
from tests.released.states import CELLS, pieces, zoo
from tests.support.ranks import run_ranks


def save_cell(cell: Cell, run: str, seed: int) -> None:
    holdfast.save(run, filled(cell, seed).state, 10, metrics={"loss": 0.5})


def save_pieces(run: str) -> None:
    holdfast.save(run, pieces(dist.get_rank()), 1)


def save_history(run: str) -> None:
    """Two saves in the background, a rollback to the first, a save after it, and a takeover."""
    cell = Cell("fsdp", (2,))
    job = filled(cell, 1)
    with holdfast.Checkpointer(run, job.state) as checkpointer:
        checkpointer.save(1)
    other = filled(cell, 2)
    with holdfast.Checkpointer(run, other.state, takeover=True) as checkpointer:
        checkpointer.save(2)
    holdfast.load(f"{run}@step=1", into=other.state)
    holdfast.save(run, filled(cell, 3).state, 3, takeover=True)


def main(name: str) -> None:
    """Write ``<name>.tar.xz`` beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        for seed, cell in enumerate(CELLS):
            run_ranks(cell.world_size, save_cell, cell, str(runs / str(cell)), seed)
        run_ranks(3, save_pieces, str(runs / "pieces"))
        run_ranks(2, save_history, str(runs / "history"))
        holdfast.save(runs / "zoo", zoo(), 1)
        with tarfile.open(Path(__file__).with_name(f"{name}.tar.xz"), "w:xz") as archive:
            archive.add(runs, arcname=".", filter=_anonymous)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main(*sys.argv[1:])
