"""Folders of torch.distributed.checkpoint are read directly, on any layout, to the same bits as by stock `dcp.load`."""

from __future__ import annotations

import logging
import pickle
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from tests.interop.changed_bytes import SOUND, changed_bytes, outcome
from tests.support.bound import bits
from tests.support.ranks import run_ranks

# Stock DCP warns where there is one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

ROWS, COLUMNS = 37, 65_537


def some_state(seed: int = 0) -> dict[str, Any]:
    """Tensors of many dtypes, views, and values of many kinds, nested as a job nests them."""
    make = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "embed.weight": torch.randn(ROWS, 51, generator=make),
            "half": torch.randn(7, generator=make).bfloat16(),
            "eight": torch.randn(9, generator=make).to(torch.float8_e4m3fn),
            "odd": torch.arange(5, dtype=torch.int32).to(torch.uint16),
            "scale": torch.randn((), generator=make),
            "none": torch.zeros(0, 3),
            "view": torch.randn(8, 8, generator=make)[2:5],
            "flags": torch.tensor([True, False, True]),
            "wave": torch.randn(3, generator=make, dtype=torch.complex64),
        },
        "list": [torch.randn(2, generator=make), {"x": 1.5}],
        "groups": [
            {"lr": 1e-3, "betas": (0.9, 0.999), "names": ["a", "b"]},
            {"lr": 2e-3, "betas": (0.5, 0.9), "names": []},
        ],
        "values": {
            "none": None,
            "bytes": b"\0\xff",
            "big": 1 << 90,
            "complex": 1 + 2j,
            "text": "\u00e9\n",
            "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]),
            "device": torch.device("cpu"),
            "numpy": np.float32(0.1),
            "ordered": OrderedDict([("b", 1), ("a", 2)]),
            "tuple": (1, (2, [3])),
            "infinite": float("-inf"),
        },
    }


def write(folder: Path, state: dict[str, Any]) -> Path:
    """Save `state` by the stock library, in this process."""
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def metadata_of(folder: Path) -> Metadata:
    """The metadata of a folder that this test wrote itself."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def emptied(item: object) -> object:
    """A live state of the same form with other contents."""
    if isinstance(item, torch.Tensor):
        return torch.zeros_like(item)
    if isinstance(item, dict) and not isinstance(item, OrderedDict):
        return {key: emptied(part) for key, part in item.items()}
    if isinstance(item, list) and any(isinstance(part, dict | torch.Tensor) for part in item):
        return [emptied(part) for part in item]
    return [] if isinstance(item, list) else () if isinstance(item, tuple) else 0


def described(item: object) -> object:
    """`item` with tensors as their bits, to compare."""
    if isinstance(item, torch.Tensor):
        return str(item.dtype), tuple(item.shape), bits(item)
    if isinstance(item, dict):
        return type(item), [(key, described(part)) for key, part in item.items()]
    if isinstance(item, list | tuple):
        return type(item), [described(part) for part in item]
    return type(item), item


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "dcp", some_state())


def test_every_tensor_and_value_is_what_the_stock_library_saved(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = emptied(some_state())
    assert isinstance(live, dict)
    live["values"] |= {"ordered": OrderedDict(), "size": torch.Size([0])}
    with caplog.at_level(logging.INFO, "holdfast"):
        report = holdfast.load(folder, live)
    assert described(report.state) == described(some_state())
    assert (report.step, report.next_step, report.place, report.verified) == (-1, 0, "", False)
    assert "its bytes were not verified" in caplog.text


def test_a_view_has_the_names_of_the_nested_state_and_reads_slices(folder: Path) -> None:
    view, state = holdfast.open(folder), some_state()
    assert "a folder of torch.distributed.checkpoint" in repr(view)
    assert "model/embed.weight" in view.names()
    assert "list/0" in view.names()
    assert torch.equal(view["model/embed.weight"][3:30, 5], state["model"]["embed.weight"][3:30, 5])
    assert bits(view["model/eight"][...]) == bits(state["model"]["eight"])
    assert described(view.value("groups")) == described(state["groups"])
    assert described(view.value("values/size")) == described(torch.Size([2, 3]))
    assert described(view.tree("list")) == described(state["list"])
    again = pickle.loads(pickle.dumps(view))
    assert torch.equal(again["model/view"][...], state["model"]["view"])
    mapped = holdfast.open(folder, verify=False)
    assert bits(mapped["model/embed.weight"][...]) == bits(state["model"]["embed.weight"])
    pieces = {piece.name: piece.array for piece in mapped.in_file_order("model/*.weight")}
    assert np.array_equal(pieces["model/embed.weight"], state["model"]["embed.weight"].numpy())


class Net(nn.Module):
    """One parameter whose rows do not divide evenly, of more than a chunk of a read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS))


def save_rows(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    fully_shard(net, mesh=mesh)
    state = {"model": net.state_dict(), "extra": {"step": 7, "pad": "x" * dist.get_world_size()}}
    dcp.save(state, checkpoint_id=folder)


def load_elsewhere(folder: str) -> list[bytes]:
    """The bits of this rank's rows and columns, by holdfast and by stock DCP."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    fully_shard(net, mesh=mesh)
    assert isinstance(net.weight, DTensor)
    net.weight.to_local().detach().zero_()
    columns = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(1)])
    values = {"step": 0, "pad": ""}
    report = holdfast.load(folder, {"model": net, "extra": values}, timeout_s=40)
    assert report.resharded == ("model/weight",)
    assert values["step"] == 7
    holdfast.load(folder, {"model": {"weight": columns}}, select="model", timeout_s=40)
    stock = {"model": {"weight": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(1)])}}
    dcp.load(stock, checkpoint_id=folder)
    return [
        bits(part.detach()) for part in (net.weight.to_local(), columns.to_local(), stock["model"]["weight"].to_local())
    ]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_rows_of_fsdp_become_rows_and_columns_of_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    run_ranks(before, save_rows, str(tmp_path / "dcp"))
    full = Net().weight.detach()
    parts = run_ranks(after, load_elsewhere, str(tmp_path / "dcp"))
    rows, columns = full.chunk(after, 0), [part.contiguous() for part in full.chunk(after, 1)]
    assert parts == [[bits(rows[rank]), bits(columns[rank]), bits(columns[rank])] for rank in range(after)]


def test_a_part_of_a_tensor_is_read_without_the_rest(tmp_path: Path) -> None:
    write(tmp_path / "dcp", {"w": Net().weight.detach()})
    live = {"w": Net().weight.detach()[:2].clone()}
    cropped = [holdfast.mapping.Crop("w", axis=0, size=2)]
    report = holdfast.load(tmp_path / "dcp", live, mapping=cropped)
    assert torch.equal(live["w"], Net().weight.detach()[:2])
    assert report.read_nbytes <= report.needed_nbytes + 2 * 4096


class Custom:
    """A class of a user, whose objects are no values."""


def test_a_value_of_an_unknown_class_is_refused_by_name_and_can_be_left_out(tmp_path: Path) -> None:
    write(tmp_path / "dcp", {"w": torch.arange(3), "odd": Custom(), "inside": (torch.zeros(2), 1), "set": {1, 2}})
    live = {"w": torch.zeros(3, dtype=torch.int64)}
    holdfast.load(tmp_path / "dcp", live, select="w")
    assert live["w"].tolist() == [0, 1, 2]
    assert holdfast.save(tmp_path / "run", live, 0).place == "1.1"
    view = holdfast.open(tmp_path / "dcp")
    for name, said in (("odd", "test_dcp.Custom"), ("inside", "a tensor is inside a value"), ("set", "builtin")):
        with pytest.raises(holdfast.IncompatibleError, match=said) as caught:
            view.value(name)
        assert caught.value.code == "incompatible.foreign"


def test_a_transposed_tensor_names_itself_instead_of_giving_wrong_elements(tmp_path: Path) -> None:
    write(tmp_path / "dcp", {"w": torch.arange(6.0).reshape(2, 3).t()})
    said = r"(?s)holds w in a form that holdfast does not read: its elements are not in row-major.*contiguous\(\)"
    with pytest.raises(holdfast.IncompatibleError, match=said):
        holdfast.load(tmp_path / "dcp", {"w": torch.zeros(3, 2)})


def test_a_folder_without_its_metadata_was_not_finished(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(holdfast.CorruptError, match="its save did not finish"):
        holdfast.open(folder)
    (folder / "__0.metadata").write_bytes(b"x")
    with pytest.raises(holdfast.IncompatibleError, match="use_collectives=False"):
        holdfast.open(folder)


def test_a_missing_or_shortened_file_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    run_ranks(2, save_rows, str(tmp_path / "dcp"))
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "dcp", copy)
    file = copy / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    live = {"model": {"weight": torch.full((ROWS, COLUMNS), -1.0)}}
    with pytest.raises(holdfast.CorruptError, match=r"__1_0.distcp is cut off: it has \d+ bytes, and needs \d+"):
        holdfast.load(copy, live, select="model")
    file.unlink()
    with pytest.raises(
        holdfast.CorruptError, match=r"lacks 1 file of 2, with all or a part of \d of 3 entries"
    ) as caught:
        holdfast.load(copy, live, select="model")
    assert caught.value.details[0] == "__1_0.distcp is missing"
    assert "model.weight is not whole without it" in caught.value.details
    assert (live["model"]["weight"] == -1).all()


@pytest.mark.parametrize("change", ["hole", "twice", "outside"])
def test_parts_that_do_not_make_up_a_tensor_are_refused(folder: Path, change: str) -> None:
    metadata = metadata_of(folder)
    entry: Any = metadata.state_dict_metadata["model.embed.weight"]
    if change == "hole":
        entry.chunks.clear()
    elif change == "twice":
        entry.chunks *= 2
    else:
        entry.size = torch.Size([ROWS - 1, 51])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(holdfast.CorruptError, match=r"tensor model/embed.weight (is not whole|has a part outside)"):
        holdfast.open(folder)


def test_metadata_that_would_take_for_ever_to_check_is_refused_at_once(folder: Path) -> None:
    metadata = metadata_of(folder)
    entry: Any = metadata.state_dict_metadata["model.embed.weight"]
    index: Any = next(index for index in metadata.storage_data if index.fqn == "model.embed.weight")
    entry.size = torch.Size([2] * 40)
    ends = [(0,) * 40, (1,) * 40]
    entry.chunks[:] = [ChunkStorageMetadata(torch.Size(end), torch.Size([1] * 40)) for end in ends]
    for end in ends:
        metadata.storage_data[MetadataIndex(index.fqn, end)] = metadata.storage_data[index]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(holdfast.CorruptError, match="2 parts that form no grid: too many to check"):
        holdfast.open(folder)
    metadata = metadata_of(write(folder.parent / "other", some_state()))
    metadata.planner_data["model.half"] = ("a",) * 200
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(holdfast.CorruptError, match="is no path of a state dict"):
        holdfast.open(folder)


def test_parts_of_a_tensor_that_form_no_grid_are_read(folder: Path) -> None:
    """Three boxes side by side and above each other, as ragged shards have them."""
    table, parts = torch.arange(24.0).reshape(4, 6), [(0, 0, 2, 6), (2, 0, 2, 1), (2, 1, 2, 5)]
    pieces = {
        f"p{row}.{column}": table[row : row + height, column : column + width].clone()
        for row, column, height, width in parts
    }
    write(folder.parent / "ragged", pieces)
    metadata = metadata_of(folder.parent / "ragged")
    entry: Any = metadata.state_dict_metadata["p0.0"]
    entry.size, entry.chunks[:] = torch.Size([4, 6]), []
    storage: Any = {}
    for row, column, height, width in parts:
        entry.chunks.append(ChunkStorageMetadata(torch.Size([row, column]), torch.Size([height, width])))
        old: Any = next(index for index in metadata.storage_data if index.fqn == f"p{row}.{column}")
        storage[MetadataIndex("w", (row, column))] = metadata.storage_data[old]
    metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data = {"w": entry}, storage, None
    (folder.parent / "ragged" / ".metadata").write_bytes(pickle.dumps(metadata))
    view = holdfast.open(folder.parent / "ragged")
    assert torch.equal(view["w"][...], table)
    assert torch.equal(view["w"][1:4, ::2], table[1:4, ::2])


def test_metadata_of_older_torch_is_read(folder: Path) -> None:
    """Torch before 2.4 pickled the properties of tensors by a class of another module, and Python before 3.13 paths."""
    metadata = metadata_of(folder)
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.properties = OldProperties(dtype=entry.properties.dtype)  # type: ignore[assignment]
    for protocol in (2, 4, 5):
        (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        assert bits(holdfast.open(folder)["model/half"][...]) == bits(some_state()["model"]["half"])


def test_items_of_another_tensor_are_refused_by_their_shape_and_dtype(folder: Path) -> None:
    metadata = metadata_of(folder)
    storage: Any = metadata.storage_data
    by_name = {index.fqn: index for index in storage}
    storage[by_name["model.half"]] = storage[by_name["model.eight"]]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(holdfast.CorruptError, match=r"it holds float8_e4m3fn\[9\] instead of bfloat16\[7\]"):
        holdfast.open(folder)["model/half"][...]
    assert holdfast.open(folder)["model/eight"][...].shape == (9,)


def test_items_that_were_compressed_on_their_way_are_refused(folder: Path) -> None:
    metadata = metadata_of(folder)
    storage: Any = metadata.storage_data
    for info in storage.values():
        info.transform_descriptors = ["zstd"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(holdfast.IncompatibleError, match="written through zstd"):
        holdfast.open(folder)


def test_a_compressed_archive_is_refused(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    info: Any = next(info for index, info in metadata_of(folder).storage_data.items() if index.fqn == "model.half")
    data = bytearray(file.read_bytes())
    item = file.parent / "item.zip"
    with zipfile.ZipFile(item, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N." + bytes(500))
    inside = item.read_bytes()
    data[info.offset : info.offset + info.length] = bytes(info.length - len(inside)) + inside
    file.write_bytes(data)
    item.unlink()
    with pytest.raises(holdfast.CorruptError, match="is compressed or encrypted"):
        holdfast.open(folder)["model/half"][...]


def test_an_archive_whose_entries_begin_before_it_is_refused(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    info: Any = next(info for index, info in metadata_of(folder).storage_data.items() if index.fqn == "model.half")
    data = bytearray(file.read_bytes())
    field = data.index(b"PK\x06\x06", info.offset) + 48  # the archive says here where its directory begins
    data[field : field + 8] = (int.from_bytes(data[field : field + 8], "little") + 10_000).to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(holdfast.CorruptError, match=r"holds no model/half at byte \d+: its entry .* begins before it"):
        holdfast.open(folder)["model/half"][...]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_changed_bytes_are_refused_or_read_and_never_raise_another_error(folder: Path, data: st.DataObject) -> None:
    with changed_bytes(folder / data.draw(st.sampled_from([".metadata", "__0_0.distcp"])), data):
        assert outcome(folder) in SOUND
