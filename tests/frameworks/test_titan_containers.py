"""The adapters for torchtitan's containers, with objects of the same shape. `test_torchtitan_jobs` has real ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

import holdfast
from holdfast.errors import IncompatibleError, StateError
from tests.support.bound import bits


class ModelWrapper:
    def __init__(self, *parts: nn.Module) -> None:
        self.model = list(parts)


class OptimizersContainer(Optimizer):
    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        parameters = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        super().__init__(parameters, {})

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("no save asks for it")

    def init_cache_state_dict(self) -> None:
        """Torchtitan's does nothing."""


class StatefulLoader(DataLoader[int]):
    position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class ParallelAwareDataloader(StatefulLoader):
    def __init__(self, dp_rank: int, dp_world_size: int) -> None:
        super().__init__([1, 2])  # type: ignore[arg-type]
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size

    def state_dict(self) -> dict[str, int]:
        raise AssertionError("it is pickled")


class Trainer:
    step = ntokens_seen = 0

    def __init__(self, num_counters: int | None) -> None:
        mesh = None if num_counters is None else SimpleNamespace(size=lambda: num_counters)
        self.parallel_dims = SimpleNamespace(get_optional_mesh=lambda name: mesh)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


for kind, module in (
    (ModelWrapper, "torchtitan.components.checkpointer.base"),
    (OptimizersContainer, "torchtitan.components.optimizer.optimizer"),
    (ParallelAwareDataloader, "torchtitan.components.dataloader"),
    (Trainer, "torchtitan.trainer"),
):
    kind.__module__ = module


class Part(nn.Module):
    """Some layers of the whole model, with their numbers there."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in numbers})


def job(*parts: tuple[int, ...], classes: tuple[type[Optimizer], ...] = (AdamW,), seed: int) -> dict[str, Any]:
    """A job that has done two steps, with the given layers in each part of its model."""
    torch.manual_seed(seed)
    models = [Part(*numbers) for numbers in parts]
    optimizers = []
    for model in models:
        layers = [(int(number), layer) for number, layer in model.layers.items()]
        groups: list[Any] = [[layer for number, layer in layers if number % 2 == odd] for odd in (0, 1)]
        makers: list[Any] = [*classes]
        for number, make in enumerate(makers):
            even, odd = (
                [each for layer in group for each in list(layer.parameters())[number :: len(classes)]]
                for group in groups
            )
            optimizers.append(make([{"params": even}, {"params": odd, "lr": 0.5}], lr=0.01 * seed))
    for _ in range(2):
        for parameter in (each for model in models for each in model.parameters()):
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return {"model": ModelWrapper(*models), "optimizer": OptimizersContainer(optimizers)}


def stored(run: Path) -> dict[str, object]:
    view = holdfast.open(run)
    tensors: dict[str, object] = {name: bits(view[name][...]) for name in view.names()}
    return tensors | {name: view.value(name) for name in view.value_names()}


@pytest.mark.parametrize("classes", [(AdamW,), (AdamW, SGD)], ids=["one class", "two classes"])
def test_parts_of_a_model_load_into_other_parts_with_their_optimizers(
    tmp_path: Path, classes: tuple[type[Optimizer], ...]
) -> None:
    one = job((0, 1, 2, 3, 4, 5), classes=classes, seed=1)
    holdfast.save(tmp_path / "one", one, 0)
    for name, parts in (("two", [(0, 1, 2), (3, 4, 5)]), ("three", [(5, 2), (0, 1), (4, 3)])):
        other = job(*parts, classes=classes, seed=2)
        holdfast.load(tmp_path / "one", into=other)
        assert [group["lr"] for each in other["optimizer"].optimizers for group in each.param_groups[:1]] == [
            0.01
        ] * len(other["optimizer"].optimizers)
        holdfast.save(tmp_path / name, other, 0)
        assert stored(tmp_path / name) == stored(tmp_path / "one")
        again = job((0, 1, 2, 3, 4, 5), classes=classes, seed=3)
        holdfast.load(tmp_path / name, into=again)
        holdfast.save(tmp_path / f"from-{name}", again, 0)
        assert stored(tmp_path / f"from-{name}") == stored(tmp_path / "one")


def test_one_part_has_the_names_of_a_plain_model_and_optimizer(tmp_path: Path) -> None:
    state = job((0, 1), seed=1)
    holdfast.save(tmp_path / "run", state, 0)
    plain = Part(0, 1)
    optimizer = AdamW([{"params": list(plain.layers[number].parameters())} for number in ("0", "1")])
    holdfast.load(tmp_path / "run", into={"model": plain, "optimizer": optimizer})
    for mine, theirs in zip(plain.parameters(), state["model"].model[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
        (of_theirs,) = (each.state[theirs] for each in state["optimizer"].optimizers)
        assert torch.equal(optimizer.state[mine]["exp_avg"], of_theirs["exp_avg"])


def test_steps_of_each_inner_optimizer_wait_for_a_copy(tmp_path: Path, node_dir: Path) -> None:
    state = job((0, 1), (2, 3), seed=1)
    memory = holdfast.Memory(node_dir=node_dir)
    with holdfast.Checkpointer(tmp_path / "run", state, memory=memory) as checkpointer:
        checkpointer.save(0)
        assert all(len(each._optimizer_step_pre_hooks) for each in state["optimizer"].optimizers)


def test_optimizers_of_parts_with_other_hyper_parameters_are_refused(tmp_path: Path) -> None:
    state = job((0, 1), (2, 3), seed=1)
    state["optimizer"].optimizers[1].param_groups[0]["lr"] = 7.0
    with pytest.raises(StateError, match="different hyper-parameters") as caught:
        holdfast.save(tmp_path / "run", state, 0)
    assert caught.value.code == "state.optimizer"


def test_the_position_of_a_loader_belongs_to_a_data_parallel_rank(tmp_path: Path) -> None:
    loader = ParallelAwareDataloader(0, 1)
    loader.position = 5
    holdfast.save(tmp_path / "run", {"data": loader}, 0)
    assert {name: value for name, value in stored(tmp_path / "run").items() if "position" in name} == {
        "data/dp_rank_0/position": 5
    }
    holdfast.load(tmp_path / "run", into={"data": (fresh := ParallelAwareDataloader(0, 1))})
    assert fresh.position == 5
    with pytest.raises(IncompatibleError, match="of 1 data-parallel rank, to be loaded by 2") as caught:
        holdfast.load(tmp_path / "run", into={"data": ParallelAwareDataloader(0, 2)})
    assert caught.value.code == "incompatible.per_rank"


def test_the_tokens_of_all_ranks_are_stored_and_divided_anew(tmp_path: Path) -> None:
    trainer = Trainer(4)
    trainer.step, trainer.ntokens_seen = 3, 30
    holdfast.save(tmp_path / "run", {"train_state": trainer}, 3)
    assert holdfast.open(tmp_path / "run").value("train_state/ntokens_seen") == 120
    for num_counters, share in ((3, 40), (None, 120)):
        other = Trainer(num_counters)
        holdfast.load(tmp_path / "run", into={"train_state": other})
        assert (other.step, other.ntokens_seen) == (3, share)
