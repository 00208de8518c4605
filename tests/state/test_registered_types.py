from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import PurePosixPath
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from holdfast.errors import ConfigurationError, IncompatibleError, StateError
from holdfast.format import values
from holdfast.format.values import Encoded, Items, Plain, PlanesNode, Undecoded
from holdfast.state import registered_types
from holdfast.state.flatten import flatten
from holdfast.state.registered_types import register_tensor, register_value
from tests.support.bound import Loader, State, assert_same, bits, bound, load, refused, save

# --- values ----------------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    WARMUP = "warmup"
    DECAY = "decay"


@dataclass
class Window:
    """A value that holds values of another registered type, and a tensor."""

    phases: deque[Phase]
    mean: torch.Tensor


register_value(Phase, lambda phase: phase.value, Phase, name="tests.phase")
register_value(deque, list, deque, name="deque")
register_value(
    Window,
    lambda window: {"phases": window.phases, "mean": window.mean},
    lambda stored: Window(**stored),
    name="tests.window",
)


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def forget(name: str) -> None:
        monkeypatch.delitem(registered_types._BY_TYPE, registered_types._BY_NAME[name].kind)
        monkeypatch.delitem(registered_types._BY_NAME, name)

    return forget


@pytest.fixture
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_types, "_BY_TYPE", {})
    monkeypatch.setattr(registered_types, "_BY_NAME", {})


def test_a_registered_value_is_stored_as_its_name_and_what_it_was_encoded_to() -> None:
    nodes = flatten({"phase": Phase.DECAY, "seen": deque([1, 2])}).nodes
    assert nodes["phase"] == Encoded("tests.phase", values.Text(b"decay"))
    assert nodes["seen"] == Encoded("deque", Items("list", 2))
    assert nodes["seen/1"] == Plain(2)


def test_registered_values_come_back_wherever_values_may_stand() -> None:
    history: list[object] = [Phase.WARMUP]
    into: State = {"phase": Phase.WARMUP, "history": history, "by": {"x": None}, "t": (0, torch.zeros(1))}
    saved: State = {
        "phase": Phase.DECAY,
        "history": [Phase.DECAY, {3: (Phase.WARMUP, 1)}],
        "by": {"x": Phase.DECAY},
        "t": (deque([Phase.DECAY]), torch.ones(1)),
    }
    binding = load(save(saved), into)
    assert into["phase"] is Phase.DECAY
    assert into["history"] is history
    assert_same(saved, into)
    assert "phase" in binding.loaded


def test_registered_values_nest_and_hold_tensors() -> None:
    into: State = {"w": Window(deque(), torch.zeros(0)), "loader": Loader()}
    saved: State = {"w": Window(deque([Phase.DECAY]), torch.arange(3)), "loader": Loader({"phase": [Phase.DECAY]})}
    load(save(saved), into)
    window, loader = cast("Window", into["w"]), cast("Loader", into["loader"])
    assert window.phases == deque([Phase.DECAY])
    assert torch.equal(window.mean, torch.arange(3))
    assert loader.state == {"phase": [Phase.DECAY]}


def test_an_object_whose_state_is_a_registered_value_comes_back() -> None:
    into = Loader()
    load(save({"loader": Loader(Phase.DECAY)}), {"loader": into})
    assert into.state is Phase.DECAY


def test_only_the_exact_type_is_registered() -> None:
    class Longer(deque[int]):
        pass

    with pytest.raises(StateError, match=r"state\.unsupported_leaf.*register_value\(.*Longer"):
        save({"x": Longer()})


def test_an_encoder_that_gives_another_registered_object_is_refused_with_what_to_do() -> None:
    class Box:
        pass

    register_value(Box, lambda _: Phase.DECAY, lambda _: Box(), name="tests.box")
    with pytest.raises(StateError, match=r"state\.encoded.*tests\.box.*'a/0'"):
        save({"a": [Box()]})


def test_loading_without_the_registration_names_it(unregistered: Callable[[str], None]) -> None:
    saved = save({"config": {"phase": Phase.DECAY}, "loader": Loader([Phase.DECAY])})
    unregistered("tests.phase")
    for into in ({"config": {"phase": None}}, {"loader": Loader()}):
        with pytest.raises(IncompatibleError) as caught:
            bound(saved, dict(into), strict=False)
        assert caught.value.code == "incompatible.unregistered_value"
        assert "'tests.phase'" in str(caught.value)
        assert caught.value.path in ("config/phase", "loader/0")


def test_without_the_registration_a_value_reads_as_its_name_and_the_plain_value(
    unregistered: Callable[[str], None],
) -> None:
    nodes = values.decode(save({"phase": [Phase.DECAY]}).nodes)
    assert values.rebuild(nodes, "phase", str) == [Undecoded("tests.phase", "decay")]
    assert values.rebuild(nodes, "phase", str, decode=registered_types.decode) == [Phase.DECAY]
    unregistered("tests.phase")
    assert values.rebuild(nodes, "phase", str, decode=registered_types.decode) == [Undecoded("tests.phase", "decay")]


def test_a_stored_registered_container_does_not_fill_a_live_plain_one() -> None:
    error = refused(save({"x": deque([1])}), {"x": [2]})
    assert error.code == "incompatible.kind"
    assert "a list here, a registered 'deque' in the checkpoint" in str(error)


@pytest.mark.usefixtures("no_registrations")
def test_registering_the_same_again_is_fine_and_something_else_is_not() -> None:
    def other(stored: object) -> Phase:
        return Phase(stored)

    register_value(PurePosixPath, str, PurePosixPath, name="path")
    register_value(PurePosixPath, str, PurePosixPath, name="path")
    others: list[Callable[[], None]] = [
        lambda: register_value(PurePosixPath, str, PurePosixPath, name="other name"),
        lambda: register_value(PurePosixPath, repr, PurePosixPath, name="path"),
        lambda: register_value(Phase, str, other, name="path"),
    ]
    for register in others:
        with pytest.raises(ConfigurationError, match=r"config\.registration.*PurePosixPath.*'path'"):
            register()


@pytest.mark.parametrize("kind", [int, dict, type(None), torch.Tensor, nn.Parameter])
def test_types_that_are_saved_as_they_are_need_no_registration(kind: type) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.registration"):
        register_value(kind, repr, kind, name="x")


# --- tensors ---------------------------------------------------------------------------------------------------------


class Quantised(torch.Tensor):
    """A float tensor held as 8-bit integers and one scale per row."""

    data8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor) -> Quantised:  # noqa: PYI034
        made = torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32)
        made.data8, made.scale = data8, scale
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            of = cast("Quantised", args[0])
            return Quantised(of.data8, of.scale)
        raise NotImplementedError(func)

    def planes(self) -> dict[str, torch.Tensor]:
        return {"data": self.data8, "scale": self.scale}


register_tensor(
    Quantised, Quantised.planes, lambda planes: Quantised(planes["data"], planes["scale"]), name="tests.int8"
)


def quantised(seed: int) -> Quantised:
    generator = torch.Generator().manual_seed(seed)
    return Quantised(
        torch.randint(-128, 128, (3, 4), dtype=torch.int8, generator=generator), torch.rand(3, generator=generator)
    )


class Layer(nn.Module):
    weight: torch.Tensor
    table: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantised(seed), requires_grad=False)
        self.register_buffer("table", quantised(seed + 1))
        self.bias = nn.Parameter(torch.full((2,), float(seed)))


CALLS = count()


def test_a_registered_tensor_is_stored_as_its_planes_in_live_memory() -> None:
    tensor = quantised(0)
    flat = flatten({"q": tensor})
    assert flat.nodes["q"] == PlanesNode("tests.int8", ("data", "scale"))
    assert list(flat.tensors) == ["q/%plane=data", "q/%plane=scale"]
    assert flat.tensors["q/%plane=data"].layout.dtype == "int8"
    assert flat.tensors["q/%plane=data"].memory[0].data_ptr() == tensor.data8.data_ptr()


def test_parameters_buffers_and_loose_tensors_of_a_registered_type_are_filled_in_place() -> None:
    def state(seed: int) -> State:
        return {"m": Layer(seed), "loose": [quantised(seed + 2), 1], "pair": (quantised(seed + 3),)}

    saved, into = state(0), state(10)
    layer = cast("Layer", into["m"])
    weight, planes = layer.weight, cast("Quantised", layer.weight).planes()
    loose = cast("list[object]", into["loose"])[0]
    load(save(saved), into)
    assert_same(saved, into)
    assert layer.weight is weight
    assert cast("Quantised", weight).data8 is planes["data"]
    assert bits(planes["scale"]) == bits(quantised(0).scale)
    assert cast("list[object]", into["loose"])[0] is loose


def test_one_registered_tensor_under_two_names_is_stored_once() -> None:
    tensor, into = quantised(0), quantised(1)
    saved = save({"a": tensor, "b": tensor})
    assert saved.aliases == {"b/%plane=data": "a/%plane=data", "b/%plane=scale": "a/%plane=scale"}
    load(saved, {"a": into, "b": into})
    assert bits(into.data8) == bits(tensor.data8)


def test_optimizers_know_registered_parameters_by_their_names_and_their_slots_come_back_in_fresh_ones() -> None:
    def state(seed: int, *, slots: bool) -> State:
        layer = Layer(seed)
        optimizer = torch.optim.SGD([layer.weight, layer.bias], lr=0.1, momentum=0.9)
        if slots:
            optimizer.state[layer.weight]["momentum_buffer"] = quantised(seed + 5)
        return {"a_first": optimizer, "m": layer}

    saved, into = state(0, slots=True), state(9, slots=False)
    assert "a_first/state/m/weight/momentum_buffer/%plane=data" in flatten(saved).tensors
    load(save(saved), into)
    assert_same(saved, into)
    optimizer = cast("torch.optim.Optimizer", into["a_first"])
    assert type(optimizer.state[cast("Layer", into["m"]).weight]["momentum_buffer"]) is Quantised


def test_what_an_object_held_as_a_registered_tensor_is_rebuilt() -> None:
    into = Loader()
    load(save({"loader": Loader({"cache": quantised(3)})}), {"loader": into})
    cache = cast("dict[str, Quantised]", into.state)["cache"]
    assert bits(cache.data8) == bits(quantised(3).data8)


def test_rebuilding_without_the_registration_names_it(unregistered: Callable[[str], None]) -> None:
    saved = save({"loader": Loader(quantised(3))})
    unregistered("tests.int8")
    with pytest.raises(IncompatibleError, match=r"incompatible\.unregistered_value.*'tests\.int8'.*register_tensor"):
        bound(saved, {"loader": Loader()})


@pytest.mark.parametrize(
    ("stored", "live"),
    [(quantised(0), torch.zeros(3, 4)), (torch.zeros(3, 4), quantised(0)), (quantised(0), 3), (3, quantised(0))],
    ids=["planes for plain", "plain for planes", "planes for a value", "a value for planes"],
)
def test_plain_and_registered_tensors_do_not_fill_each_other(stored: object, live: object) -> None:
    error = refused(save({"x": stored}), {"x": live})
    assert error.code == "incompatible.kind"
    assert "'x'" in str(error)


def test_a_missing_registered_tensor_is_named_by_its_planes() -> None:
    binding = bound(save({}), {"q": quantised(0)}, strict=False)
    assert binding.missing == ["q/%plane=data", "q/%plane=scale"]


def test_an_unregistered_subclass_is_refused_with_its_type_and_the_way_to_register_it() -> None:
    class Ternary(torch.Tensor):
        pass

    with pytest.raises(StateError, match=r"state\.unsupported_tensor.*'m/w'.*Ternary.*register_tensor\(.*Ternary"):
        save({"m": {"w": torch.zeros(2).as_subclass(Ternary)}})


@pytest.mark.usefixtures("world_of_one")
def test_a_dtensor_over_a_registered_tensor_is_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(
        quantised(0), mesh, [Replicate()], run_check=False, shape=torch.Size((3, 4)), stride=(4, 1)
    )
    with pytest.raises(StateError, match=r"state\.unsupported_tensor.*'w'.*Quantised"):
        save({"w": tensor})


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(
    ("planes", "reason"),
    [
        (lambda _: {}, "returned no planes"),
        (lambda tensor: {"scale": tensor.scale.clone()}, "returned copies"),
        (lambda tensor: {f"call {next(CALLS)}": tensor.scale}, "returned other planes"),
        (lambda _: {"scale": 1}, "returned an int as 'scale', not a tensor"),
        (lambda tensor: {0: tensor.scale}, "returned a Tensor as 0, not a tensor under a name"),
        (lambda tensor: [tensor.scale], "returned a list, not a dict of planes"),
    ],
    ids=["none", "copies", "changing names", "no tensor", "no name", "no dict"],
)
def test_planes_that_could_not_be_filled_are_refused(
    planes: Callable[[Quantised], Mapping[str, torch.Tensor]], reason: str
) -> None:
    register_tensor(Quantised, planes, lambda stored: quantised(0), name="x")
    with pytest.raises(StateError, match=rf"state\.planes.*'x' {reason}.*'q'"):
        save({"q": quantised(0)})


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter, DTensor, int])
def test_only_tensor_subclasses_are_registered_as_tensors(kind: type[torch.Tensor]) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.registration"):
        register_tensor(kind, lambda tensor: {"all": tensor}, lambda planes: planes["all"], name="x")


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(
    ("kind", "planes", "name", "reason"),
    [
        ("Quantised", list, "x", "a type to register, not a str"),
        (Quantised, None, "x", "planes must be a function, not a NoneType"),
        (Quantised, list, "", "not ''"),
        (Quantised, list, 1, "not 1"),
    ],
)
def test_a_registration_with_arguments_of_other_types_registers_nothing(
    kind: Any, planes: Any, name: Any, reason: str
) -> None:
    for register in (register_tensor, register_value):
        with pytest.raises(TypeError, match=reason if register is register_tensor else "not"):
            register(kind, planes, lambda stored: quantised(0), name=name)
    assert not registered_types._BY_NAME


def test_an_encoder_that_gives_what_it_was_given_is_refused() -> None:
    class Itself:
        pass

    register_value(Itself, lambda value: value, lambda value: value, name="tests.Itself")
    with pytest.raises(StateError, match="into another registered type") as caught:
        flatten({"x": Itself()})
    assert caught.value.code == "state.encoded"
