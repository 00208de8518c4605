"""Jobs of transformers' `Trainer` on several ranks that are killed, and go on."""

from __future__ import annotations

import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

import holdfast
from tests.project.torchrun import TorchrunResult, run_torchrun
from tests.support.bound import bits

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]


def train(
    node_dir: Path, num_ranks: int, run: str, num_steps: int, stop: tuple[int, int] = (0, -1), *, wrapped: str = "ddp"
) -> TorchrunResult:
    """Train up to a number of steps, or until the last rank gets a signal in a step."""
    folder = node_dir.parent
    shutil.copy(Path(__file__).with_name("transformers_job.py"), folder / "train.py")
    return run_torchrun(folder, num_ranks, wrapped, str(folder / run), str(node_dir), str(num_steps), *map(str, stop))


def samples_of(lines: list[str]) -> dict[int, list[int]]:
    """The samples of each step, over all ranks."""
    found: dict[int, list[int]] = {}
    for line in lines:
        if (match := re.fullmatch(r"(\d\d) \d: \[(.*)\]", line)) is not None:
            found.setdefault(int(match[1]), []).extend(map(int, match[2].split(", ")))
    return found


def contents(run: Path) -> dict[str, object]:
    """All tensors, as bits, and all values of the newest checkpoint, but the log, which has times."""
    view = holdfast.open(run)
    tensors = {name: bits(view[name][...]) for name in view.names()}
    names = [name for name in view.value_names() if "log_history" not in name]
    return {"step": view.step, **tensors, **{name: repr(view.value(name)) for name in names}}


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp2"])
def test_a_killed_job_goes_on_bit_for_bit_on_as_many_ranks_and_by_samples_on_others(
    wrapped: str, tmp_path: Path, node_dir: Path
) -> None:
    trained = partial(train, wrapped=wrapped)
    status, lines = trained(node_dir, 2, "whole", 19)
    assert status == 0
    whole = samples_of(lines)
    status, lines = trained(node_dir, 2, "parts", 19, (signal.SIGKILL, 11))  # in the second epoch of 7 steps
    assert status != 0
    status, lines = trained(node_dir, 2, "parts", 19)
    rest = samples_of(lines)
    assert (status, [*rest]) == (0, [*range(9, 19)])
    assert rest == {step: whole[step] for step in rest}
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")

    status, lines = trained(node_dir, 3, "whole", 30)
    assert (status, [*samples_of(lines)]) == (0, [*range(19, 30)])
    third = [sample for step in range(14, 19) for sample in whole[step]]
    more = [sample for samples in samples_of(lines).values() for sample in samples]
    assert sorted(third + more[:6]) == [*range(26)]
    assert sorted(more[6:32]) == sorted(more[32:58]) == [*range(26)]


def test_a_preemption_of_one_rank_loses_no_step(tmp_path: Path, node_dir: Path) -> None:
    status, lines = train(node_dir, 2, "run", 60, (signal.SIGTERM, 4))
    first = samples_of(lines)
    assert status != 0
    assert 5 <= len(first) < 30
    assert holdfast.open(tmp_path / "run").step == len(first) - 1
    status, lines = train(node_dir, 3, "run", len(first) + 3)
    assert (status, [*samples_of(lines)]) == (0, [*range(len(first), len(first) + 3)])
    status, lines = train(node_dir, 1, "run", len(first) + 3)
    assert (status, samples_of(lines)) == (0, {})
