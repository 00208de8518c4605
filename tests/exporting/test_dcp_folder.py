"""Exports to DCP: stock ``torch.distributed.checkpoint.load`` finds every tensor and value, on any layout."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.errors import IncompatibleError
from holdfast.exporting import dcp_folder, file_tasks
from holdfast.exporting.file_writes import write_together
from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.dtypes import DTYPES
from holdfast.io import side_by_side
from holdfast.mapping import Fuse, Rename
from tests.exporting.exported_runs import Tied, bits, divided_run, plain_state
from tests.support.ranks import run_ranks


class Point(NamedTuple):
    """A named tuple in a state."""

    x: int
    y: int


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP says so in one process


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of what three ranks saved."""
    folder = tmp_path_factory.mktemp("divided")
    holdfast.export(divided_run(folder), folder / "dcp", "dcp", shard_nbytes=900_000)
    return folder / "dcp"


def archives(folder: Path) -> dict[str, list[bytes]]:
    """The archives of a folder by their keys."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    found: dict[str, list[bytes]] = {}
    for index, info in metadata.storage_data.items():
        data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        found.setdefault(index.fqn, []).append(data)
    return found


def test_a_whole_state_is_loaded_by_stock_dcp_into_plain_tensors_and_values(tmp_path: Path) -> None:
    state: Any = plain_state()
    holdfast.save(tmp_path / "run", state, 5)
    report = holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp")
    slots = {
        name: {"exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape), "step": torch.zeros(())}
        for name, shape in (
            ("model.embed.weight", (700, 300)),
            ("model.up.weight", (500, 300)),
            ("model.up.bias", (500,)),
        )
    }
    live: Any = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].state_dict().items()},
        "optimizer": {"state": slots, "param_groups": [{"lr": 0.0, "betas": None}]},
        "progress": {"samples": 0, "name": "", "best": None, "seen": None, "dtype": None},
        "list": [torch.zeros(3), 0],
    }
    dcp.load(live, checkpoint_id=tmp_path / "dcp")
    stored = state["model"].state_dict()
    assert {name: bits(tensor) for name, tensor in live["model"].items()} == {n: bits(t) for n, t in stored.items()}
    parameters = dict(state["model"].named_parameters(remove_duplicate=False))
    for name, loaded in slots.items():
        kept = state["optimizer"].state[parameters[name]]
        assert {slot: bits(tensor) for slot, tensor in loaded.items()} == {s: bits(t) for s, t in kept.items()}
    assert live["progress"] == state["progress"]
    assert live["optimizer"]["param_groups"] == [{"lr": 0.01, "betas": (0.9, 0.999)}]
    assert (live["list"][0].tolist(), live["list"][1]) == ([1.0, 1.0, 1.0], 4)
    assert (report.to, report.files, report.num_tensors) == ("dcp", ("__0_0.distcp",), 17)
    assert report.num_values == 21


def test_a_tied_tensor_is_stored_once_and_found_under_both_names(divided: Path) -> None:
    found = archives(divided)
    assert found["model.lm_head.weight"] == found["model.model.embed.weight"]
    assert sum(path.stat().st_size for path in divided.iterdir()) < 1.05 * (700 + 500) * 300 * 4


def test_archives_are_whole_zip_files_that_torch_and_other_programs_read(divided: Path) -> None:
    assert len(list(divided.glob("*.distcp"))) == 2
    for key, parts in archives(divided).items():
        for part in parts:
            assert zipfile.ZipFile(io.BytesIO(part)).testzip() is None, key
            assert torch.load(io.BytesIO(part), weights_only=True) is not None


def loaded_on_a_rank(folder: str) -> list[Any]:
    """The bits of whole tensors that ranks loaded into DTensors of other layouts, and a value."""
    mesh = init_device_mesh("cpu", (2,))
    layouts = {"model.lm_head.weight": Shard(1), "model.model.up.weight": Shard(0), "model.positions": Replicate()}
    model = Tied(seed=9).state_dict()
    live: dict[str, Any] = {
        key: distribute_tensor(torch.zeros_like(model[key.removeprefix("model.")]), mesh, [placement])
        for key, placement in layouts.items()
    }
    live["step"] = -1
    dcp.load(live, checkpoint_id=folder)
    return [bits(item.full_tensor()) if isinstance(item, DTensor) else item for item in live.values()]


def test_two_ranks_load_what_three_ranks_saved_into_dtensors(divided: Path) -> None:
    stored = Tied().state_dict()
    expected = [*(bits(stored[name]) for name in ("lm_head.weight", "model.up.weight", "positions")), 3]
    assert run_ranks(2, loaded_on_a_rank, str(divided)) == [expected, expected]


def test_tensors_lie_in_several_archives_and_windows_where_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_folder, "MAX_NBYTES", 5000)
    monkeypatch.setattr(file_tasks, "WINDOW_NBYTES", BLOCK_NBYTES)
    state = {"w": torch.randn(3, 40, 700), "row": torch.arange(2_000_000, dtype=torch.int16), "one": torch.tensor(1.5)}
    holdfast.save(tmp_path / "run", state, 1)
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp", shard_nbytes=1_500_000)
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(live, checkpoint_id=tmp_path / "dcp")
    assert {name: bits(tensor) for name, tensor in live.items()} == {n: bits(t) for n, t in state.items()}
    assert all(zipfile.ZipFile(io.BytesIO(part)).testzip() is None for part in archives(tmp_path / "dcp")["w"])
    assert len(archives(tmp_path / "dcp")["w"]) == 120


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    some_bytes = torch.arange(96, dtype=torch.uint8).reshape(6, 16)
    state = {name: some_bytes.clone().view(getattr(torch, name)) for name in DTYPES if name != "bool"}
    state["bool"] = torch.tensor([True, False])
    state |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3, dtype=torch.int32)}
    holdfast.save(tmp_path / "run", state, 1)
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp")
    found = {
        key: torch.load(io.BytesIO(part), weights_only=True) for key, (part,) in archives(tmp_path / "dcp").items()
    }
    assert {key: bits(tensor) for key, tensor in found.items()} == {n: bits(t) for n, t in state.items()}
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name != "float4_e2m1fn_x2"}
    dcp.load(live, checkpoint_id=tmp_path / "dcp")
    assert {name: bits(tensor) for name, tensor in live.items()} == {name: bits(state[name]) for name in live}


def test_values_of_all_kinds_come_in_plain_types_in_the_containers_that_were_saved(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    state = {
        "array": np.arange(3),
        "number": np.float32(2),
        "record": Point(1, 2),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "random": holdfast.RandomState(),
        "own": holdfast.PerRank({"t": torch.ones(2), "k": 1}),
        "nested": [[torch.ones(1), {"a": ()}]],
        "a": {1: "int key", "s/l": [1, [2, 3]], "empty": {}, "list": [{"b": 2}, 5]},
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "generator": generator,
        "rank": holdfast.PerRank({"seed": 4}),
        "pair": (1, torch.ones(2)),
    }
    holdfast.save(tmp_path / "run", state, 1)
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    assert found["a"] == {"1": "int key", "s/l": [1, [2, 3]], "list": [{"b": 2}, 5]}
    assert (found["device"], found["size"]) == (torch.device("cpu"), torch.Size([2, 3]))
    assert torch.equal(found["generator"], generator.get_state())
    assert (found["array"].tolist(), found["number"], found["record"]) == ([0, 1, 2], np.float32(2), (1, 2))
    assert found["scheduler"]["base_lrs"] == [0.5]
    assert torch.equal(torch.tensor(list(found["random"][0]["torch"]), dtype=torch.uint8), torch.get_rng_state())
    assert (found["own"]["%rank=0"]["k"], found["own"]["%rank=0"]["t"].tolist()) == (1, [1.0, 1.0])
    assert (found["nested"][0][0].tolist(), found["nested"][0][1]) == ([1.0], {"a": ()})
    assert found["pair"][0] == 1
    assert torch.equal(found["pair"][1], torch.ones(2))
    assert found["rank"] == [{"seed": 4}]


def test_globs_choose_tensors_and_values(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.ones(2), "v": torch.ones(2), "step": 1, "best": 2}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp", select=["w", "step"])
    assert sorted(archives(tmp_path / "dcp")) == ["step", "w"]
    with pytest.raises(IncompatibleError, match="'steps'") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "other", "dcp", select=["w", "steps"])
    assert caught.value.code == "incompatible.select"


def tied_training(seed: int, lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose head is its embedding, which comes first as in transformers, and its optimizer after a step."""
    torch.manual_seed(seed)
    embed, head = torch.nn.Embedding(11, 5), torch.nn.Linear(5, 11, bias=False)
    head.weight = embed.weight
    model = torch.nn.Sequential(OrderedDict(embed=embed, up=torch.nn.Linear(5, 5), a_head=head))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_tied_model_with_its_optimizer_is_loaded_by_the_functions_of_dcp(tmp_path: Path) -> None:
    saved, saved_optimizer = tied_training(seed=0, lr=0.01)
    holdfast.save(tmp_path / "run", {"job": {"net": saved, "opt": saved_optimizer}}, 5)
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp")
    model, optimizer = tied_training(seed=9, lr=9.0)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    live = {"job": {"net": of_model, "opt": of_optimizer}}
    dcp.load(live, checkpoint_id=tmp_path / "dcp")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for stored, loaded in zip(saved.parameters(), model.parameters(), strict=True):
        assert bits(loaded) == bits(stored)
        expected, found = saved_optimizer.state[stored], optimizer.state[loaded]
        assert {slot: bits(each) for slot, each in found.items()} == {
            slot: bits(each) for slot, each in expected.items()
        }


def head_first(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A tied model whose head comes first, and its optimizer after a step."""
    torch.manual_seed(seed)
    embed, head = torch.nn.Embedding(11, 5), torch.nn.Linear(5, 11, bias=False)
    head.weight = embed.weight
    model = torch.nn.ModuleDict({"head": head, "embed": embed})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    head(embed(torch.arange(6))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_state_of_a_tied_parameter_had_the_name_of_the_embedding_only(tmp_path: Path) -> None:
    """A job whose head comes first names the parameter after that, and stock DCP missed its state."""
    saved, saved_optimizer = head_first(seed=0)
    holdfast.save(tmp_path / "run", {"model": saved, "optimizer": saved_optimizer}, 5)
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp")
    live: tuple[Any, Any] = get_state_dict(*head_first(seed=9))
    of_model, of_optimizer = live
    assert list(of_optimizer["state"]) == ["head.weight"]
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path / "dcp")
    (expected,) = saved_optimizer.state.values()
    found = of_optimizer["state"]["head.weight"]
    assert {slot: bits(each) for slot, each in found.items()} == {slot: bits(each) for slot, each in expected.items()}
    for name in ("head.weight", "embed.weight"):
        assert bits(of_model[name]) == bits(saved.get_parameter(name))


@pytest.mark.parametrize("writer", ["holdfast", "stock"])
@pytest.mark.parametrize("make", [head_first, partial(tied_training, lr=0.1)], ids=["head first", "embedding first"])
def test_a_tied_parameter_whose_first_name_in_the_module_is_not_the_first_in_the_alphabet_lost_its_state(
    tmp_path: Path, make: Any, writer: str
) -> None:
    """Loads of DCP folders into live objects refused it, and so they did for every tied model of transformers."""
    saved, saved_optimizer = make(seed=0)
    if writer == "stock":
        of_model, of_optimizer = get_state_dict(saved, saved_optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path / "dcp")
    else:
        holdfast.save(tmp_path / "run", {"model": saved, "optimizer": saved_optimizer}, 5)
        holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp")
    model, optimizer = make(seed=8)
    holdfast.load(tmp_path / "dcp", {"model": model, "optimizer": optimizer})
    for expected, found in zip(saved_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert {slot: bits(each) for slot, each in found.items()} == {
            slot: bits(each) for slot, each in expected.items()
        }


def test_an_optimizer_of_several_modules_keeps_its_stored_names(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5, momentum=0.9)
    (first(torch.ones(2)) + second(torch.ones(3))).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "run", {"a": first, "b": second, "optimizer": optimizer}, 5)
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp")
    found = archives(tmp_path / "dcp")
    assert {"optimizer.state.a.weight.momentum_buffer", "optimizer.state.b.bias.momentum_buffer"} <= set(found)
    assert not any(key.endswith("params") for key in found)


def test_names_that_meet_when_they_are_joined_by_dots_are_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}, 1)
    with pytest.raises(IncompatibleError, match=r"would both get the key 'a\.b\.c'") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp")
    assert caught.value.code == "incompatible.export"
    assert not (tmp_path / "dcp").exists()
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp", mapping=[Rename("a", "first")])
    assert sorted(archives(tmp_path / "dcp")) == ["a.b.c", "first.b.c"]


def test_a_mapping_fuses_parameters_with_their_state_and_refuses_step_counters_that_differ(tmp_path: Path) -> None:
    state: Any = plain_state()
    holdfast.save(tmp_path / "run", state, 5)
    rules = [Fuse(["model/model.up.weight", "model/lm_head.weight"], "model/both")]
    holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp", mapping=rules)
    model = state["model"]
    slots = [state["optimizer"].state[weight] for weight in (model.model["up"].weight, model.lm_head.weight)]
    live = {
        "optimizer.state.both.exp_avg": torch.zeros(1200, 300),
        "optimizer.state.both.step": torch.ones(()),
    }
    dcp.load(live, checkpoint_id=tmp_path / "dcp")
    expected = [torch.cat([slot["exp_avg"] for slot in slots]), slots[0]["step"]]
    assert list(map(bits, live.values())) == list(map(bits, expected))
    slots[1]["step"] += 1
    holdfast.save(tmp_path / "run", state, 6)
    with pytest.raises(IncompatibleError, match="differ, so they cannot become one tensor"):
        holdfast.export(tmp_path / "run", tmp_path / "other", "dcp", mapping=rules)


def test_an_export_that_failed_goes_on_after_its_finished_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"w{number}": torch.full((100_000,), float(number)) for number in range(4)}
    holdfast.save(tmp_path / "run", {**tensors, "value": [1, "a"]}, 1)
    write, begun = write_together, []

    def fails(*arguments: Any, **options: Any) -> Any:
        begun.append(arguments)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return write(*arguments, **options)

    monkeypatch.setattr(file_tasks, "_RECORD_NBYTES", 0)
    monkeypatch.setattr(side_by_side, "NUM_SMALL_TASKS", 1)
    monkeypatch.setattr(file_tasks, "write_together", fails)
    with pytest.raises(KeyboardInterrupt):
        holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp", shard_nbytes=400_000)
    assert not (tmp_path / "dcp" / ".metadata").exists()
    report = holdfast.export(tmp_path / "run", tmp_path / "dcp", "dcp", shard_nbytes=400_000)
    assert (report.kept, len(report.files)) == (("__0_0.distcp", "__0_1.distcp"), 5)
    live = {name: torch.zeros(100_000) for name in tensors}
    dcp.load(live, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(live[name], tensors[name]) for name in live)
