from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR

from holdfast.errors import CorruptError, IncompatibleError, StateError
from holdfast.format import values
from holdfast.format.values import TorchValue
from holdfast.state.bind import Binding, bind
from holdfast.state.differences import Stored, difference
from holdfast.state.flatten import flatten
from holdfast.state.placements import revive

State = dict[str, object]


class Saved(NamedTuple):
    """A checkpoint held in memory: the tensors' bytes and what a manifest would say."""

    tensors: dict[str, torch.Tensor]
    stored: dict[str, Stored]
    aliases: dict[str, str]
    nodes: bytes


def save(state: State) -> Saved:
    flat = flatten(state)
    return Saved(
        {name: local.memory[0].clone() for name, local in flat.tensors.items()},
        {name: Stored(local.layout.dtype, local.layout.shape) for name, local in flat.tensors.items()},
        dict(flat.aliases),
        values.encode(flat.nodes),
    )


def bound(saved: Saved, into: State, *, strict: bool = True) -> Binding:
    return bind(into, saved.stored, saved.aliases, values.decode(saved.nodes), strict=strict)


def load(saved: Saved, into: State, *, strict: bool = True) -> Binding:
    binding = bound(saved, into, strict=strict)
    for target in binding.targets:
        assert target.local.layout.name == target.source
        target.local.memory[0].copy_(saved.tensors[target.source])
    assert binding.finish() is into
    return binding


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(a: State, b: State) -> None:
    """Both states are the same, bit for bit: the same names, dtypes, shapes, placements, memory and values."""
    x, y = flatten(a), flatten(b)
    assert [local.layout for local in x.tensors.values()] == [local.layout for local in y.tensors.values()]
    assert x.aliases == y.aliases
    assert values.encode(x.nodes) == values.encode(y.nodes)
    for name, local in x.tensors.items():
        assert bits(local.memory[0]) == bits(y.tensors[name].memory[0]), name


def assert_restores(make: Callable[[], State], train: Callable[[State], None]) -> tuple[State, State]:
    """A trained state, saved and loaded into a fresh one, is the trained state, and goes on training alike."""
    trained, fresh = make(), make()
    train(trained)
    load(save(trained), fresh)
    assert_same(trained, fresh)
    train(trained)
    train(fresh)
    assert_same(trained, fresh)
    return trained, fresh


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def steps(*optimizers: Optimizer, count: int = 2) -> None:
    """Optimizer steps with gradients that depend on nothing but the parameters."""
    for optimizer in optimizers:

        def closure(optimizer: Optimizer = optimizer) -> float:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.detach().float().cos().to(parameter.dtype)
            return 1.0

        for _ in range(count):
            closure()
            optimizer.step(closure)


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


def train(state: State) -> None:
    for item in list(state.values()):
        if isinstance(item, Optimizer):
            steps(item)


def refused(saved: Saved, into: State) -> IncompatibleError:
    with pytest.raises(IncompatibleError) as caught:
        bound(saved, into)
    return caught.value


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# --- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw with a tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_fresh_optimizer_gets_the_saved_state_and_goes_on_alike(
    make: Callable[[Iterator[nn.Parameter]], Optimizer],
) -> None:
    def state() -> State:
        model = mlp()
        return {"model": model, "optimizer": make(model.parameters())}

    assert_restores(state, train)


def test_fp32_state_of_bf16_parameters_stays_fp32() -> None:
    def state() -> State:
        model = mlp().bfloat16()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    trained, fresh = state(), state()
    train(trained)
    optimizer = cast("Optimizer", trained["optimizer"])
    for slots in optimizer.state.values():
        slots["exp_avg"] = slots["exp_avg"].float() + 1e-6
    load(save(trained), fresh)
    assert_same(trained, fresh)
    assert {slots["exp_avg"].dtype for slots in cast("Optimizer", fresh["optimizer"]).state.values()} == {torch.float32}


def test_an_optimizer_that_has_state_keeps_its_objects_and_fitting_memory() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    steps(optimizer)
    saved = save({"m": model, "o": optimizer})
    steps(optimizer)
    weight = model.weight
    state, group, slots = optimizer.state, optimizer.param_groups[0], optimizer.state[weight]
    average = slots["exp_avg"]
    slots["exp_avg_sq"] = slots["exp_avg_sq"].double()
    slots["left over"] = 3
    load(saved, {"m": model, "o": optimizer})
    assert optimizer.state is state
    assert optimizer.param_groups[0] is group
    assert optimizer.state[weight] is slots
    assert slots["exp_avg"] is average
    assert slots["exp_avg_sq"].dtype is torch.float32
    assert slots.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert slots["step"] == 2


def test_state_of_parameters_that_had_none_is_dropped() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    saved = save({"m": model, "o": optimizer})
    steps(optimizer)
    load(saved, {"m": model, "o": optimizer})
    assert not optimizer.state


def test_step_counters_stay_on_the_host_unless_a_kernel_reads_them() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    steps(optimizer)
    saved = save({"m": model, "o": optimizer})
    other = nn.Linear(2, 2)
    fresh = torch.optim.AdamW(other.parameters())
    load(saved, {"m": other, "o": fresh})
    assert fresh.state[other.weight]["step"].device.type == "cpu"


def test_nested_slots_without_a_parameters_shape_come_back() -> None:
    def state() -> State:
        weight = nn.Parameter(torch.ones(2, 3))
        return {"w": weight, "o": torch.optim.SGD([weight], lr=0.1, momentum=0.9)}

    trained, fresh = state(), state()
    train(trained)
    optimizer = cast("Optimizer", trained["o"])
    optimizer.state[cast("torch.Tensor", trained["w"])]["history"] = [torch.ones(5), (None, {3: torch.zeros(2, 3)}), []]
    cast("dict[object, object]", optimizer.state)["calls"] = {"total": torch.tensor(7), "n": 3}
    load(save(trained), fresh)
    assert_same(trained, fresh)
    assert cast("dict[object, dict[str, object]]", cast("Optimizer", fresh["o"]).state)["calls"]["n"] == 3


def test_hyper_parameters_follow_parameters_by_name_not_by_position() -> None:
    def state(*order: int) -> State:
        model = mlp()
        rates = [0.1, 0.2, 0.3]
        optimizer = torch.optim.AdamW(model[order[0]].parameters(), lr=rates[order[0]])
        for index in order[1:]:
            optimizer.add_param_group({"params": model[index].parameters(), "lr": rates[index]})
        return {"model": model, "optimizer": optimizer}

    trained, fresh = state(0, 1, 2), state(2, 0, 1)
    train(trained)
    cast("Optimizer", trained["optimizer"]).param_groups[0]["lr"] = 0.7
    load(save(trained), fresh)
    assert [group["lr"] for group in cast("Optimizer", fresh["optimizer"]).param_groups] == [0.3, 0.7, 0.2]


def split_groups(*rates: float) -> State:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([a], lr=rates[0]) if len(rates) > 1 else torch.optim.SGD([a, b], lr=rates[0])
    if len(rates) > 1:
        optimizer.add_param_group({"params": [b], "lr": rates[1]})
    return {"a": a, "b": b, "o": optimizer}


def test_one_saved_group_may_serve_two_live_ones() -> None:
    fresh = split_groups(0.5, 0.6)
    load(save(split_groups(0.1)), fresh)
    assert [group["lr"] for group in cast("Optimizer", fresh["o"]).param_groups] == [0.1, 0.1]


def test_saved_groups_merge_when_their_hyper_parameters_agree_and_clash_when_not() -> None:
    fresh = split_groups(0.5)
    binding = load(save(split_groups(0.1, 0.1)), fresh)
    assert cast("Optimizer", fresh["o"]).param_groups[0]["lr"] == 0.1
    assert binding.unexpected == []
    error = refused(save(split_groups(0.1, 0.2)), split_groups(0.5))
    assert error.code == "incompatible.groups"
    assert "lr" in str(error)


def test_an_empty_group_gets_the_hyper_parameters_of_its_place() -> None:
    def state(rate: float) -> State:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight])
        optimizer.add_param_group({"params": [], "lr": rate})
        return {"w": weight, "o": optimizer}

    fresh = state(0.5)
    load(save(state(0.25)), fresh)
    assert cast("Optimizer", fresh["o"]).param_groups[1]["lr"] == 0.25


def test_hyper_parameters_on_one_side_only_are_named() -> None:
    model = mlp()
    plain, scheduled = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
    LambdaLR(scheduled, lambda epoch: 0.9**epoch)
    assert "o/param_groups/0/initial_lr" in str(refused(save({"m": model, "o": scheduled}), {"m": model, "o": plain}))
    assert "o/param_groups/0/initial_lr" in str(refused(save({"m": model, "o": plain}), {"m": model, "o": scheduled}))


def test_two_models_with_the_same_fqns_and_two_optimizers_come_back_each_to_its_own() -> None:
    def state() -> State:
        a, b = mlp(), mlp()
        return {
            "gen": a,
            "disc": b,
            "opt": {"gen": torch.optim.Adam(a.parameters()), "disc": torch.optim.SGD(b.parameters(), momentum=0.5)},
        }

    def run(state: State) -> None:
        steps(*cast("dict[str, Optimizer]", state["opt"]).values())

    assert_restores(state, run)


def test_frozen_parameters_and_parameters_without_gradients_come_back() -> None:
    def state() -> State:
        model = mlp()
        model[0].requires_grad_(False)
        return {"m": model, "o": torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)}

    assert_restores(state, train)


# --- ties ------------------------------------------------------------------------------------------------------------


def lm(*, tied: bool) -> State:
    model = nn.ModuleDict({"emb": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    if tied:
        model["head"].weight = model["emb"].weight
    return {"m": model, "o": torch.optim.Adam(model.parameters())}


def test_tied_parameters_stay_tied_and_are_filled_once() -> None:
    assert_restores(lambda: lm(tied=True), train)
    saved = save(lm(tied=True))
    names = [target.name for target in bound(saved, lm(tied=True)).targets]
    assert names == ["m/emb.weight"]


def test_untied_parameters_are_both_served_from_the_tied_one() -> None:
    trained, fresh = lm(tied=True), lm(tied=False)
    train(trained)
    binding = load(save(trained), fresh)
    assert binding.missing == []
    sources = {(target.name, target.source) for target in binding.targets}
    assert {("m/emb.weight", "m/emb.weight"), ("m/head.weight", "m/emb.weight")} <= sources
    tensors = flatten(fresh).tensors
    for name in ("m/{}.weight", "o/state/m/{}.weight/exp_avg"):
        assert bits(tensors[name.format("emb")].memory[0]) == bits(tensors[name.format("head")].memory[0])


def test_tied_parameters_that_were_stored_separately_are_refused() -> None:
    error = refused(save(lm(tied=False)), lm(tied=True))
    assert error.code == "incompatible.tied"
    assert "m/head.weight" in str(error)


# --- sharded and wrapped ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
def test_fsdp2_state_comes_back_as_dtensors_in_its_saved_dtype() -> None:
    def state() -> State:
        model = mlp()
        fully_shard(model)
        return {"m": model, "o": torch.optim.AdamW(model.parameters(), foreach=False)}

    _, fresh = assert_restores(state, train)
    weight = next(iter(cast("nn.Module", fresh["m"]).parameters()))
    average = cast("Optimizer", fresh["o"]).state[weight]["exp_avg"]
    assert isinstance(weight, DTensor)
    assert isinstance(average, DTensor)
    assert average.placements == weight.placements
    assert type(cast("Optimizer", fresh["o"]).state[weight]["step"]) is torch.Tensor


@pytest.mark.usefixtures("world_of_one")
def test_state_moves_between_plain_ddp_compiled_and_fsdp2_modules() -> None:
    def state(wrap: Callable[[nn.Module], nn.Module]) -> State:
        model = wrap(mlp())
        return {"m": model, "o": torch.optim.AdamW(model.parameters())}

    wraps: list[Callable[[nn.Module], nn.Module]] = [
        nn.parallel.DistributedDataParallel,
        lambda model: cast("nn.Module", torch.compile(model, backend="eager")),
        sharded,
        lambda model: model,
    ]
    origin = state(lambda model: model)
    train(origin)
    previous = origin
    for wrap in wraps:
        following = state(wrap)
        load(save(previous), following)
        previous = following
    assert_same(origin, previous)


def test_a_modules_tensors_load_into_a_plain_dict_of_tensors_and_back() -> None:
    model, other = mlp(), mlp()
    tensors = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    load(save({"m": model}), {"m": tensors})
    load(save({"m": tensors}), {"m": other})
    assert_same({"m": model}, {"m": other})


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


class Loader:
    """A data loader's state: nested, with tensors, in whatever shape it has when it is saved."""

    def __init__(self, state: object = None) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


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
    expected = ("2 differ", "'m/weight'", "bfloat16 here", "float32 in the checkpoint", "stored dtype")
    assert all(part in str(error) for part in expected)


def test_a_shape_difference_is_an_error_also_when_not_strict() -> None:
    saved = save({"m": nn.Linear(2, 2)})
    with pytest.raises(IncompatibleError, match=r"incompatible\.shape.*\(3,\) here, \(2,\) in the checkpoint"):
        bound(saved, {"m": nn.Linear(2, 3)}, strict=False)


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (torch.zeros(1), 1),
        (1, torch.zeros(1)),
        ({"a": 1}, [1]),
        ([1], {"a": 1}),
        ([torch.zeros(1)], []),
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
    assert "o/group_of/m%2F1.weight" in str(error)


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
    error = difference([], unexpected[0], saved.stored, nodes)
    assert "stage1 (the whole module: 9 names)" in str(error)


def test_live_tensors_without_memory_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(StateError, match="to_empty"):
        bound(save({"m": nn.Linear(2, 2)}), {"m": model})


@pytest.mark.parametrize(
    "value", [TorchValue("dtype", "nn"), TorchValue("device", "nowhere:x"), TorchValue("size", "1,x")]
)
def test_torch_values_that_torch_does_not_know_are_corrupt(value: TorchValue) -> None:
    with pytest.raises(CorruptError, match=value.kind):
        revive(value)


def test_floats_in_optimizer_groups_keep_every_bit() -> None:
    weight = nn.Parameter(torch.ones(1))
    odd = struct.unpack("<d", struct.pack("<Q", 0x3FB999999999999B))[0]
    fresh = torch.optim.SGD([weight], lr=0.5)
    load(save({"w": weight, "o": torch.optim.SGD([weight], lr=odd)}), {"w": weight, "o": fresh})
    assert struct.pack("<d", fresh.param_groups[0]["lr"]) == struct.pack("<d", odd)
