"""Folders of torchsnapshot are read directly, on any layout, to the same bits as by its own `read_object`."""

from __future__ import annotations

import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.mapping import Rename
from tests.interop.changed_bytes import SOUND, changed_bytes, outcome
from tests.interop.test_dcp import described, emptied, some_state
from tests.interop.test_pickle_machine import ATTACKS
from tests.interop.torch_archives import rewrite
from tests.support.bound import bits
from tests.support.ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchsnapshot was written for an older torch
    from torchsnapshot import Snapshot, StateDict
    from torchsnapshot.knobs import override_is_batching_disabled, override_max_chunk_size_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

METADATA = ".snapshot_metadata"
ROWS, COLUMNS = 37, 65_537


def take(folder: Path, state: dict[str, Any]) -> Path:
    """Take a snapshot of `state` by the stock library, in this process."""
    Snapshot.take(str(folder), {key: StateDict(**part) for key, part in state.items()})
    return folder


def small_state(seed: int = 0) -> dict[str, Any]:
    """A state of dicts, as torchsnapshot takes them, with dtypes of both of its serializers."""
    state = some_state(seed)
    del state["model"]["odd"], state["model"]["eight"], state["model"]["none"], state["groups"], state["list"]
    del state["values"]["numpy"]
    state["model"]["long"] = torch.arange(3000)
    state["model"]["half"] = torch.arange(8).bfloat16()  # torchsnapshot cannot take an odd number of them
    state["values"] |= {"a/b": {1: 0.1, "1x": [1, {"deep": True}]}, "50%": -0.0, "nested": OrderedDict(z=1, a=2)}
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return take(tmp_path / "snapshot", small_state())


@pytest.mark.parametrize("form", ["one file", "a file for each tensor", "chunks"])
def test_every_tensor_and_value_is_what_the_stock_library_took(tmp_path: Path, form: str) -> None:
    state, path = small_state(), tmp_path / "snapshot"
    with (
        override_is_batching_disabled(form != "one file"),
        override_max_chunk_size_bytes(500 if form == "chunks" else 1 << 30),
    ):
        take(path, state)
    live = emptied(small_state(seed=1))
    assert isinstance(live, dict)
    live["values"] |= {"ordered": OrderedDict(), "nested": OrderedDict(), "size": torch.Size([0])}
    report = holdfast.load(path, live)
    assert described(live) == described(state)
    assert (report.step, report.next_step, report.place, report.verified) == (-1, 0, "", False)
    stock = Snapshot(str(path))
    for name, tensor in state["model"].items():
        assert bits(stock.read_object(f"0/model/{name}")) == bits(tensor)
    if form == "chunks":
        assert len(list(path.rglob("*long*"))) > 10


def test_a_view_names_reads_and_pickles_what_a_snapshot_holds(folder: Path) -> None:
    view, state = holdfast.open(folder), small_state()
    assert "a folder of torchsnapshot" in repr(view)
    assert torch.equal(view["model/embed.weight"][3:30, 5], state["model"]["embed.weight"][3:30, 5])
    assert described(view.value("values/a%2Fb")) == described(state["values"]["a/b"])
    again = pickle.loads(pickle.dumps(view))
    assert bits(again["model/wave"][...]) == bits(state["model"]["wave"])
    plan = holdfast.plan_load(folder, {"model": {"long": torch.zeros(3000, dtype=torch.int64)}}, select="model/long")
    (read,) = plan.read_nbytes.values()
    assert 24_000 <= read <= 24_000 + 2 * 4096


def test_files_of_one_name_in_two_folders_are_planned_apart(tmp_path: Path) -> None:
    state = {key: {"w": torch.zeros(64)} for key in ("a", "b")}
    with override_is_batching_disabled(True):  # it has no keyword
        take(tmp_path / "s", state)
    plan = holdfast.plan_load(tmp_path / "s", state)
    assert {key: nbytes >= 256 for key, nbytes in plan.read_nbytes.items()} == {"0/a/w": True, "0/b/w": True}


class Layer(nn.Module):
    """A module whose optimizer has state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)


def trained(layer: nn.Module, seed: int) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1 / (1 + seed))
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_a_module_and_its_optimizer_are_loaded_as_they_were_taken(tmp_path: Path) -> None:
    saved, live = Layer(), Layer()
    optimizer, other = trained(saved, 0), trained(live, 1)
    Snapshot.take(str(tmp_path / "s"), {"layer": saved, "optimizer": optimizer})
    holdfast.load(tmp_path / "s", {"layer": live, "optimizer": other})
    assert described(dict(live.state_dict())) == described(dict(saved.state_dict()))
    assert described(other.state_dict()) == described(optimizer.state_dict())


def whole() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def take_sharded(folder: str) -> None:
    """Rows of a large tensor, a module that all ranks have, and values of each rank alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(world_size)])
    rows = sharded_tensor.empty(spec, ROWS, COLUMNS)
    for shard in rows.local_shards():
        start = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(whole()[start : start + shard.metadata.shard_sizes[0]])
    torch.manual_seed(0)
    model = DistributedDataParallel(Layer())
    extra = StateDict(rows=rows, step=7, rank=rank, none=None, own=torch.full((3,), float(rank)))
    Snapshot.take(folder, {"model": model, "extra": extra})


def load_sharded(folder: str) -> list[bytes]:
    """The bits of this rank's rows and columns, and of the module."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, columns = (distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(axis)]) for axis in (0, 1))
    layer = Layer()
    live = {"model": layer, "extra": {"rows": rows, "step": 0, "none": 1}}
    rule = [Rename("model/module.{x:**}", "model/{x}")]
    chosen = ["model", "extra/rows", "extra/step", "extra/none"]
    holdfast.load(folder, live, mapping=rule, select=chosen, timeout_s=40)
    holdfast.load(folder, {"extra": {"rows": columns}}, select="extra/rows", timeout_s=40)
    assert live["extra"]["step"] == 7  # type: ignore[index]
    assert live["extra"]["none"] is None  # type: ignore[index]
    return [bits(part) for part in (rows.to_local(), columns.to_local(), layer.inner.weight)]


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_shards_of_ranks_become_rows_and_columns_of_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    folder = tmp_path / "snapshot"
    run_ranks(before, take_sharded, str(folder))
    parts = run_ranks(after, load_sharded, str(folder))
    rows, columns = whole().chunk(after, 0), [part.contiguous() for part in whole().chunk(after, 1)]
    weight = bits(Snapshot(str(folder)).read_object("0/model/module.inner.weight"))
    assert parts == [[bits(rows[rank]), bits(columns[rank]), weight] for rank in range(after)]
    view = holdfast.open(folder)
    assert view.value("extra/rank") == list(range(before))
    assert [view[f"extra/own/%rank={rank}"][0].item() for rank in range(before)] == list(range(before))


def load_own(folder: str) -> tuple[int, list[float]]:
    """Return the values that this rank had for itself."""
    live: dict[str, dict[str, Any]] = {"extra": {"rank": holdfast.PerRank(-1), "own": holdfast.PerRank(torch.zeros(3))}}
    holdfast.load(folder, live, select=["extra/rank", "extra/own"], timeout_s=40)
    return live["extra"]["rank"].value, live["extra"]["own"].value.tolist()


def test_each_rank_gets_back_what_it_had_for_itself(tmp_path: Path) -> None:
    run_ranks(2, take_sharded, str(tmp_path / "snapshot"))
    assert run_ranks(2, load_own, str(tmp_path / "snapshot")) == [(0, [0, 0, 0]), (1, [1, 1, 1])]


# --- what is refused ---


class Custom:
    """A class of a user, whose objects are no values."""


def test_objects_that_are_no_values_are_refused_one_by_one_and_can_be_left_out(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    path = take(tmp_path / "s", {"x": {"w": torch.ones(2), "odd": Custom(), "tuple": (torch.ones(1),), "q": quantised}})
    live = {"x": {"w": torch.zeros(2)}}
    holdfast.load(path, live, select="x/w")
    assert live["x"]["w"].tolist() == [1, 1]
    view = holdfast.open(path)
    for name, said in (("odd", "test_torchsnapshot.Custom"), ("q", "its dtype torch.qint8")):
        with pytest.raises(holdfast.IncompatibleError, match=said):
            view.value(f"x/{name}")


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_in_an_object_is_refused_with_what_it_names_and_does_nothing(tmp_path: Path, attack: str) -> None:
    hit = tmp_path / "hit"
    path = take(tmp_path / "s", {"x": {"w": torch.ones(2), "odd": (1, 2)}})
    data, said = ATTACKS[attack](str(hit))
    rewrite(path / "0" / "x" / "odd", {"data.pkl": data})
    with pytest.raises(holdfast.HoldfastError, match=said or None):
        holdfast.load(path, {"x": {"w": torch.zeros(2), "odd": ()}})
    assert not hit.exists()


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the metadata of a snapshot."""
    metadata = json.loads((folder / METADATA).read_text())
    edit(metadata["manifest"])
    (folder / METADATA).write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda m: m["0/model/long"].update(byte_range=[0, 1 << 40]), "has bytes 0 to .* of a file of"),
        (lambda m: m["0/model/long"].update(byte_range=[8, 0]), "has bytes 8 to 0"),
        (lambda m: m["0/model/long"].update(byte_range=[0, 8]), "bytes do not fit its shape"),
        (lambda m: m["0/model/long"].update(shape=[2999]), "bytes do not fit its shape"),
        (lambda m: m["0/model/long"].update(shape=[-3000]), "impossible shape"),
        (lambda m: m["0/model/long"].update(location="../../etc/passwd"), "is no file in the folder"),
        (lambda m: m["0/model/long"].update(location="/etc/passwd"), "is no file in the folder"),
        (lambda m: m["0/model/long"].update(location="0/elsewhere"), "lacks 1 file of"),
        (lambda m: m["0/model/long"].update(type="odd"), "unknown type 'odd'"),
        (lambda m: m.update({"7/model/long": m["0/model/long"]}), "no path of one of 1 ranks"),
        (lambda m: m.update({"0/stray/long": m["0/model/long"]}), "belong to no container"),
        (lambda m: m.pop("0/model"), "belong to no container"),
        (lambda m: m["0/values/nested/z"].update(serialized_value="x"), "value 'values/nested/z' is malformed"),
        (lambda m: m["0/values/a%2Fb/1"].update(serialized_value="AA=="), "is malformed"),
        (lambda m: m.pop("0/values/a%2Fb/1x/0"), "lacks entries"),
    ],
)
def test_metadata_that_contradicts_the_folder_is_refused(
    folder: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    change(folder, edit)
    with pytest.raises(holdfast.CorruptError, match=said) as caught:
        holdfast.load(folder, {"model": {"long": torch.zeros(3000, dtype=torch.int64)}}, select="model/long")
    assert caught.value.code == "corrupt.foreign"


def test_metadata_in_yaml_of_older_versions_says_what_to_do(folder: Path) -> None:
    (folder / METADATA).write_text("version: 0.0.3\nworld_size: 1\nmanifest: {}\n")
    with pytest.raises(holdfast.IncompatibleError, match=r"before 0.1 wrote it. Restore it with torchsnapshot"):
        holdfast.open(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_changed_bytes_are_refused_or_read_and_never_raise_another_error(folder: Path, data: st.DataObject) -> None:
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with changed_bytes(folder / data.draw(st.just(METADATA) | st.sampled_from(files)), data):
        assert outcome(folder) in SOUND
