"""Adapters for objects of other libraries, and the errors for objects that no adapter fits.

(The libraries themselves are in `test_frameworks`.)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader

import holdfast
from holdfast import IncompatibleError, StateError
from tests.state.test_flatten import refusal
from tests.support.bound import bits, load, save

# --- numpy and random generators -------------------------------------------------------------------------------------


def arrays() -> dict[str, Any]:
    return {
        "whole": np.arange(12, dtype=np.float32).reshape(3, 4),
        "columns": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.uint32),
        "flags": np.array([True, False]),
        "complex": np.array([1 + 2j], np.complex64),
        "listed": [np.ones(2), "text"],
    }


def test_arrays_are_saved_and_filled_in_place(tmp_path: Path) -> None:
    state = arrays()
    holdfast.save(tmp_path / "run", state, 1)
    into = arrays()
    held = {**into, "listed": into["listed"][0]}
    for array in held.values():
        array[...] = 0
    report = holdfast.load(tmp_path / "run", into)
    assert set(report.loaded) == {*(held.keys() - {"listed"}), "listed/0", "listed/1"}
    for name, array in held.items():
        saved = state[name][0] if name == "listed" else state[name]
        assert (into[name][0] if name == "listed" else into[name]) is array
        assert (array.dtype, array.shape, array.tobytes()) == (saved.dtype, saved.shape, saved.tobytes()), name


def test_an_array_that_torch_cannot_write_to_is_saved_as_it_is_and_replaced() -> None:
    frozen = np.arange(4)
    frozen.flags.writeable = False
    into: dict[str, object] = {"frozen": np.zeros(4, np.int64)[::-1], "turned": np.zeros(3)}
    load(save({"frozen": frozen, "turned": np.arange(3.0)[::-1]}), into)
    assert [array.tolist() for array in into.values() if isinstance(array, np.ndarray)] == [[0, 1, 2, 3], [2, 1, 0]]


def test_an_array_of_another_shape_or_dtype_is_refused() -> None:
    saved = save({"a": np.zeros(3, np.float32)})
    for array, code in ((np.zeros(4, np.float32), "incompatible.shape"), (np.zeros(3), "incompatible.dtype")):
        with pytest.raises(IncompatibleError) as caught:
            load(saved, {"a": array})
        assert caught.value.code == code


def test_an_array_where_a_value_is_stored_is_refused() -> None:
    with pytest.raises(IncompatibleError) as caught:
        load(save({"a": 1}), {"a": np.zeros(1)})
    assert caught.value.code == "incompatible.kind"


def test_views_give_arrays(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", arrays(), 1)
    view = holdfast.open(tmp_path / "run")
    assert view["whole"].shape == (3, 4)
    value, tree = view.value("whole"), view.tree("listed")
    assert isinstance(value, np.ndarray)
    assert value.tolist() == arrays()["whole"].tolist()
    assert isinstance(tree, list)
    assert isinstance(tree[0], np.ndarray)


def test_what_an_object_says_of_itself_may_hold_arrays() -> None:
    class Sampler:
        order = np.arange(5)

        def state_dict(self) -> dict[str, object]:
            return {"order": self.order}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.order = state["order"]

    sampler = Sampler()
    sampler.order = np.array([3, 1, 2, 0, 4])
    into = Sampler()
    load(save({"sampler": sampler}), {"sampler": into})
    assert into.order.tolist() == [3, 1, 2, 0, 4]


GENERATORS: dict[str, Callable[[int], Any]] = {
    "python": random.Random,
    "numpy": np.random.default_rng,
    "legacy": np.random.RandomState,
    "bits": np.random.MT19937,
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
}


def draws(generator: Any) -> str:
    """With what a normal draw leaves behind."""
    if isinstance(generator, np.random.MT19937):
        return repr(generator.random_raw(5))
    normal = generator.gauss if isinstance(generator, random.Random) else generator.normal
    return repr([normal(0, 1), *(generator.random() for _ in range(5))])


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_goes_on_where_it_was(kind: str) -> None:
    generator, into = GENERATORS[kind](1), GENERATORS[kind](2)
    draws(generator)
    saved = save({"generator": generator})
    state: dict[str, object] = {"generator": into}
    load(saved, state)
    assert state["generator"] is into
    assert draws(into) == draws(generator)


def test_the_states_of_global_generators_are_plain_values() -> None:
    state: dict[str, object] = {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002 - the global generator
    into: dict[str, object] = {"python": random.Random(1).getstate(), "numpy": np.random.RandomState(1).get_state()}
    load(save(state), into)
    random.setstate(into["python"])  # type: ignore[arg-type]
    assert into["python"] == state["python"]
    assert repr(into["numpy"]) == repr(state["numpy"])


# --- code of objects in the state ------------------------------------------------------------------------------------


class Faulty:
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def state_dict(self) -> dict[str, object]:
        if self.fault == "save":
            raise KeyError("batch")
        return {"batch": 3}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if self.fault == "load":
            raise KeyError("sample")


def test_an_object_whose_state_dict_fails_is_named() -> None:
    error = refusal({"data": {"loader": Faulty("save")}})
    assert (error.code, error.path) == ("state.object", "data/loader")
    assert "Faulty.state_dict() raised KeyError: 'batch'" in error.message


def test_an_object_that_refuses_what_is_stored_is_named(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"loader": Faulty("")}, 1)
    with pytest.raises(IncompatibleError, match=r"Faulty.load_state_dict\(\) raised KeyError: 'sample'") as caught:
        holdfast.load(tmp_path / "run", {"loader": Faulty("load")})
    assert caught.value.code == "incompatible.object"


class NotedLayer(nn.Linear):
    def get_extra_state(self) -> object:
        if self.training:
            raise RuntimeError("not while training")
        return 1

    def set_extra_state(self, state: object) -> None:
        raise RuntimeError("never")


def test_a_module_whose_extra_state_fails_is_named() -> None:
    assert refusal({"model": NotedLayer(1, 1)}).code == "state.object"
    layer = NotedLayer(1, 1).eval()
    with pytest.raises(IncompatibleError, match=r"NotedLayer.set_extra_state\(\)") as caught:
        load(save({"model": layer}), {"model": layer})
    assert caught.value.code == "incompatible.object"


def test_a_scaler_that_was_saved_disabled_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    weight = torch.ones(3)
    off, on = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True))
    holdfast.save(tmp_path / "run", {"weight": weight, "scaler": off}, 1)
    into: dict[str, Any] = {"weight": torch.zeros(3), "scaler": on}
    with pytest.raises(IncompatibleError, match="GradScaler") as caught:
        holdfast.load(tmp_path / "run", into)
    assert caught.value.code == "incompatible.no_state"
    assert not into["weight"].any()
    holdfast.load(tmp_path / "run", into, select="!scaler")
    assert bits(into["weight"]) == bits(weight)
    holdfast.load(tmp_path / "run", {"weight": torch.zeros(3), "scaler": off})


# --- wrappers --------------------------------------------------------------------------------------------------------


class Wrapping(Optimizer):
    """As wrappers of optimizers are written: of the type, without its constructor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups


def test_a_wrapper_of_an_optimizer_that_nobody_knows_is_refused() -> None:
    model = nn.Linear(1, 1)
    error = refusal({"model": model, "optimizer": Wrapping(SGD(model.parameters()))})
    assert (error.code, error.path) == ("state.optimizer", "optimizer")
    assert "inner optimizer" in error.action


def test_a_loader_that_does_not_say_where_it_is_is_refused_with_one_that_does() -> None:
    error = refusal({"loader": DataLoader([1, 2])})  # type: ignore[arg-type]
    assert error.code == "state.unsupported_leaf"
    assert "StatefulDataLoader" in error.action


def test_a_module_that_rewrites_its_state_can_be_saved_by_what_it_says() -> None:
    class Packed(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "packed"] = self.weight.detach() * 2

    module = Packed(2, 2)
    assert "module.state_dict()" in refusal({"model": module}).action
    into: dict[str, object] = {"model": {name: torch.zeros_like(item) for name, item in module.state_dict().items()}}
    load(save({"model": dict(module.state_dict())}), into)
    assert bits(into["model"]["packed"]) == bits(module.weight.detach() * 2)  # type: ignore[index]


# --- bitsandbytes, which runs on GPUs only: stand-ins of the same names ---------------------------------------------


class Linear4bit(nn.Linear):
    __module__ = "bitsandbytes.nn.modules"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.weight.detach().abs().max()


class Optimizer8bit(SGD):
    __module__ = "bitsandbytes.optim.optimizer"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "packed": True}


def test_weights_of_4_bits_are_refused_and_adapters_beside_them_are_saved(tmp_path: Path) -> None:
    model = nn.ModuleDict({"base": Linear4bit(2, 2), "lora_A": nn.Linear(2, 1)})
    error = refusal({"model": model})
    assert error.code == "state.module_hooks"
    assert 'select="**lora_*"' in error.action
    assert holdfast.save(tmp_path / "run", {"model": model}, 1, select="**lora_*").num_tensors == 2


def test_optimizers_of_8_bits_are_saved_as_others_are() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [Optimizer8bit(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    models[0](torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    saved = save({"model": models[0], "optimizer": optimizers[0]})
    load(saved, {"model": models[1], "optimizer": optimizers[1]})
    momenta = [
        optimizer.state[model.weight]["momentum_buffer"] for model, optimizer in zip(models, optimizers, strict=True)
    ]
    assert bits(momenta[0]) == bits(momenta[1])


# --- tensors without a shape -----------------------------------------------------------------------------------------


def test_parameters_that_have_no_shape_yet_are_refused_and_then_saved() -> None:
    module: Any = nn.Sequential(nn.LazyLinear(2))
    error = refusal({"model": module})
    assert error.code == "state.unsupported_tensor"
    assert "forward" in error.action
    module(torch.ones(1, 3))
    saved = save({"model": module})
    with pytest.raises(StateError, match="no shape yet"):
        load(saved, {"model": nn.Sequential(nn.LazyLinear(2))})
    into = nn.Linear(3, 2)
    load(saved, {"model": nn.Sequential(into)})
    assert bits(into.weight.detach()) == bits(module[0].weight.detach())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_with_the_way_that_works(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    error = refusal({"plain": torch.ones(1), "batch": nested})
    assert (error.code, error.tensor) == ("state.unsupported_tensor", "batch")
    with pytest.raises(StateError, match="nested"):
        load(save({"batch": torch.ones(2)}), {"batch": nested})
    assert len(save({"parts": list(nested.unbind())}).tensors) == 2


KINDS: dict[str, Callable[[SGD], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=20),
    "step": lambda optimizer: StepLR(optimizer, step_size=50),
    "exponential": lambda optimizer: ExponentialLR(optimizer, gamma=0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda _: 1.0),
    "plateau": ReduceLROnPlateau,
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9),
    "averaging": lambda optimizer: SWALR(optimizer, 0.1),
    "chain": lambda optimizer: ChainedScheduler([StepLR(optimizer, 2), StepLR(optimizer, 3)], optimizer),
    "other sequence": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 3)], [1]),
    "long sequence": lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, n) for n in (2, 3, 4)], [1, 2]),
    "sequence": lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 2), StepLR(optimizer, 3)], [1]),
}


def scheduler_of(kind: str) -> LRScheduler:
    return KINDS[kind](SGD([nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_of_torch_load_their_own_state(tmp_path: Path, kind: str) -> None:
    saved, live = scheduler_of(kind), scheduler_of(kind)
    saved.last_epoch = 5
    holdfast.save(tmp_path / "run", {"scheduler": saved}, 1)
    holdfast.load(tmp_path / "run", {"scheduler": live})
    assert live.last_epoch == 5


@pytest.mark.parametrize(
    ("saved", "live", "there"),
    [
        ("cosine", "step", "with T_max, with eta_min"),
        ("step", "cosine", "with gamma, with step_size"),
        ("step", "exponential", "step_size"),
        ("one cycle", "lambda", "total_steps"),
        ("plateau", "step", "patience"),
        ("exponential", "step", "without step_size"),
        ("sequence", "step", "with _milestones, with _schedulers"),
        ("step", "sequence", "without _milestones"),
        ("sequence", "other sequence", "inside a LinearLR here"),
        ("sequence", "long sequence", "3 schedulers inside here, 2 in the checkpoint"),
        ("sequence", "chain", "with _milestones"),
        ("exponential", "averaging", "with gamma"),
    ],
)
def test_the_state_of_another_class_of_scheduler_is_refused_before_anything_is_changed(
    tmp_path: Path, saved: str, live: str, there: str
) -> None:
    holdfast.save(tmp_path / "run", {"scheduler": scheduler_of(saved)}, 1)
    scheduler = scheduler_of(live)
    before = scheduler.state_dict()
    with pytest.raises(IncompatibleError, match=there) as caught:
        holdfast.load(tmp_path / "run", {"scheduler": scheduler})
    assert caught.value.code == "incompatible.scheduler_class"
    assert scheduler.state_dict() == before


class Warmup(LRScheduler):
    """A scheduler that knows an older name of its attribute."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        super().__init__(SGD([nn.Parameter(torch.ones(1))]))

    def get_lr(self) -> list[float | torch.Tensor]:
        return [0.1]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"num_steps": state_dict["warmup"]})


def test_a_scheduler_that_is_not_torchs_takes_older_states_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, live = Warmup(7), Warmup(3)
    with monkeypatch.context() as patch:
        patch.setattr(saved, "state_dict", lambda: {"warmup": 7})
        holdfast.save(tmp_path / "run", {"scheduler": saved}, 1)
    holdfast.load(tmp_path / "run", {"scheduler": live})
    assert live.num_steps == 7


class Reader:
    """A loader whose state is costly to read."""

    def __init__(self) -> None:
        self.num_read = 0

    def state_dict(self) -> dict[str, int]:
        self.num_read += 1
        return {"position": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"position": 3}


def test_a_load_does_not_read_the_state_that_it_replaces(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"loader": Reader()}, 1)
    loader = Reader()
    holdfast.load(tmp_path / "run", {"loader": loader})
    assert loader.num_read == 0
