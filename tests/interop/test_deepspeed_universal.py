"""Stock DeepSpeed loads the universal folders that holdfast exports, at each stage and on other numbers of ranks.

``make test-deepspeed`` runs these, in an environment of their own. `tests/exporting/test_universal_folder.py` has a
core of them without DeepSpeed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from tests.interop.deepspeed_model import TWO_GROUPS, TiedNet, grouped
from tests.interop.test_deepspeed_engines import job, written

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]

SAVED = [
    *("zero1-two", "zero2-two", "zero2-round-robin-two", "zero3-two", "zero3-fp16-two", "bf16-optimizer-two"),
    "zero1-fp16-two",
]
CROSSED = [
    *(
        "zero1-two:zero1-two",
        "zero1-two:zero2-two",
        "zero1-two:zero3-two",
        "zero2-two:zero2-two",
        "zero2-two:zero3-two",
    ),
    *("zero3-two:zero3-two", "zero3-two:zero1-two", "zero3-two:zero2-two", "zero3-two:bf16-optimizer-two"),
    *("bf16-optimizer-two:bf16-optimizer-two", "bf16-optimizer-two:zero3-two", "zero3-fp16-two:zero3-fp16-two"),
    *("zero2-round-robin-two:zero1-fp16-two", "zero2-round-robin-two:zero3-fp16-two", "zero3-fp16-two:zero1-fp16-two"),
]
#: Cases of `write_deepspeed`, whose folders become universal ones, and the targets of each.
NATIVE = {
    "zero1-two": ("zero1-two", "zero3-two"),
    "zero2-round-robin-two": ("zero1-fp16-two", "zero3-fp16-two"),
    "zero3-two": ("zero2-two", "zero3-two"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of engines on two ranks, each with a universal folder beside it."""
    folder = tmp_path_factory.mktemp("universal")
    for case in SAVED:
        (folder / case).mkdir()
    job(2, "save", folder, *SAVED)
    for case in SAVED:
        holdfast.export(folder / case / "run", folder / case / "universal", "deepspeed-universal")
    return folder


def check(results: dict[str, Any]) -> None:
    for pair, found in results.items():
        assert found["compared"] >= 27, pair
        assert (found["differing"], found["casts"], found["kept"]) == ([], [], []), pair
        assert found["values"], (pair, found["here"], found["there"])
        assert found["epoch"] == 3, pair


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stock_deepspeed_loads_an_export_at_each_stage(saved: Path, ranks: int) -> None:
    check(job(ranks, "stock", saved, *CROSSED))


def test_stock_deepspeed_goes_on_to_the_bits_of_the_engine_that_was_saved(saved: Path) -> None:
    cases = ("zero1-two", "zero2-two", "zero3-two", "zero3-fp16-two", "zero1-fp16-two", "bf16-optimizer-two")
    results = job(2, "stock", saved, *(f"{case}:{case}" for case in cases))
    check(results)
    assert {pair: found["after"] for pair, found in results.items()} == {f"{case}:{case}": [] for case in cases}


def check_native(results: dict[str, Any], scale: list[float] | None) -> None:
    for pair, found in results.items():
        assert found["compared"] >= 27, pair
        assert (found["differing"], found["casts"], found["missing"]) == ([], [], []), pair
        assert (found["counters"], found["epoch"], found["steps"], found["scheduler"]) == ([4, 24, 0, 4], 3, [4], 4), (
            pair
        )
        assert (found["rates"], found["scale"]) == ([0.01 / 5, 0.02 / 5], scale), pair


@pytest.mark.parametrize("case", NATIVE)
def test_a_live_engine_goes_on_from_folders_of_deepspeed_at_other_stages(tmp_path: Path, case: str) -> None:
    folder = written(tmp_path, case, 3)
    pairs = [f"{folder.name}:{target}" for target in NATIVE[case]]
    scale = [32.0, 4] if "round-robin" in case else None
    check_native(job(2, "native", tmp_path, *pairs), scale)
    tag = folder / "global_step4"
    (folder / "latest").unlink()
    shutil.move(tag, tmp_path / "moved")
    if "round-robin" not in case:  # DeepSpeed's converter mixes up parameters there
        convert(tmp_path / "moved", folder / "converted")
        check_native(job(2, "native", tmp_path, *pairs), scale)
        shutil.rmtree(folder / "converted")
    chosen = ["model", "optimizer", "lr_scheduler", "engine", "scaling", "client_state/epoch"]
    holdfast.export(tmp_path / "moved", tmp_path / "universal", "deepspeed-universal", select=chosen)
    shutil.copytree(tmp_path / "universal", folder, dirs_exist_ok=True)
    check_native(job(2, "native", tmp_path, *pairs), scale)


def convert(tag: Path, target: Path) -> None:
    """Convert a folder by DeepSpeed's own program."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(tag), "--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})


@pytest.mark.parametrize("case", NATIVE)
def test_a_native_folder_goes_on_at_other_stages_on_other_ranks(tmp_path: Path, case: str) -> None:
    folder = written(tmp_path, case, 3)
    chosen = ["model", "optimizer", "lr_scheduler", "engine", "scaling", "client_state/epoch"]
    holdfast.export(folder, folder / "universal", "deepspeed-universal", select=chosen)
    held = torch.load(folder / "expected.pt", weights_only=True)
    torch.save({"held": held, "values": None, "ranks": 3}, folder / "expected.pt")
    for pair, found in job(2, "stock", tmp_path, *(f"{folder.name}:{target}" for target in NATIVE[case])).items():
        assert (found["differing"], found["casts"], found["kept"]) == ([], [], []), pair
        assert (found["epoch"], found["counters"]) == (3, [4, 24, 0]), pair


def test_a_plain_training_goes_on_in_stock_deepspeed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TiedNet()
    optimizer = torch.optim.AdamW(grouped(model, TWO_GROUPS), lr=1e-2)
    scheduler = LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * len(TWO_GROUPS))
    model(torch.arange(6).reshape(2, 3)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "epoch": 3}
    (tmp_path / "plain").mkdir()
    holdfast.save(tmp_path / "run", state, 1)
    holdfast.export(tmp_path / "run", tmp_path / "plain/universal", "deepspeed-universal")
    held = {
        f"{name}/kept": tensor
        for name, tensor in (*model.named_buffers(), ("frozen.weight", model.frozen.weight.bfloat16()))
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            held[f"{name}/master"] = parameter.detach()
            held |= {f"{name}/{slot}": optimizer.state[parameter][slot] for slot in ("exp_avg", "exp_avg_sq")}
    torch.save({"held": held, "values": None, "ranks": 1}, tmp_path / "plain/expected.pt")
    for pair, found in job(2, "stock", tmp_path, "plain:zero1-two", "plain:zero3-two").items():
        assert (found["differing"], found["casts"]) == ([], []), pair
        assert (found["epoch"], found["counters"]) == (3, [1, 0, 0]), pair
