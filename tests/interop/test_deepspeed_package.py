"""Folders that the real DeepSpeed writes in this very run are read to the bits that its engine holds.

``make test-deepspeed`` runs these, in an environment of their own. The fixtures of `test_deepspeed` are such folders.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from tests.interop.test_deepspeed_engines import written

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(300)]

#: Cases of `write_deepspeed`, and on how many ranks each is written; without the one that needs a compiler.
WRITTEN = [
    ("zero1", 2),
    ("zero1", 3),
    ("zero1-fp32", 3),
    ("zero1-aligned", 2),
    ("zero1-elastic", 3),
    ("zero2", 3),
    ("zero2-round-robin", 2),
    ("zero2-round-robin", 3),
    ("bf16-optimizer", 3),
    ("zero3", 1),
    ("zero3", 2),
    ("zero3", 3),
]


@pytest.mark.parametrize(("case", "ranks"), WRITTEN)
def test_a_folder_that_deepspeed_has_just_written_is_read_bit_by_bit(tmp_path: Path, case: str, ranks: int) -> None:
    folder = written(tmp_path, case, ranks)
    view = holdfast.open(folder)
    found: dict[str, torch.Tensor] = torch.load(folder / "expected.pt", weights_only=True)
    assert len(found) >= 30
    for key, tensor in found.items():
        name, kind = key.rsplit("/", 1)
        places = {"master": f"model/{name}", "kept": f"model/{name}", "module": f"module/{name}"}
        read = view[places.get(kind, f"optimizer/state/model/{name}/{kind}")][...]
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
    assert view.value("engine/global_steps") == 4


@pytest.mark.parametrize("case", ["zero1-tensor-rates", "zero3-tensor-rates"])
def test_a_hyper_parameter_that_is_a_tensor_is_read_from_the_file_of_the_optimizer(tmp_path: Path, case: str) -> None:
    folder = written(tmp_path, case, 2)
    view = holdfast.open(folder)
    (file,) = folder.glob("global_step4/*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    outer = torch.load(file, weights_only=False)["optimizer_state_dict"]
    inner = outer["optimizer_state_dict" if case.startswith("zero3") else "base_optimizer_state"]
    for index, group in enumerate(inner["param_groups"]):
        assert isinstance(group["lr"], torch.Tensor)
        assert torch.equal(view[f"optimizer/param_groups/{index}/lr"][...], group["lr"])
