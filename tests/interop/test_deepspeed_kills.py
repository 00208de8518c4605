"""All ranks of a job of the real DeepSpeed die by SIGKILL, and a job at another ZeRO stage and on another number of
ranks goes on with the bits that were saved.

``make test-deepspeed`` runs these, in an environment of their own; see `killed_engines`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.interop.test_deepspeed_engines import ROOT, on_ranks
from tests.support.keepers import end_keepers
from tests.support.nursery import until

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(300)]

JOBS = "tests.interop.killed_engines"
#: The steps of the second and the third save of the job that dies.
SECOND, THIRD = 6, 9
#: The job that dies, and the one that goes on: the case and its number of ranks. The second pair has dynamic loss
#: scalers.
PAIRS = [(("zero3", 4), ("zero1", 2)), (("zero2-round-robin", 2), ("zero3-fp16", 3))]


def killed(folder: Path, case: str, ranks: int, moment: str) -> str:
    """Start a job, and kill all its ranks when they have got to the moment; returns the report of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["-m", JOBS, "die", str(folder), case, moment]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ready = [folder / f"ready-{rank}" for rank in range(ranks)]
    with (folder / "err").open("w") as err:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=err, stderr=err)
        try:
            until(lambda: all(each.exists() for each in ready) or job.poll() is not None, timeout_s=200)
            assert job.poll() is None, (folder / "err").read_text()[-6000:]
            if moment == "copying":
                until(lambda: len([*folder.glob("stepping-?")]) == ranks, timeout_s=60)
                time.sleep(0.5)
                assert not [*folder.glob("stepped-?")]  # the step of the optimizer waits for the copy
            for each in ready:
                os.kill(int(each.read_text()), signal.SIGKILL)
            assert job.wait(60) == 1
        finally:
            job.terminate()  # torchrun ends its ranks, if any are left
            job.wait()
    return (folder / "err").read_text()


@pytest.mark.parametrize("moment", ["between", "copying", "staged"])
@pytest.mark.parametrize(("dies", "goes_on"), PAIRS, ids=lambda each: f"{each[0]}-on-{each[1]}")
def test_an_engine_goes_on_at_another_stage_on_other_ranks_where_all_ranks_were_killed(
    tmp_path: Path, node_dir: Path, dies: tuple[str, int], goes_on: tuple[str, int], moment: str
) -> None:
    (tmp_path / "held").mkdir()
    report = killed(tmp_path, *dies, moment)
    assert report.count("exitcode  : -9") == dies[1], report[-6000:]
    if moment == "staged":
        end_keepers(node_dir)
    case, ranks = goes_on
    on_ranks(ranks, JOBS, "resume", str(tmp_path), case)
    found = json.loads((tmp_path / "resumed.json").read_text())
    assert found["step"] == (SECOND if moment == "copying" else THIRD)
    assert found["compared"] >= 30
    assert (found["differing"], found["casts"]) == ([], [])
    for each in ("values", "seen", "twin_values"):
        here, there = found[each]
        assert here == there, each
    assert found["trained"]
    assert found["last_step"]
    assert (found["still"], found["twin"], found["last"]) == ([], [], [])
