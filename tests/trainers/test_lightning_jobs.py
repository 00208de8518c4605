"""A job of Lightning on several ranks that dies: it goes on bit for bit on as many ranks, and on others."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.data import GlobalOrder
from tests.project.test_guides import example
from tests.project.test_migrating import samples_of
from tests.project.torchrun import run_torchrun
from tests.trainers.stored import contents

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("node_dir")
def test_a_killed_job_of_lightning_goes_on_bit_for_bit_and_on_more_ranks_with_the_other_package(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("lightning_job.py"), tmp_path / "train.py")
    status, lines = run_torchrun(tmp_path, 2, "lightning", "whole", "10", "-1")
    assert (status, [*samples_of(lines)]) == (0, [*range(10)])
    killed, _ = run_torchrun(tmp_path, 2, "lightning", "parts", "10", "7")
    assert killed != 0
    status, lines = run_torchrun(tmp_path, 2, "lightning", "parts", "10", "-1")
    assert status == 0
    assert 5 <= min(samples_of(lines)) <= 7  # the killed job had staged it in the node's memory
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    status, lines = run_torchrun(tmp_path, 3, "pytorch_lightning", "parts", "14", "-1")
    assert status == 0
    batches = iter(GlobalOrder(24, global_batch_size=6, seed=7))
    expected = {step: sorted(next(batches)) for step in range(14)}
    assert {step: sorted(found) for step, found in samples_of(lines).items()} == {s: expected[s] for s in range(10, 14)}
    listed = {each.step: each.metrics for each in holdfast.ls(tmp_path / "parts")}
    assert {11, 12, 13} <= listed.keys()
    assert "val_loss" in listed[11]  # the only one of these that a validation followed


@pytest.mark.usefixtures("node_dir")
def test_a_killed_job_that_fsdp2_shards_goes_on_bit_for_bit_and_on_more_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).with_name("lightning_job.py"), tmp_path / "train.py")
    monkeypatch.setenv("SHARDED", "1")
    assert run_torchrun(tmp_path, 2, "lightning", "whole", "8", "-1").status == 0
    assert run_torchrun(tmp_path, 2, "lightning", "parts", "8", "6").status != 0
    assert run_torchrun(tmp_path, 2, "lightning", "parts", "8", "-1").status == 0
    expected = contents(tmp_path / "parts")
    assert expected == contents(tmp_path / "whole")
    monkeypatch.setenv("AGAIN", "again")
    status, lines = run_torchrun(tmp_path, 3, "lightning", "parts", "10", "-1")
    assert (status, [*samples_of(lines)]) == (0, [8, 9])
    again = contents(tmp_path / "again")  # shards of 3 ranks, of which one is shorter
    assert sum(name.startswith("optimizers/0/state/") for name in again) == 18
    assert again.items() <= expected.items()


def test_the_sharded_model_of_the_guide_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "lightning.md"
    script, calls = example(guide)
    (sharded,) = re.findall(r"```py\n(.*?)\n```", guide.read_text(), re.DOTALL)
    *above, last = script.strip().splitlines()[:-1]
    assert ".fit(Model(), loader)" in last
    (tmp_path / "train.py").write_text("\n".join([*above, sharded, ""]))
    assert len({call.num_ranks for call in calls}) == 2
    for call in calls:
        status, printed = run_torchrun(tmp_path, call.num_ranks, *call.arguments)
        assert (status, [line for line in printed if line in call.output]) == (0, call.output)
