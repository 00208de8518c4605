"""A rank of a job that torchrun starts again: in its first attempt, rank 1 is killed while it waits for rank 0 in the
first save, and rank 0 answers then.

    torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 ... -m tests.faults.restarted_job FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Timer

import torch
import torch.distributed as dist

import holdfast

#: Longer than torchrun takes to start the ranks of all nodes.
_STARTED_S = 3.0
_KILLED_S = 0.5


def join() -> None:
    """Make the process group. The ranks of torch 2.13 find the addresses of gloo of the ranks before them in the store
    of the agents, and fail once more; so each rank first removes its own one."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.delete_key(f"default_pg/0//cpu//0/{os.environ['RANK']}")
    time.sleep(_STARTED_S)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def main(folder: Path) -> None:
    join()
    rank, is_first = dist.get_rank(), not (folder / "killed").exists()
    state = {"weight": torch.zeros(64)}
    with holdfast.Checkpointer(folder / "run", state, memory=None, timeout_s=20.0) as checkpointer:
        step = checkpointer.restore().next_step
        dist.barrier()
        if is_first and rank == 1:
            Timer(_KILLED_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if is_first and rank == 0:
            (folder / "killed").touch()
            time.sleep(_KILLED_S + 0.2)
            with suppress(holdfast.HoldfastError):
                checkpointer.save(step)
            time.sleep(60)  # torchrun ends this rank, because the other one has died
        # The save of an attempt has another step than that of the one before.
        for number in range(step + (0 if is_first else 7), step + 10):
            state["weight"] += 1
            checkpointer.save(number)
    (folder / f"ended-{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
