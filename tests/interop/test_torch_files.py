"""Files of `torch.save` are read directly, on any layout, to the same bits as by `torch.load`; nothing in them runs."""

from __future__ import annotations

import json
import logging
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.importing.first_checkpoint import import_state
from holdfast.interop.formats import find_state
from holdfast.mapping import Rename
from holdfast.run.paths import parse
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.interop.changed_bytes import SOUND, changed_bytes, outcome
from tests.interop.test_dcp import described, emptied, some_state
from tests.interop.test_pickle_machine import ATTACKS
from tests.interop.torch_archives import rewrite
from tests.support.bound import bits
from tests.support.ranks import run_ranks


def write(path: Path, state: object) -> Path:
    """Save `state` by torch."""
    torch.save(state, path)
    return path


def stock(path: Path) -> Any:
    """The content of a file that a test wrote, by torch."""
    return torch.load(path, weights_only=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "some.pt", some_state())


@pytest.mark.parametrize("name", ["a.pt", "b.pth", "c.bin", "d.ckpt", "e.pth.tar", "\u00e9poch=1-\u6b65.ckpt"])
def test_every_tensor_and_value_is_what_torch_saved(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / name, some_state())
    live = emptied(some_state())
    assert isinstance(live, dict)
    live["values"] |= {"ordered": OrderedDict(), "size": torch.Size([0])}
    with caplog.at_level(logging.INFO, "holdfast"):
        report = holdfast.load(path, live)
    assert described(report.state) == described(some_state())
    assert (report.step, report.next_step, report.place, report.verified) == (-1, 0, "", False)
    assert "its bytes were not verified" in caplog.text


def test_a_view_names_reads_and_pickles_what_the_file_holds(file: Path) -> None:
    view, state = holdfast.open(file), stock(file)
    assert "a file of torch.save" in repr(view)
    assert {"model/embed.weight", "list/0"} <= set(view.names())
    assert torch.equal(view["model/embed.weight"][3:30, 5], state["model"]["embed.weight"][3:30, 5])
    assert described(view.tree("list")) == described(state["list"])
    assert described(view.value("groups")) == described(state["groups"])
    assert described(view.value("values/size")) == described(torch.Size([2, 3]))
    again = pickle.loads(pickle.dumps(view))
    assert bits(again["model/half"][...]) == bits(state["model"]["half"])
    mapped = holdfast.open(file, verify=False)
    assert bits(mapped["model/embed.weight"][...]) == bits(state["model"]["embed.weight"])
    pieces = {piece.name: piece.array for piece in mapped.in_file_order("model/*.weight")}
    assert np.array_equal(pieces["model/embed.weight"], state["model"]["embed.weight"].numpy())


def test_a_file_that_was_written_again_is_not_opened_again_by_a_worker(file: Path) -> None:
    pickled = pickle.dumps(holdfast.open(file))
    write(file, some_state(seed=1))
    with pytest.raises(holdfast.NotFoundError, match="no longer the checkpoint that was opened"):
        pickle.loads(pickled)


class Net(nn.Module):
    """Two layers with one weight, a buffer, and a parameter of more than a chunk of a read, in uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.large = nn.Parameter(torch.randn(37, 65_537))
        self.register_buffer("mean", torch.randn(3))


def test_a_plain_module_state_takes_one_rule_and_ties_its_weights_again(tmp_path: Path) -> None:
    saved, net = Net(), Net()
    path = write(tmp_path / "net.pt", saved.state_dict())
    view = holdfast.open(path)
    assert view.aliases == {"last.weight": "first.weight"}
    report = holdfast.load(path, {"model": net}, mapping=[Rename("{x:**}", "model/{x}")])
    assert described(dict(net.state_dict())) == described(dict(stock(path)))
    assert net.last.weight is net.first.weight
    assert report.missing == report.unexpected == ()
    untied = {name: torch.zeros_like(tensor) for name, tensor in saved.state_dict().items()}
    holdfast.load(path, untied)
    assert described(untied) == described(dict(stock(path)))


def test_a_plan_reads_only_the_bytes_of_what_is_selected(tmp_path: Path) -> None:
    path = write(tmp_path / "net.pt", {"model": Net().state_dict(), "other": torch.zeros(1 << 20)})
    plan = holdfast.plan_load(path, {"model": {"large": torch.zeros(37, 65_537)}}, select="model/large")
    assert plan.loaded == ("model/large",)
    assert plan.needed_nbytes <= plan.read_nbytes["net.pt"] <= plan.needed_nbytes + 2 * 4096


class Small(nn.Module):
    """Parameters of several shapes, few enough to train."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)


def grouped(net: nn.Module, *, lr: float = 0.1) -> torch.optim.Optimizer:
    """An optimizer with two groups, in another order than the module's parameters."""
    large = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    small = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW([{"params": small, "lr": lr}, {"params": large, "weight_decay": 0.5}])


def trained(net: nn.Module, *, seed: int = 0, lr: float = 0.1) -> torch.optim.Optimizer:
    """An optimizer that has made two steps."""
    optimizer = grouped(net, lr=lr)
    torch.manual_seed(seed)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def save_trained(path: Path) -> Any:
    """Write a trained module with its optimizer; returns the content of the file."""
    net = Small()
    optimizer = trained(net)
    return stock(write(path, {"net": net.state_dict(), "optimizer": optimizer.state_dict()}))


def test_an_optimizer_takes_its_state_by_the_order_of_its_parameters(tmp_path: Path) -> None:
    saved, net = save_trained(tmp_path / "a.ckpt"), Small()
    for optimizer in (trained(net, seed=1, lr=0.3), grouped(net)):
        report = holdfast.load(tmp_path / "a.ckpt", {"net": net, "optimizer": optimizer})
        assert described(optimizer.state_dict()) == described(saved["optimizer"])
        assert described(dict(net.state_dict())) == described(dict(saved["net"]))
        assert report.missing == report.unexpected == ()


def test_a_scheduler_and_counters_come_back_beside_the_optimizer(tmp_path: Path) -> None:
    def live(milestones: list[int], epoch: int) -> dict[str, Any]:
        net = Small()
        optimizer = trained(net)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
        return {"net": net, "optimizer": optimizer, "scheduler": scheduler, "epoch": epoch}

    saved, loaded = live([3, 5, 5], 3), live([1], 0)
    states = {name: part if name == "epoch" else part.state_dict() for name, part in saved.items()}
    holdfast.load(write(tmp_path / "a.ckpt", states), loaded)
    assert loaded["epoch"] == 3
    assert loaded["scheduler"].state_dict() == saved["scheduler"].state_dict()
    assert loaded["optimizer"].state_dict()["param_groups"] == saved["optimizer"].state_dict()["param_groups"]


def test_an_optimizer_with_other_groups_is_refused_instead_of_mixing_up_its_state(tmp_path: Path) -> None:
    save_trained(tmp_path / "a.ckpt")
    net = Small()
    one_group = torch.optim.AdamW(net.parameters())
    with pytest.raises(
        holdfast.IncompatibleError, match=r"Group 0 of optimizer 'opt.*' has 4 parameters here and 2 in"
    ):
        holdfast.load(tmp_path / "a.ckpt", {"net": net, "optimizer": one_group})
    assert not one_group.state
    groups: list[dict[str, Any]] = [
        {"params": [net.down.bias, net.up.bias]},
        {"params": [net.up.weight, net.down.weight]},
    ]
    swapped = {"net": net, "optimizer": (optimizer := torch.optim.AdamW(groups))}
    for strict in (True, False):  # the state of the others may be that of other parameters, too
        with pytest.raises(holdfast.IncompatibleError, match=r"shape \(5,\) here.*order is another one") as caught:
            holdfast.load(tmp_path / "a.ckpt", swapped, strict=strict)
        assert caught.value.code == "incompatible.optimizer"
    assert not optimizer.state


def test_a_file_of_an_optimizer_alone_is_read_under_the_name_optimizer(tmp_path: Path) -> None:
    net = Small()
    path = write(tmp_path / "optimizer.pt", trained(net).state_dict())
    live = trained(net, seed=1)
    holdfast.load(path, {"net": net, "optimizer": live}, select="optimizer")
    assert described(live.state_dict()) == described(stock(path))


def test_lightning_keys_become_names_of_a_state_by_two_rules(tmp_path: Path) -> None:
    net = Small()
    optimizer = trained(net)
    state = {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {f"net.{name}": tensor for name, tensor in net.state_dict().items()},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'x/y'}": {"best_model_score": torch.tensor(0.5), "path": "a/b"}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
    }
    path = write(tmp_path / "epoch=1-step=4.ckpt", state)
    other = Small()
    live = {"model": other, "optimizer": trained(other, seed=2), "global_step": 0}
    rules = [Rename("state_dict/net.{x:**}", "model/{x}"), Rename("optimizer_states/0", "optimizer")]
    holdfast.load(path, live, mapping=rules, select=["model", "optimizer", "global_step"])
    assert live["global_step"] == 4
    assert described(dict(other.state_dict())) == described(dict(net.state_dict()))
    assert described(live["optimizer"].state_dict()) == described(optimizer.state_dict())  # type: ignore[attr-defined]


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # Lightning warns of small data, and of functions of torch that it uses
def test_a_checkpoint_of_lightning_itself_goes_on_in_a_module_and_its_optimizer(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    class Regression(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.inner = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def loader() -> Any:
        return torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4)  # type: ignore[arg-type]

    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    trained = Regression()
    trainer.fit(trained, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    live = Regression()
    (optimizer,), (scheduler,) = live.configure_optimizers()
    state = {"model": live, "optimizer": optimizer, "scheduler": scheduler, "global_step": 0}
    rules = [
        Rename("state_dict/{x:**}", "model/{x}"),
        Rename("optimizer_states/0", "optimizer"),
        Rename("lr_schedulers/0", "scheduler"),
    ]
    holdfast.load(tmp_path / "last.ckpt", state, mapping=rules, select=list(state))
    saved = stock(tmp_path / "last.ckpt")
    assert state["global_step"] == 6
    assert described(dict(live.state_dict())) == described(dict(saved["state_dict"]))
    assert described(optimizer.state_dict()) == described(saved["optimizer_states"][0])
    assert scheduler.state_dict() == saved["lr_schedulers"][0]
    tree: Any = holdfast.open(tmp_path / "last.ckpt").tree()
    assert tree["hyper_parameters"] == {"width": 3}
    assert tree["loops"]["fit_loop"]["epoch_progress"] == saved["loops"]["fit_loop"]["epoch_progress"]


def save_gathered(path: str) -> None:
    """As jobs of FSDP do that gather a full state on rank 0."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    net = Net()
    fully_shard(net, mesh=mesh)
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in net.state_dict().items()
    }
    if torch.distributed.get_rank() == 0:
        torch.save({"model": full}, path)


def load_sharded(path: str) -> tuple[bytes, bytes, bytes]:
    """The bits of this rank's rows, of its columns, and of a bias that all ranks have."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    net = Net()
    fully_shard(net, mesh=mesh)
    holdfast.load(path, {"model": net}, timeout_s=40)
    columns = distribute_tensor(torch.zeros(37, 65_537), mesh, [Shard(1)])
    holdfast.load(path, {"model": {"large": columns}}, select="model/large", timeout_s=40)
    assert isinstance(net.large, DTensor)
    assert isinstance(net.first.bias, DTensor)
    return bits(net.large.to_local()), bits(columns.to_local()), bits(net.first.bias.full_tensor())


def test_a_file_of_two_ranks_becomes_rows_and_columns_of_three(tmp_path: Path) -> None:
    path = tmp_path / "full.pt"
    run_ranks(2, save_gathered, str(path))
    model = stock(path)["model"]
    rows, columns = model["large"].chunk(3, 0), [part.contiguous() for part in model["large"].chunk(3, 1)]
    found = run_ranks(3, load_sharded, str(path))
    assert found == [(bits(rows[rank]), bits(columns[rank]), bits(model["first.bias"])) for rank in range(3)]


def load_optimizer(path: str) -> object:
    """The whole state of an optimizer whose parameters are sharded."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    net = Small()
    fully_shard(net, mesh=mesh)
    optimizer = grouped(net)
    holdfast.load(path, {"net": net, "optimizer": optimizer}, timeout_s=40)
    kept = optimizer.state_dict()["state"]
    return described(
        {
            key: {slot: value.full_tensor() if isinstance(value, DTensor) else value for slot, value in slots.items()}
            for key, slots in kept.items()
        }
    )


def test_the_state_of_an_optimizer_is_divided_among_ranks(tmp_path: Path) -> None:
    wanted = described(save_trained(tmp_path / "a.ckpt")["optimizer"]["state"])
    assert run_ranks(3, load_optimizer, str(tmp_path / "a.ckpt")) == [wanted] * 3


def some_views() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0).reshape(10, 6)
    return {
        "whole": base,
        "rows": base[2:7],
        "columns": base[:, 1:4],
        "transposed": base.t(),
        "every other": base[::2, ::3],
        "expanded": base[:1].expand(4, 6),
        "one": base[3, 3],
        "none": base[5:5],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "odd": torch.arange(7, dtype=torch.int16)[1:],
    }


def test_views_of_one_storage_are_read_in_the_order_of_their_elements(tmp_path: Path) -> None:
    path = write(tmp_path / "views.pt", some_views())
    live = {name: torch.full(tuple(each.shape), -1).to(each.dtype) for name, each in some_views().items()}
    view = holdfast.open(path)
    holdfast.load(path, live)
    for name, tensor in stock(path).items():
        assert bits(live[name]) == bits(tensor), name
        assert bits(view[name][...]) == bits(tensor), name
    assert bits(view["transposed"][1:3, 2:]) == bits(some_views()["transposed"][1:3, 2:])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_strided_view_is_read_as_torch_reads_it(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [data.draw(st.integers(0, 12)) for _ in shape]
    tensor = torch.arange(200, dtype=torch.int32).as_strided(shape, strides, data.draw(st.integers(0, 9)))
    path = write(tmp_path / "view.pt", {"w": tensor, "same": tensor})
    live = {"w": torch.full(tuple(shape), -1, dtype=torch.int32)}
    holdfast.load(path, live, select="w")
    assert torch.equal(live["w"], tensor)


def test_a_large_transposed_matrix_is_refused_with_its_name_and_hides_no_other_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "t.pt", {"w": torch.zeros(300, 300).t(), "v": torch.ones(3)})
    live = {"w": torch.full((300, 300), -1.0), "v": torch.zeros(3)}
    with pytest.raises(holdfast.IncompatibleError, match=r"holds w in another order than row by row.*contiguous\(\)"):
        holdfast.load(path, live)
    assert (live["w"] == -1).all()
    holdfast.load(path, live, select="v")
    assert (live["v"] == 1).all()


def test_a_conjugate_view_is_refused_since_its_storage_has_other_elements(tmp_path: Path) -> None:
    path = write(tmp_path / "c.pt", {"w": torch.randn(3, dtype=torch.complex64).conj()})
    with pytest.raises(holdfast.IncompatibleError, match="conjugate"):
        holdfast.open(path)


def test_parameters_are_read_as_their_tensors(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    parameter.extra = "attribute"  # type: ignore[attr-defined]
    path = write(tmp_path / "p.pt", {"w": parameter, "v": nn.Parameter(torch.ones(2), requires_grad=False)})
    view = holdfast.open(path)
    assert torch.equal(view["w"][...], parameter)
    assert view["v"][...].tolist() == [1, 1]


def test_an_imported_run_keeps_ties_and_the_order_of_the_optimizer(tmp_path: Path) -> None:
    net = Small()
    state = {"net": net.state_dict(), "tied": net.up.weight.detach(), "optimizer": trained(net).state_dict()}
    path = write(tmp_path / "a.pt", state)
    import_state(find_state(parse(path)).state, open_store(Location(str(tmp_path / "run"))), 4)
    live, loaded = trained(net, seed=1), holdfast.open(tmp_path / "run")
    assert loaded.aliases == {"tied": "net/up.weight"}
    holdfast.load(tmp_path / "run", {"net": net, "optimizer": live}, select=["net", "optimizer"])
    assert described(live.state_dict()) == described(stock(path)["optimizer"])


# --- folders of several files ---

INDEX = "pytorch_model.bin.index.json"


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    folder.mkdir()
    weight_map = {name: f"pytorch_model-{at % 2 + 1:05d}-of-00002.bin" for at, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        write(folder / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write(folder / "training_args.bin", {"lr": 1})
    return weight_map


def test_shards_of_hugging_face_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = dict(Small().state_dict())
    write_shards(tmp_path / "hf", tensors)
    for has_index in (True, False):
        if not has_index:
            (tmp_path / "hf" / INDEX).unlink()
        live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        holdfast.load(tmp_path / "hf", live)
        assert described(live) == described(tensors)
    assert "a folder of torch.save files" in repr(holdfast.open(tmp_path / "hf"))
    one = holdfast.open(tmp_path / "hf" / "pytorch_model-00002-of-00002.bin")
    assert one.names() == ["down.bias", "up.bias"]


def test_a_missing_shard_is_named_with_its_tensors(tmp_path: Path) -> None:
    write_shards(tmp_path / "hf", dict(Small().state_dict()))
    (tmp_path / "hf" / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(holdfast.CorruptError, match="lacks 1 file of 2, with 2 tensors of 4") as caught:
        holdfast.open(tmp_path / "hf")
    assert "up.bias" in caught.value.details[0]


def test_shards_of_another_save_than_the_index_are_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path / "hf", dict(Small().state_dict()))
    write(tmp_path / "hf" / weight_map["up.bias"], {"up.bias": torch.zeros(7), "stray": torch.zeros(1)})
    with pytest.raises(holdfast.CorruptError, match="disagrees with its files about 2 tensors"):
        holdfast.open(tmp_path / "hf")


def test_one_name_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"pytorch_model-{number:05d}-of-00002.bin", {"w": torch.zeros(number)})
    with pytest.raises(holdfast.CorruptError, match="holds w a second time"):
        holdfast.open(tmp_path)


# --- what is refused ---


def test_a_small_file_cannot_unfold_to_a_huge_table(tmp_path: Path) -> None:
    value: object = 1
    for _ in range(40):
        value = {"k" * 50_000: value, "l": value}
    path = write(tmp_path / "a.pt", {"w": torch.ones(2), "x": value})
    with pytest.raises(holdfast.IncompatibleError, match="refers to one object too often"):
        holdfast.open(path)


def test_a_tensor_that_repeats_one_element_for_ever_is_refused_before_it_needs_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pt", {"w": torch.ones(1).expand(1 << 50), "v": torch.ones(1)})
    view = holdfast.open(path)
    assert view.names() == ["v"]
    with pytest.raises(holdfast.IncompatibleError, match=r"holds w in another order .* \(strides \[0\]\)"):
        view.tree()


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_in_a_file_is_refused_with_what_it_names_and_does_nothing(tmp_path: Path, attack: str) -> None:
    hit, path = tmp_path / "hit", write(tmp_path / "a.pt", {"w": torch.ones(2)})
    data, said = ATTACKS[attack](str(hit))
    rewrite(path, {"data.pkl": data})
    live = {"w": torch.zeros(2)}
    with pytest.raises(holdfast.IncompatibleError, match=said or None) as caught:
        holdfast.load(path, live)
    assert caught.value.code == "incompatible.foreign"
    assert live["w"].tolist() == [0, 0]
    assert not hit.exists()


class Config:
    """A class of a user."""


def test_an_object_of_a_users_class_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pt", {"w": torch.ones(2), "config": Config()})
    with pytest.raises(holdfast.IncompatibleError, match=r"'tests.interop.test_torch_files.Config'.*weights_only"):
        holdfast.open(path)


def test_objects_that_are_no_values_are_refused_one_by_one_and_can_be_left_out(tmp_path: Path) -> None:
    odd = {"set": {1, 2}, "array": np.zeros(3), "path": Path("a"), "raw": bytearray(b"x")}
    path = write(tmp_path / "a.pt", {"w": torch.ones(2), **odd})
    live = {"w": torch.zeros(2)}
    holdfast.load(path, live, select="w")
    assert live["w"].tolist() == [1, 1]
    view = holdfast.open(path)
    for name in odd:
        with pytest.raises(holdfast.IncompatibleError, match=f"holds {name}, which cannot be read"):
            view.value(name)
    with pytest.raises(holdfast.IncompatibleError, match="which cannot be read"):
        holdfast.load(path, live)
    with pytest.raises(holdfast.IncompatibleError, match=r"Names differ. 1 missing from the checkpoint: v"):
        holdfast.load(path, {**live, "v": torch.zeros(2)}, select=["w", "v"])


def test_other_formats_are_refused_with_what_to_do(tmp_path: Path) -> None:
    legacy = tmp_path / "old.pt"
    torch.save({"w": torch.ones(2)}, legacy, _use_new_zipfile_serialization=False)
    with pytest.raises(holdfast.IncompatibleError, match=r"before torch 1.6. Load it with torch.load, and"):
        holdfast.load(legacy, {"w": torch.zeros(2)})
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(holdfast.CorruptError, match="is no zip archive"):
        holdfast.open(tmp_path / "plain.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(holdfast.CorruptError, match="is no zip archive"):
        holdfast.open(tmp_path / "empty.pt")
    with pytest.raises(holdfast.IncompatibleError, match="something else than a dict"):
        holdfast.open(write(tmp_path / "bare.pt", torch.ones(2)))
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(tmp_path / "missing.pt")


def beyond(entry: zipfile.ZipInfo) -> None:
    entry.header_offset += 1 << 20


def locked(entry: zipfile.ZipInfo) -> None:
    entry.flag_bits |= 1


def longer(entry: zipfile.ZipInfo) -> None:
    entry.file_size += 1 << 12
    entry.compress_size += 1 << 12


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"contents": {"data/0": bytes(39)}}, "the storage of w has 39 bytes, and its tensor needs 40"),
        ({"compressed": "data/0"}, "is compressed or encrypted"),
        ({"compressed": "data.pkl"}, "is compressed or encrypted"),
        ({"twice": "data/0"}, "it has an entry twice"),
        ({"change": ("data/0", beyond)}, "has no header|no zip archive|behind it"),
        ({"change": ("data/0", locked)}, "is compressed or encrypted"),
        ({"change": ("data/0", longer)}, "cut off, or runs into the next one"),
        ({"contents": {"byteorder": b"big"}}, "not in little-endian order"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_an_archive_that_lies_about_its_entries_is_refused_and_fills_nothing(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "a.pt", {"w": torch.arange(10.0)})
    rewrite(path, **change)
    live = {"w": torch.full((10,), -1.0)}
    with pytest.raises(holdfast.CorruptError, match=said) as caught:
        holdfast.load(path, live)
    assert caught.value.code == "corrupt.foreign"
    assert (live["w"] == -1).all()


def test_a_missing_storage_and_a_cut_off_file_are_refused(tmp_path: Path, file: Path) -> None:
    whole = file.read_bytes()
    for nbytes in (len(whole) - 1, len(whole) // 2, 64):
        file.write_bytes(whole[:nbytes])
        with pytest.raises(holdfast.CorruptError):
            holdfast.open(file)
    path = write(tmp_path / "a.pt", {"w": torch.arange(10.0)})
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("a/data.pkl")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
    with pytest.raises(holdfast.CorruptError, match="its entry data/0 is missing"):
        holdfast.open(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
@given(data=st.data())
def test_changed_bytes_are_refused_or_read_and_never_raise_another_error(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    pickled = whole.index(b"\x80\x02")
    with changed_bytes(file, data, spots=(range(pickled, pickled + 4096), range(len(whole) - 4096, len(whole)))):
        assert outcome(file) in SOUND
