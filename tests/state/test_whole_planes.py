"""The planes of a tensor stay together, and what cannot be read or made of them is refused with a reason."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import IncompatibleError, StateError
from holdfast.format.patterns import Globs
from holdfast.frameworks import planes
from holdfast.mapping import Crop, Drop, Rename, Rule, Split, Transpose
from holdfast.mapping.draft import CheckpointTable
from holdfast.plan import dry_run
from holdfast.plan.layout_rules import fsdp
from holdfast.state.flatten import flatten
from tests.state.blocks_of_tests import Blockwise
from tests.state.test_planes import know_blocks
from tests.support.bound import State, bits, bound, load, refused, save


class Pair(torch.Tensor):
    """Codes and a scale, and any context beside them."""

    NAMES: ClassVar[Any] = ("codes", "scale")
    codes: torch.Tensor
    scale: torch.Tensor
    context: object

    @staticmethod
    def __new__(  # noqa: PYI034
        cls, codes: torch.Tensor, scale: torch.Tensor, context: object = None, *, requires_grad: bool = False
    ) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device, requires_grad=requires_grad
        )
        made.codes, made.scale, made.context = codes, scale, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        context = self.context(self) if callable(self.context) else self.context
        return list(self.NAMES), context

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Any], context: object, size: object, stride: object) -> Pair:
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            of = cast("Pair", args[0])
            return cls(of.codes, of.scale, of.context)
        raise NotImplementedError(func)


def pair(start: int, kind: type[Pair] = Pair, context: object = None) -> Pair:
    codes = torch.arange(16, dtype=torch.uint8).view(4, 4) + start
    return kind(codes, torch.full((4, 4), float(start)), context)


def content(*pairs: Pair) -> list[bytes]:
    return [bits(plane) for each in pairs for plane in (each.codes, each.scale)]


# --- a part of the planes --------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A checkpoint of two tensors with the same kinds of planes, and a plain one."""
    state: State = {"m": {"w": pair(1), "v": pair(2)}, "plain": torch.ones(2)}
    holdfast.save(tmp_path / "run", state, 0)
    return str(tmp_path / "run")


@pytest.mark.parametrize(
    "select", ["**codes", ["!**scale"], ["!m/w/%plane=scale"], "m/w/%plane=codes", ["m", "!m/*/*"]]
)
def test_a_selection_of_codes_without_their_scale_is_refused(run: str, select: Any) -> None:
    w, v = pair(11), pair(12)
    with pytest.raises(IncompatibleError, match=r"m/.*: select takes .*, but not its planes") as caught:
        holdfast.load(run, {"m": {"w": w, "v": v}, "plain": torch.zeros(2)}, select=select)
    assert caught.value.code == "incompatible.planes"
    assert content(w, v) == content(pair(11), pair(12))
    with pytest.raises(IncompatibleError, match=r"incompatible\.planes"):
        holdfast.plan_load(run, {"m": {"w": w, "v": v}, "plain": torch.zeros(2)}, select=select)


@pytest.mark.parametrize("select", ["m/w", "m/w/*", ["m", "!m/v"], "m/w**"])
def test_a_selection_of_a_tensor_takes_all_its_planes_and_no_others(run: str, select: Any) -> None:
    w, v = pair(11), pair(12)
    holdfast.load(run, {"m": {"w": w, "v": v}}, select=select)
    assert content(w, v) == content(pair(1), pair(12))


PLANES_APART: Mapping[str, list[Rule]] = {
    "dropped": [Drop("m/w/%plane=scale")],
    "renamed plane": [Rename("m/w/%plane=codes", "m/w/%plane=code")],
    "moved plane": [Rename("m/w/%plane=codes", "codes")],
    "planes without their tensor": [Rename("m/w/%plane={x}", "m/u/%plane={x}")],
    "exchanged codes": [
        Rename("m/w/%plane=codes", "x"),
        Rename("m/v/%plane=codes", "m/w/%plane=codes"),
        Rename("x", "m/v/%plane=codes"),
    ],
    "a plain tensor for a plane": [Drop("m/w/%plane=scale"), Rename("plain", "m/w/%plane=scale")],
    "turned": [Transpose("m/w")],
    "cut": [Crop("m/w/%plane=scale", size=2)],
}


@pytest.mark.parametrize("rules", PLANES_APART.values(), ids=PLANES_APART)
def test_rules_that_take_the_planes_of_a_tensor_apart_are_refused(run: str, tmp_path: Path, rules: list[Rule]) -> None:
    w, v = pair(11), pair(12)
    with pytest.raises(IncompatibleError, match=r"Tensor 'm/[wvu]' consists of planes that belong together") as caught:
        holdfast.load(run, {"m": {"w": w, "v": v}, "plain": torch.zeros(2)}, mapping=rules, strict=False)
    assert caught.value.code == "incompatible.planes"
    assert content(w, v) == content(pair(11), pair(12))
    with pytest.raises(IncompatibleError, match=r"incompatible\.planes"):
        holdfast.export(run, tmp_path / "folder", mapping=rules)


def test_a_rule_that_would_reshape_a_tensor_of_planes_says_so(run: str) -> None:
    rule = Split("m/w", ["m/a", "m/b"])
    with pytest.raises(IncompatibleError, match=r"'m/w' matches nothing.*: it is a tensor that consists of planes"):
        holdfast.load(run, {"m": {"w": pair(11), "v": pair(12)}}, mapping=[rule])


def test_rules_may_move_the_planes_of_a_tensor_together(run: str) -> None:
    exchange: list[Rule] = [Rename("m/w", "t"), Rename("m/v", "m/w"), Rename("t", "m/v")]
    one_by_one: list[Rule] = [Rename("m/v/%plane={x}", "m/u/%plane={x}"), Rename("m/v", "m/u")]
    w, v, u = pair(11), pair(12), pair(13)
    holdfast.load(run, {"m": {"w": w, "v": v}}, mapping=[Drop("plain"), *exchange])
    assert content(w, v) == content(pair(2), pair(1))
    holdfast.load(run, {"m": {"w": w, "u": u}}, mapping=[Drop("plain"), *one_by_one])
    assert content(w, u) == content(pair(1), pair(2))


def test_planes_that_two_tensors_share_may_be_renamed(tmp_path: Path) -> None:
    scale = torch.full((4, 4), 3.0)
    saved: State = {"w": Pair(pair(1).codes, scale), "v": Pair(pair(2).codes, scale)}
    holdfast.save(tmp_path / "run", saved, 0)
    w, u = pair(11), pair(12)
    holdfast.load(tmp_path / "run", {"w": w, "u": u}, mapping=[Rename("v", "u")])
    assert content(w, u) == content(cast("Pair", saved["w"]), cast("Pair", saved["v"]))


def test_an_export_does_not_write_a_part_of_the_planes(run: str, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"'m/v'.*the plane codes, but not the plane scale") as caught:
        holdfast.export(run, tmp_path / "part", select=["**codes", "plain"])
    assert caught.value.code == "incompatible.planes"
    assert not (tmp_path / "part").exists()
    apart = [Rename("m/{name}/%plane={plane}", "m/{name}.{plane}")]  # all of them, under other names
    assert holdfast.export(run, tmp_path / "all", select="m", mapping=apart).num_tensors == 4


def test_a_dry_run_does_not_predict_that_a_part_of_the_planes_loads() -> None:
    stored = save({"m": {"w": pair(1)}}).stored
    table = CheckpointTable(stored, {}, {}, {}, {})
    with pytest.raises(IncompatibleError, match=r"incompatible\.planes.*'m/w'"):
        dry_run.match(fsdp(2), table, select=Globs("**codes"), cast=False)


# --- what no load can make -------------------------------------------------------------------------------------------


class Paired(torch.optim.Optimizer):
    """An optimizer whose slots `make` returns."""

    def __init__(self, parameters: Any, make: Callable[[], object]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("slot", self.make())


class Holder:
    """An object with a state of its own."""

    def __init__(self, held: object) -> None:
        self.held = held

    def state_dict(self) -> dict[str, object]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.held = state["held"]


class Extra(nn.Module):
    """A module with a state beside its tensors."""

    def get_extra_state(self) -> object:
        return pair(1)

    def set_extra_state(self, state: object) -> None:
        raise AssertionError(state)


def stepped(make: Callable[[], object]) -> State:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = Paired(layer.parameters(), make)
    optimizer.step()
    return {"layer": layer, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (lambda: stepped(lambda: pair(1)), "optimizer/state/layer/weight/slot"),
        (lambda: stepped(lambda: [pair(1)]), "optimizer/state/layer/weight/slot/0"),
        (lambda: {"object": Holder(pair(1))}, "object/held"),
        (lambda: {"module": Extra()}, "module/_extra_state"),
    ],
    ids=["slot", "inside a slot", "object", "extra state"],
)
def test_a_tensor_that_saves_for_days_and_cannot_be_loaded_at_a_restart_is_refused_at_the_save(
    state: Callable[[], State], name: str
) -> None:
    with pytest.raises(StateError, match=rf"{name!r} is a tensor of type {__name__}\.Pair, which a load would have to"):
        save(state())


class Known(Pair):
    """A pair that is registered."""


def test_a_registered_type_loads_into_fresh_optimizers_and_objects() -> None:
    holdfast.register_tensor(
        Known,
        lambda tensor: {"codes": tensor.codes, "scale": tensor.scale},
        lambda made: Known(made["codes"], made["scale"]),
        name=f"{__name__}.Known",
    )
    saved: State = {**stepped(lambda: pair(1, Known)), "object": Holder(pair(2, Known))}
    layer, holder = nn.Linear(4, 4, bias=False), Holder(None)
    into: State = {"layer": layer, "optimizer": Paired(layer.parameters(), lambda: None), "object": holder}
    load(save(saved), into)
    slot = cast("Paired", into["optimizer"]).state[layer.weight]["slot"]
    assert content(slot, cast("Known", holder.held)) == content(pair(1), pair(2))


def test_slots_whose_library_is_not_imported_are_refused_with_a_way_to_load_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    know_blocks(monkeypatch)
    layer = nn.Linear(8, 8, bias=False)
    optimizer = Blockwise(layer.parameters())
    optimizer.step()
    stored = save({"layer": layer, "optimizer": optimizer})
    monkeypatch.setattr(planes, "_imported", lambda text: None)
    error = refused(stored, {"layer": layer, "optimizer": Blockwise(layer.parameters())})
    assert error.code == "incompatible.planed_slot"
    assert "no slot here" in str(error)
    assert "take one step of the optimizer first" in error.action
    load(stored, {"layer": layer, "optimizer": optimizer})


# --- types that cannot be read ---------------------------------------------------------------------------------------


class Raising(Pair):
    def __tensor_flatten__(self) -> tuple[list[str], object]:
        raise RuntimeError("not today")


class Nameless(Pair):
    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"]


class Numbered(Pair):
    NAMES = (1, 2)


class Unknown(Pair):
    NAMES = ("codes", "zero_point")


class Untensored(Pair):
    NAMES = ("codes", "context")


class Empty(Pair):
    NAMES = ()


class Endless(Pair):
    NAMES = ("codes", "itself")

    @property
    def itself(self) -> Endless:
        return self


ENDLESS_CONTEXT: dict[str, object] = {}
ENDLESS_CONTEXT["itself"] = ENDLESS_CONTEXT


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (pair(1, Raising), "reading them raised RuntimeError: not today"),
        (pair(1, Nameless), "its __tensor_flatten__ returned a list, not names and a context"),
        (pair(1, Numbered), "its __tensor_flatten__ returned a list that is no list of names"),
        (pair(1, Unknown), "raised AttributeError: 'Unknown' object has no attribute 'zero_point'"),
        (pair(1, Untensored), "names 'context', which is a NoneType and no tensor"),
        (pair(1, Empty), "its __tensor_flatten__ names no tensors"),
        (pair(1, Endless), "its planes contain themselves"),
        (pair(1, context=ENDLESS_CONTEXT), "its values contain themselves"),
        (pair(1, context={(1, 2): 3}), r"its values have the key \(1, 2\)"),
        (pair(1, context={"tensor": torch.ones(1)}), "it holds a Tensor beside its tensors"),
    ],
    ids=lambda item: item if isinstance(item, str) else type(item).__name__,
)
def test_a_type_whose_planes_cannot_be_read_is_refused_by_name(tensor: Pair, problem: str) -> None:
    for use in (lambda: flatten({"w": tensor}), lambda: bound(save({"w": pair(1)}), {"w": tensor})):
        with pytest.raises(
            StateError, match=rf"tensor 'w' of type .*{type(tensor).__name__} cannot be read.*{problem}"
        ) as caught:
            use()
        assert caught.value.code == "state.planes"
        assert "holdfast.register_tensor" in caught.value.action


def test_a_type_whose_planes_cannot_be_read_may_be_left_out(run: str) -> None:
    bad, v = pair(11, Raising), pair(12)
    holdfast.load(run, {"m": {"w": bad, "v": v}}, select="m/v")
    assert content(bad, v) == content(pair(11), pair(2))


class Unmakeable(Pair):
    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Any], context: object, size: object, stride: object) -> Pair:
        raise RuntimeError("not today")


def test_a_type_that_cannot_be_made_of_its_planes_is_refused_by_name(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": pair(1, Unmakeable)}, 0)
    meta = Unmakeable(torch.empty(4, 4, dtype=torch.uint8, device="meta"), torch.empty(4, 4, device="meta"))
    with pytest.raises(IncompatibleError, match=r"'w': .* makes Unmakeable of planes raised RuntimeError") as caught:
        holdfast.load(tmp_path / "run", {"w": meta})
    assert caught.value.code == "incompatible.object"


# --- values beside the planes ----------------------------------------------------------------------------------------


CPU = torch.device("cpu")


class Kind(enum.Enum):
    A = 1


@dataclass
class Options:
    size: int
    device: torch.device = CPU
    requires_grad: bool = False


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        ({1: "a", "1": "b"}, {1: "z", "1": "b"}),
        ({1: "a"}, {"1": "a"}),
        ({None: 1}, {"None": 1}),
        ({"": "a"}, "a"),
        (torch.float32, "torch.float32"),
        ({"d": torch.float32}, {"d": "torch.float32"}),
        (Kind.A, "Kind.A"),
        ([Options(1)], [{"Options": {"size": 1, "device": "cpu", "requires_grad": False}}]),
        (Options(1), Options(2)),
        (float("nan"), "nan"),
        (1, True),
        (1, 1.0),
        ({"requires_grad": True}, {"requires_grad": False}),
    ],
    ids=repr,
)
def test_other_values_beside_the_planes_are_told_apart(stored: object, live: object) -> None:
    assert refused(save({"w": pair(1, context=stored)}), {"w": pair(2, context=live)}).code == "incompatible.kind"
    into = pair(2, context=stored)
    load(save({"w": pair(1, context=stored)}), {"w": into})
    assert content(into) == content(pair(1))


def test_the_device_of_a_tensor_and_whether_it_requires_a_gradient_are_no_values_of_it() -> None:
    """As torchao's NF4Tensor has them in its context."""

    def context(tensor: torch.Tensor) -> object:
        return {"tensor": Options(3, torch.device("cpu", int(tensor.requires_grad)), tensor.requires_grad)}

    frozen = pair(1, context=context)
    trained = Pair(pair(2).codes.float(), pair(2).scale, context, requires_grad=True)
    codes = Pair(frozen.codes.float(), frozen.scale, context)
    load(save({"w": codes}), {"w": trained})
    assert content(trained) == content(codes)
