"""Replica groups of torchft, with its own lighthouse and managers: groups die and come back, others go on and save, and
jobs with other groups resume.

``make test-titan`` runs these. The loop and the hooks are those of the guide, in ``torchft_job.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchft.coordination import LighthouseServer

import holdfast
from holdfast.cli.verify import verify
from tests.support.bound import bits
from tests.support.keepers import end_keepers

pytestmark = [pytest.mark.titan, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "torchtitan.md"
JOB = Path(__file__).with_name("torchft_job.py")
RESTORE = """
first = checkpointer.restore().next_step
Path(f"group-{group}-{life}-{rank}.met").touch()
if life == 0:
    meet("group-", num_groups * size)
"""


class Groups:
    """The replica groups of one job in `folder`, each under torchrun."""

    def __init__(self, folder: Path, node_dir: Path, lighthouse: str, *, groups: int, ranks: int, steps: int) -> None:
        self.folder = folder
        self.sizes = (groups, steps)
        self.ranks = ranks
        self.jobs: list[subprocess.Popen[bytes]] = []
        self.node_dir = node_dir
        self.environment = {"TORCHFT_LIGHTHOUSE": lighthouse, "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
        loop, hooks = re.findall(r"```py\n(.*?\n)```", GUIDE.read_text(), re.DOTALL)
        for guide, here in {
            '"runs/torchft", state': '"run", state, memory=holdfast.Memory(node_dir=os.environ["NODE"])',
            "checkpointer.restore()\n": RESTORE,
        }.items():
            assert guide in loop
            loop = loop.replace(guide, here)
        (folder / "train.py").write_text(JOB.read_text().replace("# HOOKS\n", hooks).replace("# LOOP\n", loop))
        for path in (*folder.glob("*.met"), *folder.glob("ended-*")):
            path.unlink()

    def start(self, group: int, *, life: int = 0, killed: int = -1, waits: int = -1) -> subprocess.Popen[bytes]:
        """Start a group, or start it anew."""
        node_dir = self.node_dir / str(group)  # as on a node of its own
        node_dir.mkdir(exist_ok=True)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}", "train.py"]
        numbers = map(str, (group, life, *self.sizes, killed, waits))
        with (self.folder / f"log-{group}-{life}").open("w") as log:
            job = subprocess.Popen(
                [sys.executable, *torchrun, *numbers],
                cwd=self.folder,
                env=self.environment | {"NODE": str(node_dir)},
                stdout=log,
                stderr=log,
            )
        self.jobs.append(job)
        return job

    def end(self, job: subprocess.Popen[bytes], *, is_killed: bool = False) -> None:
        """Wait for the end of a group, and check how it came."""
        status = job.wait(300)
        logs = {path.name: path.read_text()[-3000:] for path in self.folder.glob("log-*")}
        assert (status != 0) is is_killed, "\n".join(f"{name}:\n{text}" for name, text in logs.items())


@contextmanager
def replica_groups(folder: Path, node_dir: Path, *, groups: int, ranks: int, steps: int) -> Iterator[Groups]:
    """The groups of a job that trains until it has made so many steps, and torchft's lighthouse for them."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, quorum_tick_ms=50)
    job = Groups(folder, node_dir, lighthouse.address(), groups=groups, ranks=ranks, steps=steps)
    try:
        yield job
    finally:
        for each in job.jobs:
            each.terminate()  # torchrun ends its ranks
            each.wait()
        lighthouse.shutdown()
        for group in range(groups):
            end_keepers(node_dir / str(group))


def ended(folder: Path, group: int, rank: int = 0) -> tuple[int, dict[str, bytes]]:
    """The step with which a group began, and the bits of the weights with which it ended."""
    import torch

    found = torch.load(folder / f"ended-{group}-{rank}.pt", weights_only=True)
    return found["first"], {f"model/{name}": bits(weight) for name, weight in found["model"].items()}


def stored(folder: Path) -> dict[str, bytes]:
    """The bits of the weights at the head of the run."""
    view = holdfast.open(folder / "run")
    return {name: bits(view[name][...]) for name in view.names() if name.startswith("model/")}


def check_samples(folder: Path) -> None:
    """Check that each sample was trained on at most once, and as many as the batches that torchft has counted."""
    by_rank = [json.loads(path.read_text()) for path in folder.glob("trained-*.json")]
    samples = [sample for trained in by_rank for batch in trained.values() for sample in batch]
    num_batches = holdfast.open(folder / "run").value("torchft/batches_committed")
    assert isinstance(num_batches, int)
    assert len(samples) == len(set(samples)) == 12 * num_batches


def saved_steps(folder: Path) -> list[int]:
    """The steps on the lineage of the run's head, newest first; all checkpoints of the run are whole."""
    assert verify(str(folder / "run"), deep=True, every=True, as_json=False)
    return [each.step for each in holdfast.ls(folder / "run") if not each.abandoned]


def test_groups_of_two_ranks_die_and_come_back_and_other_groups_resume(tmp_path: Path, node_dir: Path) -> None:
    with replica_groups(tmp_path, node_dir, groups=2, ranks=2, steps=12) as job:
        first, other = job.start(0, killed=3), job.start(1, waits=6)
        job.end(first, is_killed=True)
        job.end(job.start(0, life=1, killed=10), is_killed=True)  # it is healed, and has rank 0 again
        job.end(other)
        _, weights = ended(tmp_path, 1)
        assert ended(tmp_path, 1, rank=1) == (0, weights)
    steps = saved_steps(tmp_path)
    assert steps == sorted(set(steps), reverse=True)
    assert set(steps) >= {11, 10, 7, 6, 5, 4, 3, 0}  # a save under way when the first group died may be lost
    epochs = {each.step: each.place.split(".")[0] for each in holdfast.ls(tmp_path / "run")}
    assert [epochs[step] for step in (11, 10, 3, 0)] == ["4", "4", "2", "1"]  # one group at a time saves
    assert "3" in {epochs[step] for step in steps if 5 < step < 10}
    assert stored(tmp_path) == weights
    check_samples(tmp_path)
    for groups, ranks, num_steps in ((1, 3, 14), (3, 1, 16)):
        with replica_groups(tmp_path, node_dir, groups=groups, ranks=ranks, steps=num_steps) as job:
            for each in [job.start(group, waits=0) for group in range(groups)]:
                job.end(each)
            begun = {ended(tmp_path, group)[0] for group in range(groups)}
            stands = [ended(tmp_path, group)[1] for group in range(groups)]
        assert begun == {num_steps - 2}
        assert stands == [stored(tmp_path)] * groups
        assert saved_steps(tmp_path)[:3] == [num_steps - 1, num_steps - 2, num_steps - 3]
        check_samples(tmp_path)
