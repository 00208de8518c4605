"""Tensors that consist of planes, without a registration. `tests/frameworks/test_quantised.py` has real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.errors import IncompatibleError, StateError
from holdfast.format.values import PlanesNode
from holdfast.frameworks import planes
from holdfast.snapshot.capture import Snapshot
from holdfast.state.flatten import flatten
from tests.state.blocks_of_tests import Blocks, Blockwise, Rows, Scales
from tests.support.bound import State, assert_same, bits, bound, load, refused, save
from tests.support.models import start_new_job
from tests.support.ranks import RanksFailedError, run_ranks

KIND = "tests.state.blocks_of_tests"


@pytest.fixture(autouse=True)
def _blocks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    know_blocks(monkeypatch)


def know_blocks(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Give the type of these tests the rules that the table has for torchao's."""
    known = {**planes._KNOWN, (KIND, "Blocks"): planes._QuantisedSlot(1, is_signed_or_not=True, min_numel=32)}
    if monkeypatch is None:
        planes._KNOWN = known  # type: ignore[misc]
    else:
        monkeypatch.setattr(planes, "_KNOWN", known)
    planes.planed_type.cache_clear()


def blocks(seed: int, shape: tuple[int, ...] = (4, 8), block: int = 8) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    made = Blocks.zeros(shape, signed=True, block_size=block, device=torch.device("cpu"), dtype=torch.float32)
    fill(made, generator)
    return made


def fill(made: Blocks, generator: torch.Generator) -> None:
    made.codes.random_(0, 256, generator=generator)
    made.scale.uniform_(generator=generator)
    made.qmap.copy_(torch.arange(4.0))


def rows(seed: int, bits_of: int = 8) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (3, 5), dtype=torch.uint8, generator=generator)
    return Rows(codes, Scales(torch.rand(3, 1, generator=generator)), bits_of)


def test_a_tensor_of_planes_is_stored_under_its_name_and_the_planes_and_filled_in_place() -> None:
    tensor, into = blocks(0), blocks(1)
    flat = flatten({"b": tensor})
    values = '"block_size":8,"signed":true,"outer":{"dtype":"torch.float32","shape":[4,8]}'
    assert flat.nodes["b"] == PlanesNode(f"{KIND}.Blocks{{{values}}}", ("codes", "scale", "qmap"))
    shapes = {name: local.layout.shape for name, local in flat.tensors.items()}
    assert shapes == {"b/%plane=codes": (4, 8), "b/%plane=qmap": (4,), "b/%plane=scale": (4, 1)}
    held = (into, into.codes, into.scale)
    state: State = {"b": into}
    load(save({"b": tensor}), state)
    assert all(a is b for a, b in zip((state["b"], into.codes, into.scale), held, strict=True))
    assert bits(into.codes) == bits(tensor.codes)
    assert bits(into.scale) == bits(tensor.scale)
    assert bits(into.qmap) == bits(tensor.qmap)


def test_planes_of_inner_tensors_have_names_of_their_own() -> None:
    flat = flatten({"r": rows(0)})
    assert list(flat.tensors) == ["r/%plane=codes", "r/%plane=scales.codes"]
    saved, into = {"r": rows(0), "p": nn.Parameter(rows(1), requires_grad=False)}, {"r": rows(2), "p": rows(3)}
    load(save(dict(saved)), dict(into))
    assert_same(dict(saved), dict(into))


@pytest.mark.parametrize(
    ("stored", "live", "code"),
    [
        (blocks(0), torch.zeros(4, 8), "incompatible.kind"),
        (torch.zeros(4, 8), blocks(0), "incompatible.blocks"),
        (blocks(0), blocks(0, block=4), "incompatible.kind"),
        (rows(0), rows(0, 4), "incompatible.kind"),
    ],
    ids=["planes for plain", "plain for planes", "another block", "another value"],
)
def test_planes_fill_only_tensors_of_the_same_kind_and_values(stored: object, live: object, code: str) -> None:
    assert refused(save({"x": stored}), {"x": live}).code == code


def test_an_object_beside_the_planes_that_no_name_can_tell_is_refused() -> None:
    with pytest.raises(StateError, match=r"state\.planes.*'r' of type .*Rows.*holds an object"):
        save({"r": rows(0, cast("Any", object()))})


def test_a_tensor_of_planes_on_the_meta_device_is_made_from_them() -> None:
    meta = Rows(torch.empty(3, 5, dtype=torch.uint8, device="meta"), Scales(torch.empty(3, 1, device="meta")), 8)
    layer = nn.Module()
    layer.weight = nn.Parameter(meta, requires_grad=False)
    held = layer.weight
    assert held.is_meta
    saved: State = {"m": nn.Module()}
    cast("nn.Module", saved["m"]).weight = nn.Parameter(rows(5), requires_grad=False)
    binding = load_meta(saved, {"m": layer})
    assert binding is held
    assert bits(cast("Rows", held).codes) == bits(rows(5).codes)


def load_meta(saved: State, into: State) -> torch.Tensor:
    stored = save(saved)
    binding = bound(stored, into)
    binding.allocate()
    for target in binding.targets:
        target.local.memory[0].copy_(stored.tensors[target.source])
    binding.finish()
    return cast("torch.Tensor", cast("nn.Module", into["m"]).weight)


def test_slots_of_planes_come_back_in_a_fresh_optimizer_and_keep_their_identity_in_another() -> None:
    saved = trained(0, steps=2)
    fresh, other = trained(1, steps=0), trained(2, steps=1)
    slots = [kept["slot"] for kept in cast("Blockwise", other["opt"]).state.values()]
    for into in (fresh, other):
        load(save(saved), into)
        assert_same(saved, into)
    after = [kept["slot"] for kept in cast("Blockwise", other["opt"]).state.values()]
    assert all(a is b for a, b in zip(slots, after, strict=True))


def trained(seed: int, *, steps: int, mesh: Any = None, size: tuple[int, int] = (8, 16), tp: bool = False) -> State:
    """A model whose optimizer has slots of planes; FSDP2 divides it over `mesh`, or its weights by columns."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*size, bias=False), nn.Linear(size[1], size[0], bias=False))
    if mesh is not None and not tp:
        fully_shard(model, mesh=mesh)
    elif tp:
        for layer in cast("Any", model):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    optimizer = Blockwise(model.parameters())
    for _ in range(steps):
        optimizer.step()
    for number, kept in enumerate(optimizer.state.values()):
        slot: Any = kept["slot"]
        slot = slot._local_tensor if isinstance(slot, DTensor) else slot
        if isinstance(slot, Blocks):
            rank = 0 if mesh is None else mesh.get_rank()
            fill(slot, torch.Generator().manual_seed(1000 * seed + 100 * rank + number))
    return {"model": model, "opt": optimizer}


def save_divided(run: str, size: tuple[int, int], tp: bool) -> None:
    know_blocks()
    world = torch.distributed.get_world_size()
    holdfast.save(run, trained(0, steps=1, mesh=init_device_mesh("cpu", (world,)), size=size, tp=tp), 0)


def go_on(run: str, again: str, size: tuple[int, int], tp: bool, steps: int) -> int:
    """Load a checkpoint in another layout, into slots or none, and save it again; returns the number of new objects."""
    know_blocks()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    into = trained(7, steps=steps, mesh=mesh, size=size, tp=tp)
    optimizer = cast("Blockwise", into["opt"])
    before = {id(kept["slot"]) for kept in optimizer.state.values()}
    holdfast.load(run, into=into)
    after = {id(kept["slot"]) for kept in optimizer.state.values()}
    holdfast.save(again, into, 1)
    return len(after - before)


def stored(run: str) -> dict[str, bytes]:
    view = holdfast.open(run)
    return {name: bits(view[name][...]) for name in view.names()}


@pytest.mark.parametrize(
    ("size", "tp_first", "tp_then"),
    [((8, 16), False, False), ((12, 16), False, False), ((16, 32), False, True)],
    ids=["rows of blocks", "blocks over rows", "columns"],
)
def test_planes_in_dtensors_load_on_another_number_of_ranks(
    tmp_path: Path, size: tuple[int, int], tp_first: bool, tp_then: bool
) -> None:
    run, again, fresh = (str(tmp_path / name) for name in ("run", "again", "fresh"))
    run_ranks(2, save_divided, run, size, tp_first)
    assert run_ranks(1, go_on, run, again, size, False, 1) == [0]
    for steps, other in ((1, fresh), (0, again + "-fresh")):
        new = run_ranks(2, go_on, again, other, size, tp_then, steps)
        assert all(number == (0 if steps else 2) for number in new)
    whole = stored(run)
    assert sum(name.endswith("%plane=scale") for name in whole) == 2
    for other in (again, fresh, again + "-fresh"):
        assert stored(other) == whole


def save_on_two_axes(run: str, again: str, size: tuple[int, int], way: str) -> int:
    """Save a model that HSDP or FSDP2 over tensor parallelism divides on four ranks, and load it into another."""
    know_blocks()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def make(seed: int, steps: int) -> State:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(*size, bias=False))
        if way == "HSDP":
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh["inner"], {"0": ColwiseParallel() if way == "rows" else RowwiseParallel()})
            fully_shard(model, mesh=mesh["outer"])
        optimizer = Blockwise(model.parameters())
        for _ in range(steps):
            optimizer.step()
        for kept in optimizer.state.values():
            copies = mesh["inner"].get_local_rank() if way == "HSDP" else mesh.get_rank()
            fill(cast("Any", kept["slot"])._local_tensor, torch.Generator().manual_seed(100 * seed + copies))
        return {"model": model, "opt": optimizer}

    holdfast.save(run, make(0, 1), 0)
    into = make(1, 0)
    holdfast.load(run, into=into)
    start_new_job()
    holdfast.save(again, into, 0)
    return sum(not placement.is_replicate() for placement in cast("Any", into["model"])[0].weight.placements)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "size"), [("HSDP", (8, 16)), ("HSDP", (12, 16)), ("rows", (8, 32)), ("columns", (32, 16))]
)
def test_planes_in_dtensors_over_two_mesh_axes_load_on_one_rank(
    tmp_path: Path, way: str, size: tuple[int, int]
) -> None:
    run, again = str(tmp_path / "run"), str(tmp_path / "again")
    assert set(run_ranks(4, save_on_two_axes, run, again, size, way)) == {1 if way == "HSDP" else 2}
    assert stored(again) == stored(run)
    whole: State = {"model": nn.Sequential(nn.Linear(*size, bias=False))}
    optimizer = whole["opt"] = Blockwise(cast("nn.Module", whole["model"]).parameters())
    holdfast.load(run, into=whole)
    (slot,) = (kept["slot"] for kept in optimizer.state.values())
    assert bits(slot.codes) == stored(run)["opt/state/model/0.weight/slot/%plane=codes"]
    assert bits(slot.scale) == stored(run)["opt/state/model/0.weight/slot/%plane=scale"]


def codes_under_fsdp1(run: str, original: bool) -> list[str]:
    know_blocks()
    warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    model = FullyShardedDataParallel(layer, use_orig_params=original, device_id=torch.device("cpu"))
    state: State = {"model": model, "opt": Blockwise(model.parameters())}
    with pytest.raises(IncompatibleError) as unloaded:
        holdfast.load(run, into=state)
    cast("Blockwise", state["opt"]).step()
    with pytest.raises(StateError) as unsaved:
        holdfast.save(run + "-other", state, 0)
    return [unloaded.value.code, unsaved.value.code]


@pytest.mark.parametrize("original", [True, False])
def test_planes_under_fsdp1_are_refused_in_saves_and_loads(tmp_path: Path, original: bool) -> None:
    run = str(tmp_path / "run")
    holdfast.save(run, trained(0, steps=1), 0)
    assert run_ranks(2, codes_under_fsdp1, run, original) == [["incompatible.blocks", "state.optimizer"]] * 2


@pytest.mark.parametrize(("size", "tp"), [((8, 7), False), ((8, 16), True)], ids=["uneven rows", "columns"])
def test_parts_that_do_not_consist_of_whole_blocks_are_refused(tmp_path: Path, size: tuple[int, int], tp: bool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, save_divided, str(tmp_path / "run"), size, tp)
    (error, *_) = caught.value.by_rank.values()
    assert isinstance(error, StateError)
    assert error.code == "state.blocks"


def test_plain_slots_of_small_parts_do_not_fill_slots_of_planes(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_ranks(2, save_divided, run, (6, 8), False)
    assert not any("%plane" in name for name in stored(run))
    with pytest.raises(IncompatibleError, match=r"(?s)incompatible\.blocks.*weight/slot.*a tensor in the checkpoint"):
        holdfast.load(run, into=trained(1, steps=1, size=(6, 8)))


class Outer(torch.Tensor):
    """A tensor of one plane that does not tell its shape, its dtype or the order of its axes."""

    codes: torch.Tensor

    @staticmethod
    def __new__(  # noqa: PYI034
        cls, codes: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Outer:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(size), tuple(stride), dtype=dtype)
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(
        cls, planes: Mapping[str, torch.Tensor], context: object, size: Sequence[int], stride: Sequence[int]
    ) -> Outer:
        return cls(planes["codes"], size, stride)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        raise NotImplementedError(func)


class Copied(Rows):
    """A tensor whose plane is a copy of what it holds."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found.clone() if name == "codes" else found


@pytest.mark.parametrize(
    "into",
    [
        pytest.param(lambda codes: Outer(codes, (3, 4), (4, 1)), id="another shape"),
        pytest.param(lambda codes: Outer(codes, (2, 6), (1, 2)), id="another order of axes"),
        pytest.param(lambda codes: Outer(codes, (2, 6), (6, 1), torch.bfloat16), id="another dtype"),
    ],
)
def test_planes_of_a_tensor_of_another_form_are_refused(
    tmp_path: Path, into: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The planes alone would fit: a transposed tensor has the same ones."""
    holdfast.save(tmp_path / "run", {"w": Outer(torch.arange(12), (2, 6), (6, 1))}, 0)
    codes = torch.zeros(12, dtype=torch.int64)
    with pytest.raises(IncompatibleError, match=r"incompatible\.kind"):
        holdfast.load(tmp_path / "run", into={"w": into(codes)})
    assert not codes.any()
    holdfast.load(tmp_path / "run", into={"w": Outer(codes, (2, 6), (6, 1))})
    assert codes.tolist() == list(range(12))


def test_a_plane_that_is_a_copy_is_refused_because_a_load_would_not_reach_the_tensor(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": rows(0)}, 0)
    copied = Copied(torch.zeros(3, 5, dtype=torch.uint8), Scales(torch.zeros(3, 1)), 8)
    with pytest.raises(StateError, match=r"returned copies") as caught:
        holdfast.save(tmp_path / "other", {"w": copied}, 0)
    assert caught.value.code == "state.planes"


def test_planes_do_not_fill_parts_that_are_too_small_for_blocks(tmp_path: Path) -> None:
    holdfast.save(str(tmp_path / "run"), trained(0, steps=1, size=(6, 8)), 0)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, go_on, str(tmp_path / "run"), str(tmp_path / "again"), (6, 8), False, 0)
    (error, *_) = caught.value.by_rank.values()
    assert isinstance(error, IncompatibleError)
    assert error.code == "incompatible.blocks"
    assert "24 elements here, which hold no such blocks" in str(error)


@pytest.mark.parametrize("values", ['"block_size":0', '"block_size":8,"signed":1', '"block_size":[8]', "not JSON"])
def test_a_name_of_a_type_that_no_version_gives_makes_no_tensor(values: str) -> None:
    assert planes.blank(f"{KIND}.Blocks{{{values}}}", torch.zeros(8, 8)) is None


def test_a_transfer_and_a_selection_take_planes(tmp_path: Path) -> None:
    source, into = {"r": rows(0), "b": blocks(0)}, {"r": rows(1), "b": blocks(1)}
    holdfast.transfer(dict(source), dict(into))
    assert_same(dict(source), dict(into))
    holdfast.save(str(tmp_path / "run"), dict(source), 0)
    other = {"r": rows(2), "b": blocks(2)}
    holdfast.load(str(tmp_path / "run"), into=dict(other), select="b**")
    assert bits(cast("Blocks", other["b"]).scale) == bits(cast("Blocks", source["b"]).scale)
    assert bits(cast("Rows", other["r"]).codes) == bits(rows(2).codes)


def walks_alike() -> bool:
    know_blocks()
    state = trained(0, steps=1, mesh=init_device_mesh("cpu", (2,)), size=(12, 16))
    last = Snapshot(state, rank=0, world_size=2).flat().remembered
    return Snapshot(state, rank=0, world_size=2, last=last).is_as_before


def test_the_next_background_save_does_not_wait_for_a_new_plan() -> None:
    assert run_ranks(2, walks_alike) == [True, True]


def test_a_background_save_takes_planes_as_they_were(tmp_path: Path, node_dir: Path) -> None:
    saved = trained(0, steps=1)
    (slot, *_) = (kept["slot"] for kept in cast("Blockwise", saved["opt"]).state.values())
    then = bits(slot.codes)
    with holdfast.Checkpointer(str(tmp_path / "run"), saved, memory=holdfast.Memory(node_dir=node_dir)) as checkpointer:
        handle = checkpointer.save(0)
        with checkpointer.guard():
            slot.codes.zero_()
        handle.durable.wait(40)
    assert stored(str(tmp_path / "run"))["opt/state/model/0.weight/slot/%plane=codes"] == then
