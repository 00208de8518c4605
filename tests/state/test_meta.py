"""Models that are built on the meta device get memory from the load, in place, and nothing stays there unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim import AdamW

import holdfast
from holdfast.mapping import Fuse, Pad
from tests.support.nursery import run_script

State = dict[str, Any]


class Net(nn.Module):
    """Parameters, tied ones, a frozen one, and buffers that are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.body(self.emb(tokens)) * self.scale))


def on_meta(make: Callable[[], nn.Module] = Net) -> Any:
    with torch.device("meta"):
        return make()


def trained(model: nn.Module) -> State:
    """A model with random values everywhere, and an optimizer that has taken steps."""
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def change(state: State) -> None:
    step(state["model"], state["optimizer"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach().cos()
    optimizer.step()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    state = trained(Net())
    with torch.no_grad():
        for tensor in state["model"].state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) * 100)
    holdfast.save(tmp_path / "run", state, 1)
    return tmp_path / "run"


@pytest.fixture
def saved(run: Path) -> State:
    """The content of the run, in ordinary memory."""
    state = trained(Net())
    holdfast.load(run, state)
    return state


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.state_dict(keep_vars=True))


def assert_same(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def slots(state: State) -> list[dict[str, torch.Tensor]]:
    return [state["optimizer"].state[parameter] for parameter in state["model"].parameters()]


# --- what is filled --------------------------------------------------------------------------------------------------


def test_parameters_and_buffers_get_memory_and_stay_the_objects_that_they_are(run: Path, saved: State) -> None:
    model = on_meta()
    before, kinds = tensors(model), {name: type(tensor) for name, tensor in tensors(model).items()}
    report = holdfast.load(run, {"model": model}, select="model")
    assert_same(model, saved["model"])
    after = tensors(model)
    assert all(after[name] is before[name] for name in before)
    assert {name: type(tensor) for name, tensor in after.items()} == kinds
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in saved["model"].parameters()]
    assert [t.stride() for t in after.values()] == [t.stride() for t in tensors(saved["model"]).values()]
    assert report.on_meta == ()


def test_an_optimizer_from_before_the_load_gets_its_state_and_goes_on(run: Path, saved: State) -> None:
    model = on_meta()
    state = {"model": model, "optimizer": AdamW(model.parameters(), lr=0.5)}
    holdfast.load(run, state)
    for mine, theirs in zip(slots(state), slots(saved), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    for each in (state, saved):
        step(each["model"], each["optimizer"])
    assert_same(model, saved["model"])
    tokens = torch.arange(11)
    assert torch.equal(model(tokens), saved["model"](tokens))


def test_capturable_step_counters_are_where_the_parameters_are_now(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    state: State = {"model": model, "optimizer": AdamW(model.parameters())}
    step(model, state["optimizer"])
    state["optimizer"].param_groups[0]["capturable"] = True
    holdfast.save(tmp_path / "run", state, 1)
    model = on_meta(lambda: nn.Linear(3, 2))
    state = {"model": model, "optimizer": AdamW(model.parameters())}
    holdfast.load(tmp_path / "run", state)
    assert {slot.device.type for each in slots(state) for slot in each.values()} == {"cpu"}


def test_hooks_and_attributes_of_parameters_are_kept(run: Path) -> None:
    model, called = on_meta(), []
    weight = model.emb.weight
    weight.sequence_parallel = True
    handles = [
        weight.register_hook(lambda grad: called.append("gradient")),
        weight.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated")),
    ]
    holdfast.load(run, {"model": model}, select="model")
    model(torch.arange(11)).sum().backward()
    assert called == ["gradient", "accumulated"]
    assert weight.sequence_parallel is True
    for handle in handles:
        handle.remove()
    model(torch.arange(11)).sum().backward()
    assert called == ["gradient", "accumulated"]


def test_the_weights_of_rnns_are_filled_although_they_are_weakly_referenced(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": (trained_one := nn.LSTM(3, 4, 2))}, 1)
    model = on_meta(lambda: nn.LSTM(3, 4, 2))
    holdfast.load(tmp_path / "run", {"model": model})
    sample = torch.rand(5, 2, 3)
    assert torch.equal(model(sample)[0], trained_one(sample)[0])


def test_one_parameter_under_two_names_stays_one(run: Path) -> None:
    model = on_meta()
    report = holdfast.load(run, {"model": model}, select="model")
    assert model.head.weight is model.emb.weight
    assert "model/emb.weight" in report.loaded
    assert "model/head.weight" not in report.loaded


class Shared(nn.Module):
    """Parameters that are other objects over one memory, and one that is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(4, 6))
        self.b = nn.Parameter(self.a.data)
        self.row = nn.Parameter(self.a.data[2])
        self.register_buffer("columns", self.a.data.t())
        self.alone = nn.Parameter(torch.rand(4, 6))


def test_tensors_that_share_a_storage_on_meta_share_one_afterwards(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": Shared()}, 1)
    model = on_meta(Shared)
    holdfast.load(tmp_path / "run", {"model": model})
    model.a.data.fill_(7)
    assert all(bool((tensor == 7).all()) for tensor in (model.b, model.row, model.columns))
    assert not (model.alone == 7).any()
    assert model.a.untyped_storage().nbytes() == 4 * 6 * 4


def test_of_a_larger_storage_on_meta_only_what_is_used_gets_memory(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.arange(6.0).reshape(2, 3)}, 1)
    with torch.device("meta"):
        w = torch.empty(1000, 3).detach()[501:503].detach()
    holdfast.load(tmp_path / "run", {"w": w})
    assert w.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert w.untyped_storage().nbytes() < 64


def test_empty_tensors_and_scalars_get_memory_too(tmp_path: Path) -> None:
    state = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(5, dtype=torch.int16), "other": torch.zeros(0, 3)}
    holdfast.save(tmp_path / "run", state, 1)
    into = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    holdfast.load(tmp_path / "run", into)
    assert {tensor.device.type for tensor in into.values()} == {"cpu"}
    assert into["scalar"].item() == 5


def test_loose_tensors_in_any_container_are_filled_in_place(tmp_path: Path) -> None:
    def state(device: str | None, fill: float) -> State:
        ema, a, b, c = (torch.full((3,), fill + i, device=device) for i in range(4))
        return {"ema": ema, "list": [a, 1], "tuple": (b,), "rank": holdfast.PerRank({"c": c})}

    holdfast.save(tmp_path / "run", state(None, 1.0), 1)
    into = state("meta", 0.0)
    ema = into["ema"]
    holdfast.load(tmp_path / "run", into)
    assert into["ema"] is ema
    found = [into["ema"], into["list"][0], into["tuple"][0], into["rank"].value["c"]]
    assert [tensor.tolist() for tensor in found] == [[1.0 + i] * 3 for i in range(4)]


class Scaled(torch.Tensor):
    """A float tensor held as integers and a scale; on the device that they are on."""

    whole: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor) -> Scaled:  # noqa: PYI034
        made = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32, device=whole.device)
        made.whole, made.scale = whole, scale
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            of = cast("Scaled", args[0])
            return Scaled(of.whole, of.scale)
        raise NotImplementedError(func)


holdfast.register_tensor(
    Scaled,
    lambda tensor: {"whole": tensor.whole, "scale": tensor.scale},
    lambda planes: Scaled(planes["whole"], planes["scale"]),
    name="tests.scaled",
)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Scaled(torch.ones(4, 3).char(), torch.full((4,), 0.5)), requires_grad=False)
        self.again = self.weight


def test_a_tensor_of_a_registered_type_is_on_the_device_of_its_planes(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": Quantised()}, 1)
    model = on_meta(Quantised)
    weight = model.weight
    weight.tag = "kept"
    holdfast.load(tmp_path / "run", {"model": model})
    assert model.weight is weight is model.again
    assert (weight.device.type, weight.tag, weight.whole.tolist()) == ("cpu", "kept", [[1] * 3] * 4)
    assert weight.scale.tolist() == [0.5] * 4
    assert isinstance(weight, nn.Parameter)


def test_a_registered_tensor_that_is_not_loaded_stays_as_it_is(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": Quantised(), "x": 1}, 1)
    model = on_meta(Quantised)
    report = holdfast.load(tmp_path / "run", {"model": model, "x": 0}, select="x")
    assert model.weight.is_meta
    assert len(report.on_meta) == 4


# --- what cannot be filled -------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.freqs = torch.arange(4.0)
        self.same = [self.proj.weight]
        object.__setattr__(self, "known", self.proj.weight)


@pytest.mark.parametrize(("kind", "name"), [(Rotary, "inv_freq"), (Attribute, "freqs")])
def test_what_no_checkpoint_has_is_an_error_before_anything_changes(
    tmp_path: Path, kind: type[nn.Module], name: str
) -> None:
    holdfast.save(tmp_path / "run", {"model": nn.Sequential(kind())}, 1)
    model = on_meta(lambda: nn.Sequential(kind()))
    with pytest.raises(holdfast.IncompatibleError, match=rf"model/0\.{name}\..*before the load.*on_meta") as caught:
        holdfast.load(tmp_path / "run", {"model": model})
    assert (caught.value.code, caught.value.tensor) == ("incompatible.meta", f"model/0.{name}")
    assert all(parameter.is_meta for parameter in model.parameters())

    setattr(model[0], name, torch.arange(4.0))
    assert holdfast.load(tmp_path / "run", {"model": model}).on_meta == ()
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "name"), [(Rotary, "inv_freq"), (Attribute, "freqs")])
def test_without_strict_it_is_reported(tmp_path: Path, kind: type[nn.Module], name: str) -> None:
    holdfast.save(tmp_path / "run", {"model": kind()}, 1)
    model = on_meta(kind)
    report = holdfast.load(tmp_path / "run", {"model": model}, strict=False)
    assert report.on_meta == (f"model/{name}",)
    assert getattr(model, name).is_meta
    assert not model.proj.weight.is_meta


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm, parametrizations.weight_norm])
def test_what_is_computed_before_each_forward_may_stay(tmp_path: Path, norm: Callable[[nn.Module], nn.Module]) -> None:
    holdfast.save(tmp_path / "run", {"model": (original := norm(nn.Linear(4, 3)).eval())}, 1)
    model = on_meta(lambda: norm(nn.Linear(4, 3)).eval())
    assert holdfast.load(tmp_path / "run", {"model": model}).on_meta == ()
    assert torch.equal(model(torch.ones(1, 4)), original(torch.ones(1, 4)))


def test_a_name_that_the_checkpoint_lacks_is_missing_and_stays_on_meta(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": nn.Linear(2, 2, bias=False)}, 1)
    model = on_meta(lambda: nn.Linear(2, 2))
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.names.*model/bias"):
        holdfast.load(tmp_path / "run", {"model": model})
    assert model.weight.is_meta
    report = holdfast.load(tmp_path / "run", {"model": model}, strict=False)
    assert report.missing == report.on_meta == ("model/bias",)
    assert not model.weight.is_meta


def test_a_difference_changes_nothing(run: Path) -> None:
    model = on_meta()
    model.scale = nn.Parameter(torch.ones(7, device="meta"))
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.shape.*model/scale"):
        holdfast.load(run, {"model": model}, select="model")
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_a_tensor_that_something_else_holds_is_refused_by_name(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.ones(4, 2), "x": torch.ones(2)}, 1)
    into = {"w": torch.zeros(4, 2, device="meta"), "x": torch.zeros(2, device="meta")}
    view = into["w"][1:]
    with pytest.raises(holdfast.StateError, match=r"state\.unsupported_tensor.*'w'.*a view"):
        holdfast.load(tmp_path / "run", into)
    assert into["x"].is_meta
    del view
    holdfast.load(tmp_path / "run", into)
    assert into["w"].sum() == 8


def test_a_graph_from_a_forward_on_meta_is_in_the_way_until_it_is_gone(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": nn.Linear(2, 2)}, 1)
    model = on_meta(lambda: nn.Linear(2, 2))
    output = model(torch.ones(1, 2, device="meta"))
    with pytest.raises(holdfast.StateError, match=r"an autograd graph"):
        holdfast.load(tmp_path / "run", {"model": model})
    del output
    holdfast.load(tmp_path / "run", {"model": model})
    assert model(torch.ones(1, 2)).device.type == "cpu"


# --- with the other options ------------------------------------------------------------------------------------------


def test_what_is_not_selected_stays_on_meta_and_is_reported(run: Path, saved: State) -> None:
    model = on_meta()
    report = holdfast.load(run, {"model": model}, select="model/body.*")
    rest = ("model/emb.weight", "model/head.weight", "model/scale")
    assert report.on_meta == rest
    assert sorted(f"model/{name}" for name, tensor in tensors(model).items() if tensor.is_meta) == list(rest)
    assert holdfast.load(run, {"model": model}, select=["model", "!model/body.*"]).on_meta == ()
    assert_same(model, saved["model"])


def test_selecting_a_part_asks_nothing_of_the_rest(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": nn.ModuleDict({"a": Rotary(), "b": Rotary()})}, 1)
    model = on_meta(lambda: nn.ModuleDict({"a": Rotary(), "b": Rotary()}))
    model["a"].inv_freq = torch.ones(4)
    report = holdfast.load(tmp_path / "run", {"model": model}, select="model/a.*")
    assert report.on_meta == ("model/b.inv_freq", "model/b.proj.bias", "model/b.proj.weight")
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.meta.*: model/b\.inv_freq\."):
        holdfast.load(tmp_path / "run", {"model": model}, select="model/b.*")


def test_elements_are_cast_on_their_way_into_new_memory(run: Path, saved: State) -> None:
    model = on_meta(lambda: Net().half())
    holdfast.load(run, {"model": model}, select="model", cast=True)
    assert_same(model, saved["model"].half())


def test_mapped_tensors_fill_new_memory(tmp_path: Path) -> None:
    parts = {"q": torch.rand(4, 3), "k": torch.rand(2, 3), "emb": torch.rand(5, 3)}
    holdfast.save(tmp_path / "run", parts, 1)
    into = {"qk": torch.empty(6, 3, device="meta"), "emb": torch.empty(8, 3, device="meta")}
    holdfast.load(tmp_path / "run", into, mapping=[Fuse(["q", "k"], "qk"), Pad("emb", size=8, fill="zero")])
    assert torch.equal(into["qk"], torch.cat([parts["q"], parts["k"]]))
    assert torch.equal(into["emb"], torch.cat([parts["emb"], torch.zeros(3, 3)]))


def test_on_meta_there_is_nothing_to_keep(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"emb": torch.rand(5, 3)}, 1)
    into = {"emb": torch.empty(8, 3, device="meta")}
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.meta.*'emb': on the meta device"):
        holdfast.load(tmp_path / "run", into, mapping=[Pad("emb", size=8, fill="keep")])
    assert into["emb"].is_meta


def test_tensors_that_were_not_tied_must_be_equal_to_fill_a_tied_one(tmp_path: Path) -> None:
    apart = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    holdfast.save(tmp_path / "run", apart, 1)
    tied = on_meta(lambda: nn.Linear(2, 2))
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.tied"):
        holdfast.load(tmp_path / "run", {"a": tied, "b": tied})
    apart["b"].load_state_dict(apart["a"].state_dict())
    holdfast.save(tmp_path / "equal", apart, 1)
    tied = on_meta(lambda: nn.Linear(2, 2))
    holdfast.load(tmp_path / "equal", {"a": tied, "b": tied})
    assert_same(tied, apart["a"])


@pytest.fixture
def default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_memory_is_where_torch_makes_new_tensors_or_where_the_call_says(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.ones(2)}, 1)
    into = {"w": torch.zeros(2, device="meta")}
    torch.set_default_device("meta")
    with pytest.raises(
        holdfast.ConfigurationError, match=r"config\.device.*outside of torch\.device\('meta'\).*device="
    ):
        holdfast.load(tmp_path / "run", into)
    assert into["w"].is_meta
    holdfast.load(tmp_path / "run", into, device="cpu")
    assert into["w"].tolist() == [1, 1]


def test_meta_is_no_device_to_load_to(run: Path) -> None:
    with pytest.raises(ValueError, match="device must be a device with memory"):
        holdfast.load(run, {}, device="meta")


def test_a_load_of_a_model_on_meta_can_be_planned_without_taking_memory(run: Path) -> None:
    model = on_meta()
    plan = holdfast.plan_load(run, {"model": model}, select="model")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    report = holdfast.load(run, {"model": model}, select="model")
    assert (plan.loaded, plan.needed_nbytes) == (report.loaded, report.needed_nbytes)


def test_a_transfer_fills_a_model_on_meta_too() -> None:
    source, target = Net(), on_meta()
    holdfast.transfer({"model": source}, {"model": target})
    assert_same(target, source)
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.meta.*model/inv_freq"):
        holdfast.transfer({"model": Rotary()}, {"model": on_meta(Rotary)})


# --- when the load fails in the middle -------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A run of two steps, in the second of which a block in the middle of a tensor is damaged, and what it holds."""
    model = nn.Linear(1024, 1024)
    for step in (1, 2):
        holdfast.save(tmp_path / "run", {"model": model}, step)
    (data,) = tmp_path.glob("run/checkpoints/step-0000000002-*/*.safetensors")
    with data.open("r+b") as file:
        file.seek(3 << 20)
        file.write(bytes(16))
    return tmp_path / "run", model


def test_after_a_damaged_block_the_model_has_memory_and_is_said_to_be_partly_filled(
    damaged: tuple[Path, nn.Module],
) -> None:
    run, model = damaged
    fresh = on_meta(lambda: nn.Linear(1024, 1024))
    weight = fresh.weight
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.load(run, {"model": fresh})
    assert any("partly filled" in note for note in caught.value.__notes__)
    assert not any(tensor.is_meta for tensor in fresh.state_dict().values())
    holdfast.load(f"{run}@step=1", {"model": fresh})
    assert fresh.weight is weight
    assert_same(fresh, model)


def test_the_next_older_checkpoint_fills_a_model_on_meta(damaged: tuple[Path, nn.Module]) -> None:
    run, model = damaged
    fresh = on_meta(lambda: nn.Linear(1024, 1024))
    assert holdfast.load(run, {"model": fresh}, fallback=True).step == 1
    assert_same(fresh, model)


# --- memory ----------------------------------------------------------------------------------------------------------

_MEASURED = r"""
import re, sys, torch, holdfast

def peak():  # of this program: ru_maxrss knows also what the process was before
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024

with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(32)])
start = peak()
holdfast.load(sys.argv[1], {"model": model})
assert all(bool((layer.weight[0] == number).all()) for number, layer in enumerate(model))
print(peak() - start)
"""


def test_the_memory_of_a_model_is_taken_once(tmp_path: Path) -> None:
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(32)]
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, number)
    holdfast.save(tmp_path / "run", {"model": nn.Sequential(*layers)}, 1)
    del layers
    done = run_script(_MEASURED, str(tmp_path / "run"), timeout_s=100)
    assert done.status == 0, done.err
    assert 500 << 20 < int(done.out) < (512 + 128) << 20


# --- inference mode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["load", "restore", "transfer"])
def test_what_was_filled_in_inference_mode_can_be_trained(tmp_path: Path, verb: str) -> None:
    def training() -> tuple[nn.Linear, AdamW]:
        model = nn.Linear(3, 2)
        return model, AdamW(model.parameters())

    (model, optimizer), (other, fresh) = training(), training()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    into: dict[str, object] = {"model": other, "optimizer": fresh}
    holdfast.save(tmp_path / "run", state, 1)
    with torch.inference_mode():
        if verb == "load":
            holdfast.load(tmp_path / "run", into)
        elif verb == "transfer":
            holdfast.transfer(state, into)
        else:
            holdfast.Checkpointer(tmp_path / "run", into, memory=None).restore()
        assert torch.is_inference_mode_enabled()
    for trained, by in ((model, optimizer), (other, fresh)):
        by.zero_grad()
        trained(torch.ones(3)).sum().backward()
        by.step()
    assert other.weight.equal(model.weight)
