"""Defects by which a load left something as it was, or dropped it, and said nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import holdfast
from holdfast import IncompatibleError, NotFoundError, PerRank
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def stepped(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.5 + number)
    optimizer.step()


def test_a_tensor_that_the_checkpoint_lacks_keeps_what_it_had(tmp_path: Path) -> None:
    """The target has a tensor that the checkpoint lacks: it keeps its initial values, without an error or a warning.

    Seen in: PyTorch DCP 2.13 (chunks missing in the metadata), torch_checkpointing 0.1 (`strict=False` by default).
    """
    holdfast.save(tmp_path / "run", {"weight": torch.ones(2)}, 1)
    into = {"weight": torch.zeros(2), "bias": torch.zeros(2)}
    with pytest.raises(IncompatibleError, match=r"1 missing from the checkpoint: bias"):
        holdfast.load(tmp_path / "run", into=into)
    assert into["weight"].tolist() == [0, 0]  # refused before anything was touched


def test_a_tensor_that_nobody_asked_for_is_ignored(tmp_path: Path) -> None:
    """The checkpoint has a tensor that the target lacks, as after a rename: ignored, always.

    Seen in: PyTorch DCP 2.13, pytorch/pytorch#190389.
    """
    holdfast.save(tmp_path / "run", {"weight": torch.ones(2), "bias": torch.ones(2)}, 1)
    with pytest.raises(IncompatibleError, match="bias"):
        holdfast.load(tmp_path / "run", into={"weight": torch.zeros(2)})


def test_not_strict_has_no_effect_and_no_report(tmp_path: Path) -> None:
    """With ``strict=False`` missing keys still raise; elsewhere nothing says what was left out.

    Seen in: ByteCheckpoint 0.0.3 (passed on in the wrong position), pytorch/pytorch#148252.
    """
    holdfast.save(tmp_path / "run", {"weight": torch.ones(2), "old": torch.ones(2), "epoch": 3}, 1)
    into: dict[str, Any] = {"weight": torch.zeros(2), "new": torch.zeros(2), "epoch": 0}
    report = holdfast.load(tmp_path / "run", into=into, strict=False)
    assert (report.loaded, report.missing, report.unexpected) == (("epoch", "weight"), ("new",), ("old",))
    assert into["weight"].tolist() == [1, 1]
    assert into["epoch"] == 3


def test_frozen_parameters_are_not_saved(tmp_path: Path) -> None:
    """Parameters without gradient, as under LoRA, come back at their initial values.

    Seen in: DeepSpeed 0.19.6 (universal load), deepspeedai/DeepSpeed#3090; pytorch/pytorch#192202.
    """
    saved, fresh = nn.Linear(3, 2), nn.Linear(3, 2)
    for model in (saved, fresh):
        model.weight.requires_grad_(False)
    holdfast.save(tmp_path / "run", {"model": saved, "optimizer": SGD([saved.bias], lr=0.1)}, 1)
    holdfast.load(tmp_path / "run", into={"model": fresh, "optimizer": SGD([fresh.bias], lr=0.1)})
    assert torch.equal(fresh.weight, saved.weight)
    assert torch.equal(fresh.bias, saved.bias)


def test_buffers_are_not_saved(tmp_path: Path) -> None:
    """Running statistics and other buffers come back at their initial values.

    Seen in: DeepSpeed 0.19.6 (universal load).
    """
    saved, fresh = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    saved(torch.randn(8, 3))
    holdfast.save(tmp_path / "run", {"model": saved}, 1)
    holdfast.load(tmp_path / "run", into={"model": fresh})
    assert torch.equal(fresh.get_buffer("running_mean"), saved.get_buffer("running_mean"))
    assert fresh.get_buffer("num_batches_tracked").item() == 1


def test_state_that_does_not_exist_yet_is_not_loaded(tmp_path: Path) -> None:
    """A fresh optimizer has no moments to load into, so they are left out, silently.

    Seen in: PyTorch DCP, pytorch/pytorch#126881 (lazily initialised objects).
    """
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [AdamW(model.parameters()) for model in (saved, fresh)]
    stepped(list(saved.parameters()), optimizers[0])
    holdfast.save(tmp_path / "run", {"model": saved, "optimizer": optimizers[0]}, 1)
    holdfast.load(tmp_path / "run", into={"model": fresh, "optimizer": optimizers[1]})
    for name in ("weight", "bias"):
        ours, theirs = (o.state[getattr(m, name)] for m, o in ((saved, optimizers[0]), (fresh, optimizers[1])))
        assert ours.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(ours[slot], theirs[slot]) for slot in ours)


def test_an_optimizer_without_state_gets_some(tmp_path: Path) -> None:
    """SGD without momentum comes back with empty entries that it never had.

    Seen in: PyTorch DCP, pytorch/pytorch#192225.
    """
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (saved, fresh)]
    stepped(list(saved.parameters()), optimizers[0])
    holdfast.save(tmp_path / "run", {"model": saved, "optimizer": optimizers[0]}, 1)
    holdfast.load(tmp_path / "run", into={"model": fresh, "optimizer": optimizers[1]})
    assert optimizers[1].state_dict()["state"] == optimizers[0].state_dict()["state"]


def test_equal_numbers_of_elements_hide_a_wrong_axis(tmp_path: Path) -> None:
    """A transposed or otherwise reshaped target of as many elements is filled in the wrong order.

    Seen in: DeepSpeed 0.19.6 (a comparison of `numel` is the only guard of a universal load).
    """
    holdfast.save(tmp_path / "run", {"weight": torch.arange(6.0).reshape(2, 3)}, 1)
    for shape in ((3, 2), (6,), (1, 6)):
        into = torch.zeros(shape)
        with pytest.raises(IncompatibleError, match=r"\(2, 3\) in the checkpoint"):
            holdfast.load(tmp_path / "run", into={"weight": into})
        assert not into.any()


def test_resuming_from_nothing_starts_from_scratch(tmp_path: Path) -> None:
    """The path is mistyped, or nothing was committed: the load finds nothing and training starts from scratch.

    Seen in: DeepSpeed, deepspeedai/DeepSpeed#6691; DLRover (loads ``{}``); Hugging Face Accelerate#2016.
    """
    holdfast.save(tmp_path / "gpt-7b", {"weight": torch.ones(2)}, 1)
    with pytest.raises(NotFoundError, match="Did you mean 'gpt-7b'"):
        holdfast.load(tmp_path / "gpt7b", into={"weight": torch.zeros(2)})
    (tmp_path / "gpt-7b" / "history").rename(tmp_path / "gpt-7b" / "elsewhere")
    with pytest.raises(holdfast.HoldfastError):
        holdfast.load(tmp_path / "gpt-7b", into={"weight": torch.zeros(2)})


def save_streams(run: str) -> None:
    start_new_job()
    rank = dist.get_rank()
    loader = PerRank({"cursor": 100 + rank, "rng": torch.full((3,), rank, dtype=torch.uint8)})
    holdfast.save(run, {"loader": loader}, 1, timeout_s=30)


def load_streams(run: str) -> str:
    start_new_job()
    loader = PerRank({"cursor": -1, "rng": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(IncompatibleError) as raised:
        holdfast.load(run, into={"loader": loader}, timeout_s=30)
    assert loader.value["cursor"] == -1
    return raised.value.message


@pytest.mark.parametrize(("num_saving", "num_loading"), [(3, 2), (2, 3)], ids=["lost", "repeated"])
def test_state_of_a_rank_is_lost_or_repeated_on_another_number_of_ranks(
    tmp_path: Path, num_saving: int, num_loading: int
) -> None:
    """On fewer ranks the positions of some data streams vanish; on more, new ranks get a copy of rank 0's RNG.

    Seen in: torchtitan#816 (``dp_rank_2`` lost), NVIDIA-NeMo/Megatron-Bridge#5637, ByteCheckpoint 0.0.3 (growth).
    """
    run_ranks(num_saving, save_streams, str(tmp_path / "run"))
    for message in run_ranks(num_loading, load_streams, str(tmp_path / "run")):
        assert "loader" in message
        assert str(num_saving) in message
        assert str(num_loading) in message


def load_with_a_tensor_of_its_own(run: str) -> str:
    start_new_job()
    into = {"weight": torch.zeros(2)} | ({"extra": torch.zeros(1)} if dist.get_rank() == 1 else {})
    with pytest.raises(IncompatibleError) as raised:
        holdfast.load(run, into=into, timeout_s=30)
    assert not into["weight"].any()
    return raised.value.message


def test_only_the_rank_that_misses_a_name_notices(tmp_path: Path) -> None:
    """A name is missing for one rank only: that one fails or stays as it is, the others go on.

    Seen in: PyTorch DCP 2.13 (no check that all ranks ask for the same keys).
    """
    holdfast.save(tmp_path / "run", {"weight": torch.ones(2)}, 1)
    messages = run_ranks(2, load_with_a_tensor_of_its_own, str(tmp_path / "run"))
    assert all("extra" in message for message in messages)
