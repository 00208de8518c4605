"""Engines with DeepSpeed's own experts go on with any number of expert-parallel ranks, and so do folders of DeepSpeed.

``make test-deepspeed`` runs these, in an environment of their own; see `expert_jobs`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.interop.test_deepspeed_engines import on_ranks

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]

CASES = [
    "zero0-ep2",
    "zero0-fp16-ep2",
    "zero0-bf16-ep2",
    "zero1-ep2",
    "zero2-ep2",
    "zero2-round-robin-ep2",
    "bf16-optimizer-ep2",
    "zero1-fp32-ep4",
]
BY_DATA = "zero1-ep2-data"


def job(ranks: int, verb: str, folder: Path, *cases: str) -> dict[str, Any]:
    """Run a job of `expert_jobs`, and return what it found."""
    on_ranks(ranks, "tests.interop.expert_jobs", verb, str(folder), *cases)
    found: dict[str, Any] = json.loads((folder / f"{verb}.json").read_text())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for case in (*CASES, BY_DATA):
        (folder / case).mkdir()
    # DeepSpeed makes the groups of ranks once for a process.
    for found in (job(4, "save", folder, *CASES), job(4, "save", folder, BY_DATA)):
        assert {case: each["during"] for case, each in found.items()} == {case: [] for case in found}
    return folder


def check(results: dict[str, Any]) -> None:
    for pair, found in results.items():
        assert found["compared"] == 210, pair
        assert (found["differing"], found["casts"], found["missing"]) == ([], [], []), pair
        assert found["values"] == [], (pair, found["here"], found["there"])
        assert found.get("after", []) == [], pair


def test_experts_go_from_two_ranks_to_one_and_to_four_and_go_on_alike_on_two(saved: Path) -> None:
    check(job(1, "load", saved, "zero1-ep2:zero1-ep1", "zero1-fp32-ep4:zero0-ep1", f"{BY_DATA}:zero2-ep1"))
    results = job(4, "load", saved, *(f"{case}:{case}" for case in CASES))
    check(results)
    assert all("after" in found for found in results.values())
    pairs = ("zero1-ep2:zero2-ep4", "zero2-ep2:bf16-optimizer-ep1", "zero2-round-robin-ep2:zero2-round-robin-ep4")
    check(job(4, "load", saved, *pairs, f"{BY_DATA}:zero1-ep2"))


def test_folders_of_deepspeed_with_experts_load_with_other_numbers_of_expert_parallel_ranks(saved: Path) -> None:
    check(job(1, "native", saved, "zero2-ep2:zero1-ep1", f"{BY_DATA}:zero2-ep1", "zero0-ep2:zero0-ep1"))
    pairs = ("zero1-ep2:zero2-ep4", "bf16-optimizer-ep2:zero1-ep1", "zero1-fp32-ep4:zero1-fp32-ep2")
    without_zero = ["zero0-ep2:zero0-ep4", "zero0-ep2:zero1-fp32-ep1", "zero0-ep2:zero0-ep2"]
    without_zero += ["zero0-fp16-ep2:zero0-fp16-ep1", "zero0-bf16-ep2:zero1-ep4"]
    check(job(4, "native", saved, *pairs, "zero2-ep2:zero2-ep2", f"{BY_DATA}:zero1-ep4", *without_zero))


@pytest.mark.parametrize("case", [*CASES, BY_DATA])
def test_every_tensor_of_a_folder_with_experts_is_read_bit_by_bit(saved: Path, case: str) -> None:
    view = holdfast.open(saved / case / "native")
    held: dict[str, torch.Tensor] = torch.load(saved / case / "expected.pt", weights_only=False)["held"]
    copies = "model/{}" if case == "zero0-ep2" else "module/{}"
    places = {"master": "model/{}", "kept": "model/{}", "module": copies}
    read = set()
    for key, tensor in held.items():
        name, kind = key.rsplit("/", 1)
        read.add(path := places.get(kind, f"optimizer/state/model/{{}}/{kind}").format(name))
        found = view[path][...]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), path
        assert torch.equal(found, tensor), path
    assert all(name in read or name.endswith("/step") for name in view.names())


def test_a_folder_that_lacks_experts_or_has_exchanged_them_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "zero1-ep2/native/global_step4", tmp_path / "folder"))
    first, second = (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    first.rename(tmp_path / "file")
    second.rename(first)
    (tmp_path / "file").rename(second)
    with pytest.raises(holdfast.CorruptError, match="was saved as bf16_zero_pp_rank_1_mp_rank_00_optim_states"):
        holdfast.open(folder)
    contents = [torch.load(file, weights_only=False) for file in (first, second)]
    for file, content in zip((first, second), contents, strict=True):  # as a program that renames in the archive, too
        torch.save(content, file)
    with pytest.raises(holdfast.CorruptError, match=r"holds other weights for .* than the file of that expert"):
        holdfast.open(folder)
    for file, content in zip((second, first), contents, strict=True):
        torch.save(content, file)
    (folder / "layer_1_expert_6_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(holdfast.CorruptError, match="lacks 1 file of 12 experts") as caught:
        holdfast.open(folder)
    assert caught.value.details == ("layer_1_expert_6_mp_rank_00_model_states.pt is missing",)
