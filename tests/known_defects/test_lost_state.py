"""Defects by which part of the training state never reached the checkpoint, or came back as something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import holdfast
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


class Sign(Optimizer):
    """An optimizer of the user's own: one slot, not named as Adam's are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the stub has overloads
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("trend", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)


def round_trip(tmp_path: Path, make: Callable[[list[nn.Parameter]], Optimizer]) -> tuple[Optimizer, Optimizer]:
    """An optimizer after a step, and a fresh one that was loaded from its checkpoint."""
    optimizers = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        optimizers.append((model, make(list(model.parameters()))))
    (model, saved), (other, fresh) = optimizers
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    saved.step()
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": saved}, 1)
    holdfast.load(tmp_path / "run", into={"model": other, "optimizer": fresh})
    return saved, fresh


def slots(optimizer: Optimizer) -> list[dict[str, list[float]]]:
    return [
        {name: slot.flatten().tolist() for name, slot in sorted(optimizer.state[parameter].items())}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), Sign], ids=["momentum", "own"])
def test_only_adam_is_known(tmp_path: Path, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    """Optimizers without ``exp_avg`` and ``exp_avg_sq`` end in a KeyError or lose their state.

    Seen in: DeepSpeed 0.19.6 (universal checkpoints of SGD, Lion, Muon).
    """
    saved, fresh = round_trip(tmp_path, make)
    assert slots(fresh) == slots(saved)
    assert all(slots(fresh))


def test_all_groups_get_the_hyper_parameters_of_the_first(tmp_path: Path) -> None:
    """Weight decay [0.1, 0.0] of two groups comes back as [0.1, 0.1].

    Seen in: DeepSpeed 0.19.6 (universal load under ZeRO-3).
    """
    saved, fresh = round_trip(
        tmp_path,
        lambda p: AdamW([{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:], "weight_decay": 0.0}], lr=0.3),
    )
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.1, 0.0]
    assert [{**group, "params": 0} for group in fresh.param_groups] == [
        {**group, "params": 0} for group in saved.param_groups
    ]


def test_an_empty_group_loses_its_hyper_parameters(tmp_path: Path) -> None:
    """A group without parameters comes back without ``betas``; the first step is a KeyError.

    Seen in: VeOmni, ByteDance-Seed/VeOmni#876 and #878.
    """
    empty: dict[str, Any] = {"params": [], "betas": (0.5, 0.75), "lr": 0.125}
    saved, fresh = round_trip(tmp_path, lambda p: AdamW([{"params": p}, empty.copy()], lr=0.25))
    assert fresh.param_groups[1]["betas"] == (0.5, 0.75)
    assert {**fresh.param_groups[1], "params": None} == {**saved.param_groups[1], "params": None}
    fresh.step()


def test_the_random_generator_starts_again(tmp_path: Path) -> None:
    """RNG state is not part of the checkpoint, so dropout and data order repeat what was seen already.

    Seen in: torchtitan#1194, torchtitan#291.
    """
    generator, into = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    torch.rand(7, generator=generator)
    holdfast.save(tmp_path / "run", {"data": generator}, 1)
    holdfast.load(tmp_path / "run", into={"data": into})
    assert torch.equal(torch.rand(9, generator=into), torch.rand(9, generator=generator))


class Loader:
    """A data loader with a position of its own."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.epoch, self.batch = epoch, batch

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "position": (self.batch, {"shard-7": self.batch * 2})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, (self.batch, _) = state["epoch"], state["position"]


def test_the_position_in_the_data_is_lost(tmp_path: Path) -> None:
    """Training goes on at the beginning of the epoch, or spends a day skipping what it has seen.

    Seen in: huggingface/transformers#11284, huggingface/accelerate#2016, torchtitan#279.
    """
    into = Loader(0, 0)
    holdfast.save(tmp_path / "run", {"loader": Loader(2, 1234)}, 1)
    holdfast.load(tmp_path / "run", into={"loader": into})
    assert (into.epoch, into.batch) == (2, 1234)


def test_the_schedule_starts_again(tmp_path: Path) -> None:
    """The learning rate jumps back to the start of its schedule: a spike in the loss.

    Seen in: torchtitan#1213.
    """
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [SGD([weight], lr=1.0) for weight in weights]
    schedulers = [StepLR(optimizer, step_size=1, gamma=0.5) for optimizer in optimizers]
    for _ in range(3):
        optimizers[0].step()
        schedulers[0].step()
    states = [
        {"weight": weight, "optimizer": optimizer, "scheduler": scheduler}
        for weight, optimizer, scheduler in zip(weights, optimizers, schedulers, strict=True)
    ]
    holdfast.save(tmp_path / "run", states[0], 3)
    holdfast.load(tmp_path / "run", into=states[1])
    optimizers[1].step()
    schedulers[1].step()
    assert schedulers[1].last_epoch == 4
    assert optimizers[1].param_groups[0]["lr"] == 1 / 16


def test_the_loss_scale_is_lost_or_an_object_to_unpickle(tmp_path: Path) -> None:
    """The loss scaler is a pickled object that the safe loader refuses, so that the scale starts again.

    Seen in: DeepSpeed 0.19.6 (`optim_states.pt` needs ``weights_only=False``).
    """
    saved, fresh = (torch.amp.GradScaler("cpu", init_scale=2.0**n, growth_interval=5) for n in (9, 3))
    holdfast.save(tmp_path / "run", {"scaler": saved}, 1)
    holdfast.load(tmp_path / "run", into={"scaler": fresh})
    assert fresh.state_dict() == saved.state_dict()
    assert fresh.get_scale() == 2.0**9


class Counting(nn.Module):
    """A module with state that is no tensor."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def get_extra_state(self) -> dict[str, object]:
        return {"calls": self.calls, "amax": torch.full((2,), float(self.calls))}

    def set_extra_state(self, state: Any) -> None:
        assert state["amax"].tolist() == [float(state["calls"])] * 2
        self.calls = state["calls"]


def test_extra_state_cannot_be_loaded(tmp_path: Path) -> None:
    """A module's extra state is saved in a way that the loader of a newer torch refuses.

    Seen in: ByteCheckpoint 0.0.3 on torch >= 2.6.
    """
    into = nn.Sequential(Counting(0))
    holdfast.save(tmp_path / "run", {"model": nn.Sequential(Counting(41))}, 1)
    holdfast.load(tmp_path / "run", into={"model": into})
    assert cast("Counting", into[0]).calls == 41


def test_unusual_numbers_come_back_as_others(tmp_path: Path) -> None:
    """Plain values need a pickle that runs code when it is loaded; without it inf, -0.0 or 2**70 are lost.

    Seen in: PyTorch DCP 2.13 (`torch.load` with ``weights_only=False`` for every value).
    """
    values = {"best": float("inf"), "tokens": 2**70, "zero": -0.0, "none": None, "shape": torch.Size([2, 3])}
    into: dict[str, Any] = dict.fromkeys(values)
    holdfast.save(tmp_path / "run", {"progress": values}, 1)
    holdfast.load(tmp_path / "run", into={"progress": into})
    assert repr(into) == repr(values)


def stages(*numbers: int) -> dict[str, Any]:
    """The modules of some pipeline stages and their optimizer, with a group for weights and one for biases."""
    model = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in numbers})
    weights = [layer.get_parameter("weight") for layer in model.values()]
    biases = [layer.get_parameter("bias") for layer in model.values()]
    optimizer = AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}], lr=0.25)
    for number, layer in zip(numbers, model.values(), strict=True):
        for parameter in layer.parameters():
            parameter.data.fill_(number)
            parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_stage(run: str) -> None:
    start_new_job()
    holdfast.save(run, stages(torch.distributed.get_rank()), 1, timeout_s=30)


def test_groups_of_pipeline_stages_collide(tmp_path: Path) -> None:
    """Every stage numbers its parameters and groups from 0; state of one stage replaces that of the others.

    Seen in: PyTorch DCP, pytorch/pytorch#127071 and #126595.
    """
    run_ranks(2, save_stage, str(tmp_path / "run"))
    saved, into = stages(0, 1), stages(3, 4)
    into["model"] = nn.ModuleDict(dict(zip("01", into["model"].values(), strict=True)))
    into["optimizer"].param_groups[1]["lr"] = 9.0
    holdfast.load(tmp_path / "run", into=into)
    assert slots(into["optimizer"]) == slots(saved["optimizer"])
    assert [group["lr"] for group in into["optimizer"].param_groups] == [0.25, 0.5]
    for ours, theirs in zip(into["model"].parameters(), saved["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
