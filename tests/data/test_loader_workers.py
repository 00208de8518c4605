"""Workers of a loader outlive the signals of a preemption, and still end with their loader and their rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from holdfast.data import GlobalOrder, outlive_signals
from tests.support.nursery import until

CONTEXTS = ["fork", "spawn"]


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]


class Numbers(Dataset[torch.Tensor]):
    """Samples that are their own numbers."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(number)


def note_seed(worker_id: int) -> None:
    torch.manual_seed(worker_id)


@pytest.mark.parametrize("context", CONTEXTS)
def test_batches_go_on_after_a_signal_to_the_workers(context: str) -> None:
    order = GlobalOrder(1000, global_batch_size=4, seed=1)
    loader = DataLoader(
        Numbers(1000),
        batch_sampler=order,
        num_workers=1,  # it has begun once it has given a batch
        multiprocessing_context=context,
        worker_init_fn=note_seed,
    )
    others = set(workers_of(os.getpid()))
    batches = order.follow(loader)
    seen = [next(batches)]
    workers = set(workers_of(os.getpid())) - others
    assert len(workers) == 1
    for worker in workers:
        for name in ("TERM", "INT", "USR1", "USR2"):
            subprocess.run(["kill", f"-{name}", str(worker)], check=True)  # as a launcher does, and not its rank
    seen += [next(batches) for _ in range(50)]
    assert sorted(torch.cat(seen).tolist()) == sorted(set(torch.cat(seen).tolist()))
    batches.close()  # type: ignore[attr-defined]
    del batches
    until(lambda: not workers & set(workers_of(os.getpid())))


def test_a_loader_that_is_followed_twice_is_changed_once() -> None:
    order = GlobalOrder(100, global_batch_size=4, seed=1)
    loader = DataLoader(Numbers(100), batch_sampler=order, num_workers=1)
    order.follow(loader)
    first = loader.worker_init_fn
    order.follow(loader)
    assert loader.worker_init_fn is first
    own = DataLoader(
        Numbers(100),
        batch_sampler=order,
        num_workers=1,
        worker_init_fn=outlive_signals,
    )
    order.follow(own)
    assert own.worker_init_fn is outlive_signals


RANK = """
import sys, time, torch
from torch.utils.data import DataLoader
from holdfast.data import outlive_signals
loader = iter(DataLoader(torch.arange(100), num_workers=2, worker_init_fn=outlive_signals))
next(loader)
print("begun", flush=True)
time.sleep(60)
"""


def test_workers_end_when_their_rank_is_killed() -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "begun\n"
    workers = workers_of(rank.pid)
    assert len(workers) == 2
    rank.kill()
    rank.communicate()
    end_s = time.monotonic() + 30
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < end_s
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[-1][0] != "Z"
    except FileNotFoundError:
        return False


RANK_THAT_ENDS = """
import sys, torch
from torch.utils.data import DataLoader
from holdfast.data import outlive_signals
if __name__ == "__main__":
    options = {"multiprocessing_context": sys.argv[1], "num_workers": 1, "worker_init_fn": outlive_signals}
    loader = iter(DataLoader(torch.arange(10_000), **options))
    next(loader)
    import multiprocessing.util, os
    # As where the iterator is part of a cycle: the interpreter ends, and only multiprocessing ends the workers.
    loader._shutdown_workers = lambda: None
    type(loader).__del__ = lambda self: None
"""


@pytest.mark.parametrize("context", [*CONTEXTS, "forkserver"])
@pytest.mark.few(1)
def test_a_rank_ends_although_its_loader_is_still_open(tmp_path: Path, context: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK_THAT_ENDS)
    assert subprocess.run([sys.executable, str(script), context], check=False, timeout=110).returncode == 0
