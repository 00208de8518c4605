from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import re
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer

import holdfast
from holdfast.errors import StateError
from holdfast.format.values import Items, Open, Plain, Stateful, TensorRef
from holdfast.frameworks.piecewise import Piecewise
from holdfast.plan import layout
from holdfast.state.flatten import FlatState, flatten


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def compiled(module: nn.Module) -> nn.Module:
    wrapper = torch.compile(module, backend="eager")
    assert isinstance(wrapper, nn.Module)
    assert wrapper is not module
    return wrapper


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def refusal(state: dict[str, object]) -> StateError:
    with pytest.raises(StateError) as caught:
        flatten(state)
    return caught.value


def spec(flat: FlatState, name: str) -> layout.Spec:
    return flat.tensors[name].layout.spec


# --- names and memory ------------------------------------------------------------------------------------------------


def test_module_tensors_are_named_by_path_and_fqn_sorted_and_share_the_live_memory() -> None:
    model = mlp()
    flat = flatten({"nets": {"a/b": model}})
    assert list(flat.tensors) == [f"nets/a%2Fb/{fqn}" for fqn in ("0.bias", "0.weight", "2.bias", "2.weight")]
    weight = flat.tensors["nets/a%2Fb/0.weight"]
    assert weight.layout == layout.TensorLayout("nets/a%2Fb/0.weight", "float32", (3, 4), layout.Whole("compare"))
    assert weight.memory[0].data_ptr() == model.get_parameter("0.weight").data_ptr()
    assert not weight.memory[0].requires_grad


def test_buffers_count_when_persistent_and_frozen_parameters_always() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    model.weight.requires_grad_(False)
    names = flatten({"m": model}).tensors
    assert list(names) == ["m/bias", "m/num_batches_tracked", "m/running_mean", "m/running_var", "m/weight"]


def test_optimizer_state_is_named_after_parameters_wherever_the_optimizer_stands() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model[0].parameters())
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 1.0})
    stepped(optimizer)
    flat = flatten({"an_optimizer": optimizer, "model": model})
    slots = [name for name in flat.tensors if name.startswith("an_optimizer/state/model/0.weight/")]
    assert [slot.rpartition("/")[2] for slot in slots] == ["exp_avg", "exp_avg_sq", "step"]
    assert flat.nodes["an_optimizer/group_of/model%2F0.bias"] == Plain(0)
    assert flat.nodes["an_optimizer/group_of/model%2F2.bias"] == Plain(1)
    assert flat.nodes["an_optimizer/param_groups/1/lr"] == Plain(1.0)
    assert flat.nodes["an_optimizer/param_groups/0/betas"] == Items("tuple", 2)
    assert "an_optimizer/param_groups/0/params" not in flat.nodes


def test_a_tensor_learning_rate_is_a_tensor() -> None:
    model = mlp()
    flat = flatten({"m": model, "o": torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))})
    assert flat.nodes["o/param_groups/0/lr"] == TensorRef()
    assert flat.tensors["o/param_groups/0/lr"].layout.shape == ()


def test_two_models_with_the_same_fqns_and_two_optimizers_do_not_meet() -> None:
    a, b = mlp(), mlp()
    state = {
        "a": a,
        "b": b,
        "oa": stepped(torch.optim.SGD(a.parameters(), momentum=0.9)),
        "ob": torch.optim.SGD(b.parameters()),
    }
    flat = flatten(state)
    assert "oa/state/a/0.weight/momentum_buffer" in flat.tensors
    assert not [name for name in flat.tensors if name.startswith("ob/state")]
    assert "ob/group_of/b%2F0.weight" in flat.nodes


def test_loose_tensors_of_the_state_are_parameters_too() -> None:
    scale = nn.Parameter(torch.ones(2))
    flat = flatten({"scales": [scale], "opt": stepped(torch.optim.Adam([scale]))})
    assert "opt/state/scales/0/exp_avg" in flat.tensors


def test_an_optimizer_parameter_of_no_module_in_the_state_is_refused() -> None:
    model, stray = mlp(), nn.Parameter(torch.ones(5, 7))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.add_param_group({"params": [stray]})
    error = refusal({"m": model, "train": {"opt": optimizer}})
    assert error.code == "state.unnamed_parameter"
    assert all(part in str(error) for part in ("Parameter 0", "group 1", "'train/opt'", "(5, 7)", "Put the module"))


def test_an_optimizer_built_before_a_parameter_was_replaced_is_to_be_built_from_the_new_ones() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(parameter.detach().clone()))
    error = refusal({"model": model, "optimizer": optimizer})
    assert error.code == "state.unnamed_parameter"
    assert "build the optimizer from module.parameters() after that" in str(error)


def test_optimizer_state_of_no_group_is_refused() -> None:
    model = mlp()
    optimizer = stepped(torch.optim.Adam(model.parameters()))
    del optimizer.param_groups[0]["params"][0]
    assert refusal({"m": model, "o": optimizer}).code == "state.optimizer"


def test_extra_state_is_a_value_next_to_the_modules_tensors() -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> object:
            return {"scale": 2, "history": torch.zeros(3)}

    flat = flatten({"m": nn.Sequential(Scaled(2, 2)), "root": Scaled(1, 1)})
    assert flat.nodes["m/0._extra_state/scale"] == Plain(2)
    assert flat.tensors["m/0._extra_state/history"].layout.shape == (3,)
    assert flat.nodes["root/_extra_state/scale"] == Plain(2)


def test_values_tensors_and_objects_nest() -> None:
    class Pair(NamedTuple):
        left: object
        right: object

    loader = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(mlp().parameters()), 3)
    flat = flatten(
        {"a": [1, (Pair(torch.zeros(1), {2: "x"}),)], "loader": loader, "empty": {}, "dtype": torch.bfloat16}
    )
    assert flat.nodes["a/1/0/left"] == TensorRef()
    assert "a/1/0/right/%int=2" in flat.nodes
    assert isinstance(flat.nodes["loader"], Stateful)
    assert flat.nodes["loader/step_size"] == Plain(3)
    assert "empty" in flat.nodes
    assert flat.nodes[""] == Open("dict")


# --- ties ------------------------------------------------------------------------------------------------------------


def test_tied_parameters_are_stored_once_under_the_first_name() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 9, bias=False), "emb": nn.Embedding(9, 4)})
    model["head"].weight = model["emb"].weight
    flat = flatten({"m": model, "opt": stepped(torch.optim.SGD(model.parameters(), momentum=0.9))})
    assert list(flat.tensors) == ["m/emb.weight", "opt/state/m/emb.weight/momentum_buffer"]
    assert flat.aliases == {"m/head.weight": "m/emb.weight"}


def test_two_views_of_one_memory_are_tied_and_overlaps_are_not() -> None:
    base = torch.arange(6.0)
    flat = flatten({"a": base.view(2, 3), "b": base.view(2, 3), "c": base, "d": base[:3], "e": base.view(torch.int32)})
    assert flat.aliases == {"b": "a"}
    assert list(flat.tensors) == ["a", "c", "d", "e"]


def test_empty_tensors_are_tied_only_when_they_are_one_object() -> None:
    one = torch.empty(0)
    assert flatten({"a": one, "b": one, "c": torch.empty(0)}).aliases == {"b": "a"}


# --- wrappers --------------------------------------------------------------------------------------------------------


class Tricky(nn.Module):
    """A user's attributes may be called what wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module: nn.Module = nn.Linear(2, 2, bias=False)
        self._orig_mod = nn.Linear(2, 2, bias=False)
        self._checkpoint_wrapped_module = nn.Linear(2, 2, bias=False)


TRICKY = ["m/_checkpoint_wrapped_module.weight", "m/_orig_mod.weight", "m/module.weight"]


def test_a_users_own_attributes_keep_their_names() -> None:
    assert list(flatten({"m": Tricky()}).tensors) == TRICKY


def test_compile_and_activation_checkpoint_wrappers_leave_no_trace_in_names() -> None:
    model = Tricky()
    model.module = checkpoint_wrapper(compiled(model.module))
    assert list(flatten({"m": compiled(checkpoint_wrapper(model))}).tensors) == TRICKY


def test_data_parallel_is_stripped() -> None:
    assert list(flatten({"m": nn.DataParallel(Tricky())}).tensors) == TRICKY


@pytest.mark.usefixtures("world_of_one")
def test_ddp_is_stripped_and_declares_replicas() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = nn.parallel.DistributedDataParallel(model)
    flat = flatten({"m": wrapped, "o": stepped(torch.optim.Adam(wrapped.parameters())), "loose": torch.zeros(1)})
    assert spec(flat, "m/0.weight") == layout.Whole("split")
    assert spec(flat, "o/state/m/0.weight/exp_avg") == layout.Whole("split")
    assert spec(flat, "o/state/m/0.weight/step") == layout.Whole("split")
    assert spec(flat, "m/1.running_mean") == layout.Whole("first")
    assert spec(flat, "loose") == layout.Whole("compare")


@pytest.mark.usefixtures("world_of_one")
def test_what_ddp_ignores_is_not_declared_replicated() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])  # type: ignore[no-untyped-call]
    flat = flatten({"m": ddp(model)})
    assert spec(flat, "m/1.weight") == layout.Whole("compare")
    assert spec(flat, "m/1.bias") == layout.Whole("split")


# --- DTensor and FSDP2 -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
def test_fsdp2_parameters_and_their_slots_are_placed_also_between_forward_and_backward() -> None:
    model = mlp()
    for child in (model[0], model[2], model):
        fully_shard(child, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum()
    flat = flatten({"m": model, "o": optimizer})
    placed = layout.Placed(layout.Mesh((1,), (0,)), (layout.Shard(0),))
    assert {name: spec(flat, name) for name in flat.tensors} == dict.fromkeys(flat.tensors, placed)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    flat = flatten({"m": model, "o": optimizer})
    assert spec(flat, "o/state/m/0.weight/exp_avg") == placed
    assert spec(flat, "o/state/m/0.weight/step") == layout.Whole("compare")
    assert type(flat.tensors["m/0.weight"].memory[0]) is torch.Tensor


@pytest.mark.usefixtures("world_of_one")
def test_placements_are_translated_and_shared_between_tensors() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    state = {
        "a": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0), Shard(1)]),
        "b": distribute_tensor(torch.zeros(4, 2), mesh, [Replicate(), Shard(0)]),
        "c": DTensor.from_local(torch.zeros(4, 2), mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False),
        "d": DTensor.from_local(torch.zeros(4, 2), mesh, [_StridedShard(0, split_factor=1), Shard(0)], run_check=False),
    }
    flat = flatten(state)
    grid = layout.Mesh((1, 1), (0,))
    assert spec(flat, "a") == layout.Placed(grid, (layout.Shard(0), layout.Shard(1)))
    assert spec(flat, "b") == layout.Placed(grid, (layout.Replicate(), layout.Shard(0)))
    assert spec(flat, "c") == layout.Placed(grid, (layout.StridedShard(0, 2), layout.Shard(0)))
    assert spec(flat, "d") == layout.Placed(grid, (layout.Shard(0), layout.Shard(0)))


@pytest.mark.usefixtures("world_of_one")
def test_partial_tensors_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (1, 1))
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial(), Replicate()], run_check=False)
    error = refusal({"grads": {"w": partial}})
    assert (error.code, error.tensor) == ("state.placement", "grads/w")


class InterleavedShard(Shard):
    """Divides in another way than `Shard`, and equals it: as torch 2.6's own strided shard does."""


@pytest.mark.usefixtures("world_of_one")
def test_a_placement_that_equals_a_known_one_but_is_of_a_subclass_is_refused_after_the_known_one_too() -> None:
    mesh = init_device_mesh("cpu", (1,))
    assert InterleavedShard(0) == Shard(0)
    state: dict[str, object] = {
        name: DTensor.from_local(torch.zeros(4), mesh, [placement], run_check=False)
        for name, placement in (("a", Shard(0)), ("b", InterleavedShard(0)))
    }
    error = refusal(state)
    assert (error.code, error.tensor) == ("state.placement", "b")


# --- what is refused -------------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class FlagInt(int):
    pass


@pytest.mark.parametrize(
    "leaf",
    [{1}, lambda: 0, Colour.RED, FlagInt(1), defaultdict(list), object(), bytearray(), range(2)],
    ids=lambda leaf: type(leaf).__name__,
)
def test_an_unsupported_leaf_is_refused_with_its_path_type_and_what_to_do(leaf: object) -> None:
    error = refusal({"config": [0, {"x": leaf}]})
    assert error.code == "state.unsupported_leaf"
    assert error.path == "config/1/x"
    assert type(leaf).__name__ in str(error)
    assert error.action


@dataclass
class Settings:
    width: int


@pytest.mark.parametrize(
    ("leaf", "problem", "instead"),
    [
        (argparse.Namespace(lr=0.1), "is an argparse.Namespace", "vars(args)"),
        (Path("data"), "Path", "str(args)"),
        (Settings(3), "is a tests.state.test_flatten.Settings", "dataclasses.asdict(args)"),
        (Colour.RED, "is a tests.state.test_flatten.Colour", "args.value"),
        ({"b", "a"}, "is a builtins.set", "sorted(args)"),
        (timedelta(hours=1), "is a datetime.timedelta", "args.total_seconds()"),
        (defaultdict(int, a=1), "is a collections.defaultdict", "dict(args)"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_advice_for_an_unsupported_leaf_can_be_followed(leaf: object, problem: str, instead: str) -> None:
    error = refusal({"args": leaf})
    assert problem in error.message
    assert f"Put {instead} into the state instead" in error.action
    flat = flatten({"args": eval(instead, {"args": leaf, "dataclasses": dataclasses})})
    assert "args" in flat.nodes


@pytest.mark.parametrize(
    ("array", "way"),
    [
        (np.array([None]), "tolist"),
        (np.array(["text"]), "tolist"),
        (np.zeros(2, ">i8"), "newbyteorder"),
        (np.zeros(1, "M8[s]"), "int64"),
        (np.zeros(1, np.longdouble), "float64"),
        (np.zeros(1, [("a", "i4")]), "its fields"),
    ],
    ids=lambda item: str(item.dtype) if isinstance(item, np.ndarray) else item,
)
def test_arrays_without_a_dtype_of_torch_are_refused_with_the_way_to_save_them(
    array: np.ndarray, way: str, tmp_path: Path
) -> None:
    error = refusal({"a": [array]})
    assert (error.code, error.path) == ("state.unsupported_leaf", "a/0")
    assert f"dtype {array.dtype}" in error.message
    assert way in error.action
    holdfast.save(tmp_path / "run", {"a": [np.zeros(2)]}, 1)
    with pytest.raises(StateError, match=f"dtype {re.escape(str(array.dtype))}"):
        holdfast.load(tmp_path / "run", {"a": [array]})


def test_an_array_of_another_byte_order_that_is_not_selected_stays_as_it_is(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"a": np.zeros(2), "b": 1}, 1)
    array = np.ones(2, ">f8")
    live = {"a": array, "b": 0}
    holdfast.load(tmp_path / "run", live, select="b")
    assert live["a"] is array
    assert live["b"] == 1
    assert array.tolist() == [1, 1]


def test_kinds_of_arrays_are_refused_with_the_way_to_plain_ones() -> None:
    assert "numpy.asarray" in refusal({"a": np.ma.masked_array([1, 2], [True, False])}).action


def test_modules_inside_an_objects_state_dict_are_refused() -> None:
    class Holder:
        def state_dict(self) -> object:
            return {"net": mlp()}

        def load_state_dict(self, state: object) -> None:
            raise AssertionError(state)

    error = refusal({"holder": Holder()})
    assert (error.code, error.path) == ("state.unsupported_leaf", "holder/net")


class Tagged(torch.Tensor):
    pass


def released() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def made_smaller(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(tensor.nbytes - 4)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2).as_subclass(Tagged), "Tagged"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugation"),
        (released(), "released"),
        (made_smaller(torch.zeros(3)), "beyond the end"),
        (made_smaller(torch.zeros(4, 4)[:, 1:]), "beyond the end"),
        (torch.empty(2, dtype=torch.bits8), "bits8"),
        (torch.empty(0, 2**62), "axes too long"),
    ],
    ids=[
        "sparse",
        "meta",
        "subclass",
        "conjugate",
        "released",
        "made smaller",
        "view of that",
        "dtype",
        "absurd shape",
    ],
)
def test_tensors_without_plain_dense_memory_are_refused(tensor: torch.Tensor, reason: str) -> None:
    error = refusal({"t": tensor})
    assert (error.code, error.tensor) == ("state.unsupported_tensor", "t")
    assert reason in str(error)


@pytest.mark.parametrize(
    "item",
    [
        torch.ones(1).expand(1 << 57),
        torch.ones((1,) * 64).unsqueeze(0),
        Piecewise((0, 1 << 62), [], dtype=torch.float32),
        Piecewise((1,) * 65, [], dtype=torch.float32),
    ],
    ids=["expanded", "axes", "pieces", "axes of pieces"],
)
def test_a_shape_that_would_read_as_a_damaged_manifest_is_refused_by_the_save(item: object) -> None:
    error = refusal({"t": item})
    assert (error.code, error.tensor) == ("state.unsupported_tensor", "t")
    assert "axes" in error.message


def test_a_meta_module_is_told_how_to_get_memory() -> None:
    with torch.device("meta"):
        model = mlp()
    assert "to_empty" in refusal({"m": model}).action


class Secretive(nn.Linear):
    def _save_to_state_dict(self, *args: object) -> None:
        raise AssertionError(args)


class Rewriting(nn.Linear):
    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:  # type: ignore[override]
        raise AssertionError(args, kwargs)


def hooked() -> nn.Module:
    module = nn.Linear(1, 1)
    module.register_state_dict_post_hook(lambda *args: None)  # type: ignore[no-untyped-call]
    return module


def pre_hooked() -> nn.Module:
    module = nn.Linear(1, 1)
    module.register_state_dict_pre_hook(lambda *args: None)  # type: ignore[no-untyped-call]
    return module


@pytest.mark.parametrize("module", [Secretive(1, 1), Rewriting(1, 1), hooked(), pre_hooked()])
def test_modules_that_rewrite_their_state_dict_are_refused(module: nn.Module) -> None:
    error = refusal({"m": nn.Sequential(nn.ReLU(), module)})
    assert (error.code, error.path) == ("state.module_hooks", "m")
    assert "'1'" in str(error)
    assert type(module).__qualname__ in str(error)


def test_torchs_own_harmless_hooks_are_no_reason_to_refuse() -> None:
    module = torch.nn.utils.spectral_norm(nn.Linear(2, 2))
    assert "m/weight_orig" in flatten({"m": module, "n": weight_norm(nn.Linear(1, 1))}).tensors


class Chatty(torch.optim.SGD):
    def state_dict(self) -> dict[str, object]:
        raise AssertionError


def test_optimizers_that_rewrite_their_state_dict_are_refused() -> None:
    model = mlp()
    assert refusal({"m": model, "o": Chatty(model.parameters())}).code == "state.optimizer"
    hooked_optimizer = torch.optim.SGD(model.parameters())
    hooked_optimizer.register_state_dict_post_hook(lambda *args: None)
    assert refusal({"m": model, "o": hooked_optimizer}).code == "state.optimizer"


def test_cycles_are_refused() -> None:
    loop: list[object] = []
    loop.append({"again": loop})
    assert refusal({"loop": loop}).code == "state.nesting"


@pytest.mark.parametrize("state", [[1], {1: 2}, None, {"a": 1, None: 2}])
def test_the_root_is_a_dict_with_string_keys(state: dict[str, object]) -> None:
    assert refusal(state).code == "state.root"


def test_two_things_under_one_name_are_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return 1

    module = Extra(1, 1)
    module.register_buffer("_extra_state", torch.zeros(1))
    error = refusal({"m": module})
    assert (error.code, error.path) == ("state.collision", "m/_extra_state")


# --- cost ------------------------------------------------------------------------------------------------------------


def test_three_thousand_tensors_are_flattened_in_milliseconds() -> None:
    model = nn.ModuleList([nn.Linear(1, 1) for _ in range(375)])
    state = {"m": model, "o": stepped(torch.optim.Adam(model.parameters(), foreach=True))}
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert len(flatten(state).tensors) == 3000
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2  # 0.02 s on an idle machine


@pytest.mark.parametrize(
    "leaf", [len, lambda: 0, iter([1]), threading.Lock(), threading.Event(), object(), io.StringIO()]
)
def test_nobody_is_told_to_register_functions_iterators_or_locks(leaf: object) -> None:
    assert refusal({"x": leaf}).action == "Take it out of the state."


def test_the_path_of_a_cycle_is_shown_where_it_begins() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    assert "'x/0/0/0'" in str(refusal({"x": cycle}))
