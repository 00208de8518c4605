"""Folders of Hugging Face are read directly: whole and sharded, on any layout, by `load`, `plan_load` and `open`."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.mapping import Rename
from tests.interop.hf_folders import INDEX, shard_name, some_tensors, write_index, write_sharded
from tests.support.bound import bits
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

IN_NET = [Rename("{x:**}", "net/{x}")]


class Net(nn.Module):
    """A module with some of the tensors of `some_tensors`, under the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(700, 512)})


def key(name: str) -> str:
    """The name that holdfast gives to a key of a dict."""
    return name.replace("/", "%2F")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_sharded(tmp_path / "hf", some_tensors(), 3)
    return tmp_path / "hf"


@pytest.mark.parametrize("form", ["one file", "three files", "the file itself", "shards without an index"])
def test_a_folder_fills_a_dict_of_tensors_bit_for_bit(tmp_path: Path, form: str) -> None:
    tensors, path = some_tensors(), tmp_path
    if form in ("three files", "shards without an index"):
        write_sharded(tmp_path, tensors, 3)
        if form == "shards without an index":
            (tmp_path / INDEX).unlink()
    else:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        path = tmp_path / "model.safetensors" if form == "the file itself" else tmp_path
    live = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
    report = holdfast.load(path, live)
    assert {name: bits(tensor) for name, tensor in live.items()} == {n: bits(t) for n, t in tensors.items()}
    assert (report.missing, report.unexpected, report.cast) == ((), (), ())
    assert (report.step, report.next_step, report.place, report.verified) == (-1, 0, "", False)
    assert "not verified" in repr(report)


def test_a_view_reads_any_slice_and_names_the_stock_reader_agrees(sharded: Path) -> None:
    tensors = some_tensors()
    view = holdfast.open(sharded)
    assert view.names() == sorted(map(key, tensors))
    assert (view.step, view.place, view.in_history, view.value_names()) == (-1, "", False, [])
    assert "a Hugging Face folder: 8 tensors" in repr(view)
    name = "model.embed.weight"
    with safe_open(sharded / shard_name(0, 3), "pt") as stock:
        wanted = stock.get_slice(name)[5:690:1, 3:77]
    assert torch.equal(view[name][5:690, 3:77], wanted)
    assert np.array_equal(view.numpy(name)[name], tensors[name].numpy())
    assert bits(view["model.eight"][...]) == bits(tensors["model.eight"])
    again = pickle.loads(pickle.dumps(view))
    assert torch.equal(again[name][0], tensors[name][0])
    pieces = {piece.name: piece.array for piece in view.in_file_order()}
    assert pieces.keys() == set(map(key, tensors)) - {"model.none"}
    assert np.array_equal(pieces["a%2Fb"], tensors["a/b"].numpy())


def test_a_mapped_view_reads_what_a_view_reads(sharded: Path) -> None:
    mapped, read = holdfast.open(sharded, verify=False).torch(), holdfast.open(sharded).torch()
    assert {name: bits(tensor) for name, tensor in mapped.items()} == {n: bits(t) for n, t in read.items()}


def test_a_folder_that_changed_is_not_opened_again_by_a_worker(sharded: Path) -> None:
    pickled = pickle.dumps(holdfast.open(sharded))
    write_sharded(sharded, {**some_tensors(), "new": torch.zeros(3)}, 3)
    with pytest.raises(holdfast.NotFoundError, match="no longer the checkpoint that was opened"):
        pickle.loads(pickled)


def test_a_plan_says_which_bytes_of_which_file_a_load_reads(sharded: Path) -> None:
    plan = holdfast.plan_load(sharded, {"net": Net()}, mapping=IN_NET)
    assert (plan.loaded, plan.step, plan.place) == (("net/model.embed.weight",), -1, "")
    assert plan.needed_nbytes == 700 * 512 * 4
    (read,) = plan.read_nbytes.items()
    assert read[0] == shard_name(0, 3)
    assert plan.needed_nbytes <= read[1] <= plan.needed_nbytes + 2 * 4096


def test_casts_selection_and_strictness_are_those_of_any_load(sharded: Path) -> None:
    live = {"model.embed.weight": torch.zeros(700, 512, dtype=torch.float64), "other": torch.ones(3)}
    with pytest.raises(holdfast.IncompatibleError) as caught:
        holdfast.load(sharded, live, cast=True)
    assert caught.value.code == "incompatible.names"
    report = holdfast.load(sharded, live, select="model.embed.weight", cast=True)
    assert report.cast == ("model.embed.weight",)
    assert torch.equal(live["model.embed.weight"], some_tensors()["model.embed.weight"].double())
    assert torch.equal(live["other"], torch.ones(3))


def rows_and_columns(path: str) -> list[bytes]:
    """The bits of this rank's parts: of an FSDP2 module, and of a table that is divided by columns."""
    world_size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    net = Net()
    fully_shard(net, mesh=mesh)
    table = distribute_tensor(torch.zeros(700, 512), mesh, [Shard(1)])
    holdfast.load(path, {"net": net}, mapping=IN_NET, strict=False, timeout_s=40)
    report = holdfast.load(path, {"model.embed.weight": table}, strict=False, timeout_s=40)
    weight = net.model["embed"].weight
    assert isinstance(weight, DTensor)
    assert isinstance(table, DTensor)
    assert report.resharded == (("model.embed.weight",) if world_size > 1 else ())
    return [bits(weight.to_local()), bits(table.to_local())]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_rows_and_columns_of_tensors_that_nobody_divided(sharded: Path, world_size: int) -> None:
    full = some_tensors()["model.embed.weight"]
    wanted = zip(full.chunk(world_size, 0), full.chunk(world_size, 1), strict=True)
    parts = run_ranks(world_size, rows_and_columns, str(sharded))
    assert parts == [[bits(rows), bits(columns.contiguous())] for rows, columns in wanted]


def load_own(*paths: str) -> tuple[str, bool]:
    """Each rank loads the path with its number; returns the error's code, and whether its tensor kept its elements."""
    live = {"w": torch.full((3,), -1.0)}
    try:
        holdfast.load(paths[torch.distributed.get_rank()], live, timeout_s=40)
    except holdfast.HoldfastError as error:
        return error.code, bool((live["w"] == -1).all())
    return "", False


def test_ranks_that_see_different_folders_load_nothing(tmp_path: Path) -> None:
    for number, tensor in enumerate((torch.zeros(3), torch.zeros(3), torch.zeros(4))):
        (tmp_path / str(number)).mkdir()
        save_file({"w": tensor}, tmp_path / str(number) / "model.safetensors")
    one, twin, other = (str(tmp_path / str(number)) for number in range(3))
    assert run_ranks(2, load_own, one, twin) == [("", False)] * 2  # one folder at two mount points
    assert run_ranks(2, load_own, one, other) == [("storage.not_shared", True)] * 2
    assert run_ranks(2, load_own, one, str(tmp_path / "gone")) == [("not_found.run", True)] * 2
    (tmp_path / "0" / "model.safetensors").write_bytes(b"x")
    assert run_ranks(2, load_own, one, one) == [("corrupt.foreign", True)] * 2


def test_a_node_with_the_folder_of_an_older_step_gave_its_ranks_other_weights(tmp_path: Path) -> None:
    paths = [str(tmp_path / str(number)) for number in range(2)]
    for number, path in enumerate(paths):
        Path(path).mkdir()
        save_file({"w": torch.full((3,), float(number))}, f"{path}/model.safetensors")
    assert run_ranks(2, load_own, *paths) == [("storage.not_shared", True)] * 2


def test_tied_weights_that_are_stored_once_fill_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    weight = torch.randn(6, 4)
    for name in ("embed.weight", "head.weight"):
        save_file({name: weight}, tmp_path / "model.safetensors")
        model = Tied()
        holdfast.load(tmp_path, {"net": model}, mapping=IN_NET)
        assert torch.equal(model.head.weight, weight)
        assert model.head.weight is model.embed.weight


def test_no_run_continues_from_a_foreign_folder_and_the_log_says_that_nothing_was_verified(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
    with pytest.raises(holdfast.ConfigurationError) as caught:
        holdfast.load(sharded, live, continues=True)
    assert caught.value.code == "config.continues"
    assert "a Hugging Face folder" in str(caught.value)
    with caplog.at_level(logging.INFO, "holdfast"):
        holdfast.load(sharded, live)
    assert "its bytes were not verified" in caplog.text
    run = sharded.parent / "run"
    holdfast.save(run, live, 0)
    start_new_job()
    holdfast.load(sharded, live)
    with pytest.raises(holdfast.HoldfastError) as refused:
        holdfast.save(run, live, 1)
    assert refused.value.code == "config.unloaded_history"
    assert holdfast.save(sharded.parent / "new", live, 0).place == "1.1"


def test_a_new_run_begins_with_a_foreign_folder_and_forks_none(sharded: Path) -> None:
    live = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
    run = sharded.parent / "run"
    with holdfast.Checkpointer(run, live, initial=sharded, memory=None) as checkpointer:
        report = checkpointer.restore()
        assert (report.step, report.next_step) == (None, 0)
        assert bits(live["model.embed.weight"]) == bits(some_tensors()["model.embed.weight"])
        checkpointer.save(0)
        checkpointer.wait()
    assert holdfast.open(run).step == 0
    forking = holdfast.Checkpointer(sharded.parent / "fork", live, initial=sharded, memory=None, fork=True)
    with forking, pytest.raises(holdfast.ConfigurationError) as caught:
        forking.restore()
    assert caught.value.code == "config.fork"


def test_a_lone_file_is_found_by_its_path_and_a_text_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(tmp_path / "notes.txt")
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(tmp_path / "missing.safetensors")


def test_a_missing_file_is_named_with_its_tensors_and_what_could_still_be_loaded(sharded: Path) -> None:
    (sharded / shard_name(1, 3)).unlink()
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.open(sharded)
    text = str(caught.value)
    assert caught.value.code == "corrupt.foreign"
    assert "lacks 1 file of 3, with 3 tensors of 8" in text
    assert f"{shard_name(1, 3)}: a/b, model.layers.0.up.weight, model.none" in text
    assert str(sharded / shard_name(0, 3)) in caught.value.action
    assert holdfast.open(sharded / shard_name(0, 3)).names() == ["model.eight", "model.embed.weight", "model.scale"]
    (sharded / INDEX).unlink()
    with pytest.raises(holdfast.CorruptError, match="lacks 1 file of 3"):
        holdfast.open(sharded)


@pytest.mark.parametrize("change", ["lists one more", "lists one less", "swaps files"])
def test_an_index_that_disagrees_with_the_files_is_refused(sharded: Path, change: str) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    if change == "lists one more":
        weight_map["ghost"] = shard_name(0, 3)
    elif change == "lists one less":
        del weight_map["model.scale"]
    else:
        weight_map["model.scale"] = shard_name(1, 3)
    write_index(sharded, weight_map)
    with pytest.raises(holdfast.CorruptError, match="index that disagrees with its files about 1 tensor") as caught:
        holdfast.open(sharded)
    assert any("against the index" in detail for detail in caught.value.details)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "x.bin"}}',
    ],
)
def test_a_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(holdfast.CorruptError, match="is a malformed index"):
        holdfast.open(tmp_path)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        save_file({"w": torch.zeros(2)}, tmp_path / shard_name(number, 2))
    with pytest.raises(holdfast.CorruptError, match="holds tensor w a second time"):
        holdfast.open(tmp_path)


def test_files_that_are_no_shards_of_one_model_are_not_mixed(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        save_file({name: torch.zeros(2)}, tmp_path / name)
    with pytest.raises(holdfast.CorruptError, match="several sets of tensors"):
        holdfast.open(tmp_path)
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert holdfast.open(tmp_path).names() == ["w"]


def test_a_file_that_is_cut_off_after_it_was_opened_ends_the_read(sharded: Path) -> None:
    view = holdfast.open(sharded)
    file = sharded / shard_name(0, 3)
    file.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(holdfast.CorruptError):
        view["model.embed.weight"][...]


@pytest.mark.parametrize("lost", ["seal.json", "manifest.hfm"])
def test_what_is_left_of_a_checkpoint_of_holdfast_is_no_folder_of_hugging_face(tmp_path: Path, lost: str) -> None:
    """Its data files are safetensors files: without the seal they were read as a foreign checkpoint, unverified."""
    holdfast.save(tmp_path / "run", {"w": torch.zeros(4)}, 1)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    (folder / lost).unlink()
    with pytest.raises((holdfast.NotFoundError, holdfast.CorruptError)):
        holdfast.load(folder, {"w": torch.zeros(4)})
    data_file = next(folder.glob("*.safetensors"))
    with pytest.raises(holdfast.NotFoundError, match="one file of a checkpoint"):
        holdfast.open(data_file)
