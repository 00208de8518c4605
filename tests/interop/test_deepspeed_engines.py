"""Live engines of the real DeepSpeed are saved in pieces, and load on other numbers of ranks and at other stages.

``make test-deepspeed`` runs these, in an environment of their own. One job saves engines of several cases, and others
load them; see `deepspeed_jobs`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from tests.interop.deepspeed_model import GROUPS, TiedNet, grouped

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CASES = [
    *("zero0", "zero0-bf16", "zero0-fp16", "zero1", "zero1-fp32", "zero1-aligned", "zero2", "zero2-round-robin"),
    *("zero3", "zero3-fp16", "bf16-optimizer", "zero1-offload", "zero2-offload", "zero3-offload"),
]
#: The engine that is saved, and the one that loads it on other ranks: each stage into each other.
CROSSED = [
    *("zero1:zero1", "zero1:zero2", "zero1:zero3", "zero2:zero2", "zero2:zero1", "zero2:zero3"),
    *("zero3:zero3", "zero3:zero1", "zero3:zero2", "zero3:bf16-optimizer", "bf16-optimizer:zero3"),
    *("bf16-optimizer:bf16-optimizer", "zero0-bf16:zero3", "zero3:zero0-bf16", "zero1-fp32:zero0", "zero0:zero1-fp32"),
    *("zero1:zero1-aligned", "zero1-aligned:zero1", "zero2-round-robin:zero2-round-robin"),
    *("zero3-offload:zero1", "zero3:zero2-offload", "zero3:zero3-offload", "zero1-offload:zero3-offload"),
    *("zero2-round-robin:zero3-fp16", "zero3-fp16:zero2-round-robin"),
]


def on_ranks(ranks: int, module: str, *arguments: str) -> None:
    """Run a module on several ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command += ["-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def written(folder: Path, case: str, ranks: int) -> Path:
    """A folder that DeepSpeed's own `save_checkpoint` writes."""
    on_ranks(ranks, "tests.interop.write_deepspeed", str(folder), case)
    return folder / f"{case}-on-{ranks}"


def job(ranks: int, verb: str, folder: Path, *cases: str) -> dict[str, Any]:
    """Run a job of `deepspeed_jobs`, and return what it found."""
    on_ranks(ranks, "tests.interop.deepspeed_jobs", verb, str(folder), *cases)
    found: dict[str, Any] = json.loads((folder / f"{verb}.json").read_text())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("engines")
    for case in CASES:
        (folder / case).mkdir()
    return folder, job(2, "save", folder, *CASES)


def check(results: dict[str, Any]) -> None:
    for pair, found in results.items():
        assert found["compared"] >= 30, pair
        assert (found["differing"], found["casts"], found["missing"], found["unexpected"]) == ([], [], [], []), pair
        assert found["values"], (pair, found.get("here"), found.get("there"))
        assert found["epoch"] == 3, pair


def test_a_save_of_an_engine_runs_no_collective(saved: tuple[Path, dict[str, Any]]) -> None:
    _, results = saved
    assert {case: found["during"] for case, found in results.items()} == {case: [] for case in CASES}
    assert all(found["training"] > 0 for found in results.values())


def test_a_save_of_an_engine_sends_no_byte_on_the_connections_of_the_training(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    _, results = saved
    for case, found in results.items():
        for training, during_save in found["sent"]:
            assert during_save == 0, case
            assert training > found["state"], case  # the counter sees what steps send


def test_an_engine_goes_on_to_the_bits_of_the_one_that_was_saved(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = saved
    results = job(2, "load", folder, *(f"{case}:{case}" for case in CASES))
    check(results)
    assert {pair: found["after"] for pair, found in results.items()} == {f"{case}:{case}": [] for case in CASES}


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_engine_loads_at_another_stage_on_other_ranks(saved: tuple[Path, dict[str, Any]], ranks: int) -> None:
    folder, _ = saved
    results = job(ranks, "load", folder, *CROSSED)
    check(results)


def test_engines_that_hold_their_state_in_ways_of_their_own_are_refused_by_name(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = saved
    shutil.copytree(folder / "zero1/run", tmp_path, dirs_exist_ok=True)
    found = job(1, "refused", tmp_path, "pipeline", "version")
    tested = "holdfast was tested with DeepSpeed 0.19.8, and this is 0.20.1"
    for kind, said in (("pipeline", "is a PipelineEngine"), ("version", tested)):
        assert len(found[kind]["errors"]) == 2, found
        assert all(text.startswith("[state.engine]") and said in text for text in found[kind]["errors"]), found
        assert not found[kind]["written"]


def plain() -> dict[str, Any]:
    """The same model without DeepSpeed, in fp32."""
    model = TiedNet()
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    scheduler = LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * len(GROUPS))
    return {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}


@pytest.mark.parametrize("case", ["zero1", "zero3", "bf16-optimizer"])
def test_a_plain_model_takes_the_state_of_an_engine_and_gives_it_back(
    saved: tuple[Path, dict[str, Any]], case: str
) -> None:
    folder, _ = saved
    parts = plain()
    chosen = [f"engine/{part}" for part in parts]
    holdfast.load(folder / case / "run", {"engine": parts}, select=chosen, cast="engine/model/frozen.weight")
    expected = torch.load(folder / case / "expected.pt", weights_only=False)
    model, optimizer = parts["model"], parts["optimizer"]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            slots = optimizer.state[parameter]
            assert torch.equal(parameter, expected["held"][f"{name}/master"])
            assert torch.equal(slots["exp_avg"], expected["held"][f"{name}/exp_avg"])
            assert torch.equal(slots["exp_avg_sq"], expected["held"][f"{name}/exp_avg_sq"])
            assert slots["step"] == 4
    model.frozen.to(torch.bfloat16)
    back = f"plain-{case}"
    holdfast.save(folder / back / "run", {"engine": parts, "epoch": 3}, 4)
    torch.save(expected, folder / back / "expected.pt")
    for target, found in job(3, "load", folder, *(f"{back}:{target}" for target in ("zero2", "zero3"))).items():
        assert (found["differing"], found["casts"]) == ([], []), target
        assert found["missing"] == [f"engine/engine/{name}" for name in COUNTERS], target


COUNTERS = ("global_samples", "global_steps", "micro_steps", "skipped_steps")


def test_the_example_of_the_guide_resumes_at_another_stage_on_other_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/deepspeed.md").read_text()
    (tmp_path / "train.py").write_text(page.split("```python\n")[1].split("```")[0])
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    printed = [line for line in page.splitlines() if re.match(r"ZeRO-[0-9], from step", line)]
    assert len(printed) == 2
    for ranks, line in zip((2, 3), printed, strict=True):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        done = subprocess.run(
            [*command, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-6000:]
        assert line in done.stdout
