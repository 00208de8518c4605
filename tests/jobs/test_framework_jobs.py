"""Jobs of accelerate, Fabric, Lightning and transformers go on with other numbers of ranks, and so do metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.support.bound import bits

ROOT = Path(__file__).parents[2]
#: Entries whose parts belong to ranks.
OWN = ("own/", "loop/", "loader/")


def torchrun(framework: str, folder: Path, num_ranks: int, last: int) -> list[dict[str, Any]]:
    """Have a job train up to step `last`, and return what each of its ranks found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    script = [str(Path(__file__).with_name("framework_job.py")), framework, str(folder), str(last)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    subprocess.run([*launcher, *script], check=True, timeout=250, env=environment, cwd=folder)
    return [json.loads((folder / f"found-{num_ranks}-{rank}").read_text()) for rank in range(num_ranks)]


def contents(path: Path) -> dict[str, object]:
    """All tensors, as bits, and all values of a checkpoint, but those that belong to one rank."""
    view = holdfast.open(path)
    tensors = {name: bits(view[name][...]) for name in view.names() if not name.startswith(OWN)}
    values = {name: view.value(name) for name in view.value_names() if not name.startswith(OWN)}
    return {"step": view.step, **tensors, **values}


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", ["accelerate", "fabric", "lightning", "transformers"])
def test_a_job_goes_on_with_other_numbers_of_ranks(framework: str, tmp_path: Path) -> None:
    at_first = torchrun(framework, tmp_path, 2, 3)
    assert [found["start"] for found in at_first] == [0, 0]
    shared, total = {"raw": 3.0, "min": 0.0, "max": 3.0}, 4.0  # four steps, in each of which rank 1 added 1
    for num_ranks, last in ((3, 5), (1, 6)):
        saved = contents(tmp_path / "run")
        begun = torchrun(framework, tmp_path, num_ranks, last)
        expected = {"start": saved["step"] + 1, "shared": shared, "own": total}  # type: ignore[operator]
        expected |= {"position": expected["start"]} if framework == "fabric" else {}
        assert begun == [expected] * num_ranks
        assert contents(tmp_path / f"copy-{num_ranks}") == saved
        shared = {"raw": float(last), "min": 0.0, "max": float(last)}
        num_steps = last - saved["step"]  # type: ignore[operator]
        total = num_ranks * total + num_steps * sum(range(num_ranks))
    assert holdfast.open(tmp_path / "run").step == 6
