"""Values, containers and objects bound to a checkpoint, and the errors when the two sides do not fit."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR

import holdfast
from holdfast.errors import CorruptError, IncompatibleError, StateError
from holdfast.format import values
from holdfast.format.values import TorchValue
from holdfast.state.bind import bind
from holdfast.state.differences import difference
from holdfast.state.local_placements import revive
from tests.support.bound import (
    Loader,
    State,
    assert_restores,
    assert_same,
    bound,
    load,
    mlp,
    refused,
    save,
    steps,
    train,
)

# --- values and containers -------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    step: int
    ema: object


def test_values_are_replaced_in_place_and_types_kept() -> None:
    history, nested, names = [0], {"deep": {1: None, None: 0}}, Counter({"a": 1})
    into: State = {"step": 0, "history": history, "nested": nested, "names": names, "lr": 0.0, "empty": []}
    saved: State = {
        "step": 1 << 80,
        "history": [1, [2.5, "x"], (None,)],
        "nested": {"deep": {1: np.float32(0.1), None: b"\x00"}},
        "names": Counter({"b": 2, 3: 4}),
        "lr": float("nan"),
        "empty": [],
    }
    load(save(saved), into)
    assert_same(saved, into)
    assert into["history"] is history
    assert into["nested"] is nested
    assert into["names"] is names


def test_tuples_are_rebuilt_around_the_live_tensors() -> None:
    tensor, buffer = torch.zeros(2), torch.zeros(3)
    into: State = {"t": (0, tensor, [buffer, 1]), "p": Progress(0, (1, buffer)), "v": (1, 2)}
    saved: State = {"t": (5, torch.ones(2), [torch.ones(3), 6]), "p": Progress(7, (8, torch.ones(3))), "v": (3,)}
    saved["p"] = Progress(7, (8, cast("tuple[int, torch.Tensor, list[object]]", saved["t"])[2][0]))
    load(save(saved), into)
    assert_same(saved, into)
    rebuilt = cast("tuple[object, ...]", into["t"])
    assert rebuilt[1] is tensor
    assert type(into["p"]) is Progress
    assert into["v"] == (3,)


def test_namedtuples_inside_lists_of_values_get_their_live_type() -> None:
    into: State = {"log": [Progress(0, None)]}
    load(save({"log": [Progress(1, 2), Progress(3, 4)]}), into)
    assert into["log"] == [Progress(1, 2), Progress(3, 4)]
    assert type(cast("list[object]", into["log"])[1]) is Progress


def test_ordered_dicts_keep_their_order_and_torch_values_their_kind() -> None:
    saved: State = {
        "x": [OrderedDict([("b", torch.bfloat16), ("a", torch.Size([2, 3]))]), torch.device("cpu"), torch.Size([])]
    }
    into: State = {"x": []}
    load(save(saved), into)
    assert into == saved
    assert list(cast("list[OrderedDict[str, object]]", into["x"])[0]) == ["b", "a"]


def test_containers_nest_up_to_the_limit() -> None:
    def nested(depth: int) -> object:
        return [nested(depth - 1)] if depth else 7

    into: State = {"x": [0]}
    load(save({"x": nested(values.MAX_DEPTH - 1)}), into)
    assert into["x"] == nested(values.MAX_DEPTH - 1)
    with pytest.raises(StateError, match=r"state\.nesting"):
        save({"x": nested(values.MAX_DEPTH)})


def test_one_missing_and_one_unexpected_entry_are_both_named() -> None:
    saved = save({"a": {"x": 1, "y": torch.zeros(1)}, "b": 1})
    error = refused(saved, {"a": {"x": 1, "z": torch.zeros(1)}, "b": 1, "c": None})
    assert error.code == "incompatible.names"
    assert all(name in str(error) for name in ("a/y", "a/z", "c"))
    binding = load(saved, {"a": {"x": 1, "z": torch.zeros(1)}, "b": 1, "c": None}, strict=False)
    assert (binding.loaded, binding.missing, binding.unexpected) == (["a/x", "b"], ["a/z", "c"], ["a/y"])


def test_generators_are_set_in_place() -> None:
    source, target = torch.Generator().manual_seed(3), torch.Generator()
    torch.rand(5, generator=source)
    load(save({"rng": [source]}), {"rng": [target]})
    assert torch.equal(torch.rand(4, generator=source), torch.rand(4, generator=target))


def test_a_missing_generator_is_missing() -> None:
    assert load(save({}), {"rng": torch.Generator()}, strict=False).missing == ["rng"]


# --- objects with a state_dict ---------------------------------------------------------------------------------------


def decay(epoch: int) -> float:
    return 0.9**epoch


SCHEDULERS: dict[str, Callable[[Optimizer], object]] = {
    "lambda": lambda o: LambdaLR(o, decay),
    "multi-step": lambda o: MultiStepLR(o, [1, 3, 3]),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o), MultiStepLR(o, [2])], [2]),
    "plateau": ReduceLROnPlateau,
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "cosine restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "gradient scaler": lambda _: torch.amp.GradScaler("cpu"),
    "disabled scaler": lambda _: torch.amp.GradScaler("cpu", enabled=False),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR calls it so itself
def test_schedulers_and_scalers_come_back(make: Callable[[Optimizer], object]) -> None:
    def state() -> State:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        return {"w": weight, "o": optimizer, "s": make(optimizer)}

    def run(state: State) -> None:
        scheduler = state["s"]
        for _ in range(3):
            steps(cast("Optimizer", state["o"]), count=1)
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(1.0)
            elif not isinstance(scheduler, torch.amp.GradScaler):
                cast("LambdaLR", scheduler).step()

    assert_restores(state, run)


def test_a_scheduler_over_a_tensor_learning_rate_comes_back() -> None:
    def state() -> State:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1), foreach=False)
        return {"w": weight, "o": optimizer, "s": LambdaLR(optimizer, decay)}

    def run(state: State) -> None:
        train(state)
        cast("LambdaLR", state["s"]).step()

    assert_restores(state, run)


@pytest.mark.parametrize(
    "state", [{"rng": torch.arange(3), "epochs": [{"seen": (1, torch.ones(2))}]}, torch.ones(2), [], None, "cursor"]
)
def test_what_an_object_saved_is_handed_back_whole(state: object) -> None:
    fresh = Loader({"other": 1})
    binding = load(save({"loader": Loader(state)}), {"loader": fresh})
    assert_same({"loader": Loader(state)}, {"loader": fresh})
    assert (binding.missing, binding.unexpected) == ([], [])


def test_extra_state_is_set_on_its_module_and_post_load_hooks_run() -> None:
    class Scaled(nn.Linear):
        extra: object = None

        def get_extra_state(self) -> object:
            return self.extra

        def set_extra_state(self, state: object) -> None:
            self.extra = state

    source, target = Scaled(1, 1), Scaled(1, 1)
    source.extra = {"history": [torch.ones(2), 3]}
    calls: list[nn.Module] = []
    target.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
        lambda module, _: calls.append(module)
    )
    load(save({"m": nn.Sequential(source)}), {"m": nn.Sequential(target)})
    assert_same({"m": source}, {"m": target})
    assert calls == [target]
    assert "m/0._extra_state" in str(refused(save({"m": nn.Sequential(nn.Linear(1, 1))}), {"m": nn.Sequential(target)}))


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_bind_changes_nothing() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    saved = save({"m": model, "o": optimizer, "n": [1]})
    steps(optimizer)
    into: State = {"m": model, "o": optimizer, "n": [2]}
    before = save(into)
    bound(saved, into)
    assert save(into).nodes == before.nodes
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in save(into).tensors.items())


def test_a_dtype_difference_names_both_sides() -> None:
    error = refused(save({"m": nn.Linear(2, 2)}), {"m": nn.Linear(2, 2).bfloat16()})
    assert (error.code, error.tensor) == ("incompatible.dtype", "m/bias")
    expected = ("Under 2 names", "m/{bias, weight}", "bfloat16 here", "float32 in the checkpoint", "stored dtype")
    assert all(part in str(error) for part in expected)


def test_a_shape_difference_is_an_error_also_when_not_strict() -> None:
    saved = save({"m": nn.Linear(2, 2)})
    with pytest.raises(IncompatibleError, match=r"incompatible\.shape(?s:.*)\(3,\) here, \(2,\) in the checkpoint"):
        bound(saved, {"m": nn.Linear(2, 3)}, strict=False)


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (torch.zeros(1), 1),
        (1, torch.zeros(1)),
        ({"a": 1}, [1]),
        ([1], {"a": 1}),
        ([torch.zeros(1)], None),
        (Loader(1), None),
        (nn.Linear(1, 1), 3),
        (3, torch.Generator()),
        (nn.Linear(1, 1), Loader()),
        (Loader({"a": 1}), torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        ((1, 2), [1, 2]),
        (1, Progress(1, 2)),
    ],
    ids=lambda item: type(item).__name__,
)
def test_different_kinds_of_things_under_one_name_are_refused(stored: object, live: object) -> None:
    error = refused(save({"x": stored}), {"x": live})
    assert error.code == "incompatible.kind"
    assert "'x" in str(error)


@pytest.mark.parametrize(
    "stored", [{"best": 0.5, "runs": [1, {"a": None}]}, {3: "x", "y": (1, 2)}, {}, OrderedDict(b=1, a=2)]
)
def test_an_empty_dict_takes_the_values_that_a_dict_had_grown_to(stored: dict[object, object]) -> None:
    live: dict[object, object] = {}
    state = {"progress": live, "w": torch.zeros(2)}
    load(save({"progress": stored, "w": torch.ones(2)}), state)
    assert state["progress"] is live
    assert live == stored


def test_a_dict_that_grew_is_refused_by_the_form_with_fewer_entries_and_told_to_begin_empty() -> None:
    error = refused(save({"progress": {"a": 1, "b": 2}}), {"progress": {"a": 0}})
    assert error.code == "incompatible.names"
    assert "not in the live state: progress/b" in str(error)
    assert "If the job fills the dict 'progress' while it trains, load into an empty one" in error.action
    others: list[State] = [
        {"progress": {"a": 1}, "b": 2},
        {"progress": {"a": 1}, "b": {"c": 1}},
        {"progress": {"a": 1, "b": torch.ones(1)}},
    ]
    for other in others:
        assert "while it trains" not in refused(save(other), {"progress": {"a": 0}}).action


def test_an_empty_dict_takes_no_tensors() -> None:
    error = refused(save({"progress": {"best": torch.ones(2)}}), {"progress": {}})
    assert error.code == "incompatible.names"
    assert "progress/best" in str(error)


@pytest.mark.parametrize("stored", [nn.Linear(1, 1), LinearLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]))])
def test_an_empty_dict_takes_no_objects(stored: object) -> None:
    error = refused(save({"parts": {"a": {"b": stored}}}), {"parts": {}})
    assert error.code == "incompatible.names"
    assert "parts/a/b" in str(error)


@pytest.mark.parametrize("empty", [[], ()])
def test_a_list_of_values_that_was_stored_with_tensors_names_the_items(empty: object) -> None:
    stored = type(empty)([torch.ones(2)])  # type: ignore[call-arg]
    error = refused(save({"queue": stored}), {"queue": empty})
    assert error.code == "incompatible.names"
    assert "queue/0" in str(error)


def test_an_empty_dict_that_is_not_selected_stays_empty(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"progress": {"a": 1}, "w": torch.ones(2)}, 1)
    state: State = {"progress": {}, "w": torch.zeros(2)}
    holdfast.load(tmp_path / "run", state, select="w")
    assert state["progress"] == {}


def test_a_whole_missing_optimizer_is_one_line() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    steps(optimizer)
    error = refused(save({"m": model}), {"m": model, "train": [optimizer]})
    assert "1 missing from the checkpoint: train/0." in str(error)
    error = refused(save({"m": model, "train": [optimizer]}), {"m": model, "train": []})
    assert "incompatible.kind" not in str(error)
    assert "train/0 (the whole optimizer: " in str(error)
    assert "exp_avg" not in str(error)


def test_an_optimizer_parameter_that_the_checkpoint_lacks_is_missing() -> None:
    model = mlp()
    saved = save({"m": model, "o": torch.optim.SGD(model[0].parameters())})
    error = refused(saved, {"m": model, "o": torch.optim.SGD(model.parameters())})
    assert "o/group_of/m%2F{" in str(error)


def test_a_renamed_tensor_is_suggested() -> None:
    saved = save({"model": {"layers.0.attention.weight": torch.zeros(1)}})
    error = refused(saved, {"model": {"layers.0.attn.weight": torch.zeros(1)}})
    assert "model/layers.0.attention.weight -> model/layers.0.attn.weight" in str(error)


def test_long_differences_are_counted_and_cut() -> None:
    saved = save({f"tensor{index:03}": torch.zeros(1) for index in range(50)})
    error = refused(saved, {"a": 1})
    assert "50 in the checkpoint" in str(error)
    assert "and 40 more" in str(error)
    assert "tensor009" in str(error)
    assert "tensor010" not in str(error)


def test_ranks_can_report_what_is_unexpected_on_all_of_them() -> None:
    saved = save({"stage0": mlp(), "stage1": mlp()})
    nodes = values.decode(saved.nodes)
    unexpected = [
        set(bind({stage: mlp()}, saved.stored, {}, nodes, strict=False).unexpected) for stage in ("stage0", "stage1")
    ]
    assert set.intersection(*unexpected) == set()
    error = difference([], unexpected[0], saved.stored, nodes, {})
    assert "stage1 (the whole module: 9 names)" in str(error)


def test_live_tensors_on_meta_get_memory_when_they_are_to_be_filled() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    binding = bound(save({"m": nn.Linear(2, 2)}), {"m": model})
    assert [target.local.memory[0].device.type for target in binding.targets] == ["meta", "meta"]
    binding.allocate()
    addresses = {target.name: target.local.memory[0].data_ptr() for target in binding.targets}
    assert addresses == {"m/weight": model.weight.data_ptr(), "m/bias": model.bias.data_ptr()}


@pytest.mark.parametrize(
    "value", [TorchValue("dtype", "nn"), TorchValue("device", "nowhere:x"), TorchValue("size", "1,x")]
)
def test_torch_values_that_torch_does_not_know_are_corrupt(value: TorchValue) -> None:
    with pytest.raises(CorruptError, match=value.kind):
        revive(value)
