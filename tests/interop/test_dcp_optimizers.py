"""The optimizer state in folders of DCP goes into live optimizers, in each of the forms that it has there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.errors import HoldfastError, IncompatibleError
from holdfast.importing.first_checkpoint import import_state
from holdfast.interop.formats import find_state
from holdfast.mapping import Rename
from holdfast.run.paths import parse
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.bound import bits
from tests.support.ranks import run_ranks

# Stock DCP warns where there is one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

FORMS = ("by name", "flat", "by number")


class Training:
    """A model and its optimizer in two groups with rates of their own, and a schedule, after a few steps."""

    def __init__(
        self,
        seed: int,
        *,
        steps: int,
        widths: tuple[int, int] = (6, 9),
        rates: tuple[float, float] = (0.1, 0.2),
        flat: str = "",
    ) -> None:
        torch.manual_seed(seed)
        first_two = nn.Embedding(11, widths[0]), nn.Linear(*widths)
        self.layers = nn.Sequential(*first_two, nn.Linear(widths[1], 5, bias=False))
        self.model: nn.Module = self.layers
        if flat:
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so often
            options: dict[str, Any] = {"use_orig_params": flat == "original", "device_id": torch.device("cpu")}
            self.model = FullyShardedDataParallel(self.layers, **options)
        elif dist.is_initialized():
            for layer in self.layers:
                fully_shard(layer)
            fully_shard(self.layers)
        first, *rest = self.model.parameters()
        parts = zip(([first], rest), rates, strict=True)
        groups = [{"params": part, "lr": rate * (seed + 1)} for part, rate in parts if part]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.01 * (seed + 1))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.model(torch.arange(8) % 11).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def contents(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = bits(_whole(parameter.detach()))
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name} {slot}"] = bits(_whole(value))
        keys = ("lr", "initial_lr", "weight_decay", "betas", "eps")
        found["groups"] = [[group[key] for key in keys] for group in self.optimizer.param_groups]
        return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_state(training: Training, form: str) -> dict[str, Any]:
    """The state as scripts for DCP hold it."""
    if form == "by number":
        return {"model": training.model.state_dict(), "optim": training.optimizer.state_dict()}
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    return {"model": model, "optim": optimizer}


def _write(folder: str, form: str) -> dict[str, object]:
    training = Training(0, steps=2)
    state = plain_state(training, form) | {"schedule": training.schedule.state_dict()}
    torch_dcp.save(state, checkpoint_id=folder)
    return training.contents()


def _read(folder: str) -> tuple[dict[str, object], dict[str, object]]:
    """Load into new objects; what they hold, and what they hold a step later."""
    live = Training(7, steps=0)
    holdfast.load(folder, {"model": live.model, "optim": live.optimizer, "schedule": live.schedule})
    loaded = live.contents()
    live.step()
    return loaded, live.contents()


def _save(run: str) -> dict[str, object]:
    training = Training(0, steps=2)
    holdfast.save(run, {"model": training.model, "optim": training.optimizer}, 1)
    return training.contents()


def _read_with_dcp(folder: str) -> dict[str, object]:
    live = Training(7, steps=0)
    model, optimizer = get_state_dict(live.model, live.optimizer)
    torch_dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder)
    set_state_dict(live.model, live.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return live.contents()


def test_stock_dcp_loads_an_exported_training_on_another_number_of_ranks(tmp_path: Path) -> None:
    run, folder = str(tmp_path / "run"), str(tmp_path / "dcp")
    saved = run_ranks(2, _save, run)[0]
    holdfast.export(run, folder, "dcp")
    assert run_ranks(3, _read_with_dcp, folder) == [saved] * 3
    live = Training(7, steps=0)
    holdfast.load(folder, {"model": live.model, "optim": live.optimizer})
    assert live.contents() == saved


@pytest.mark.parametrize(("form", "ranks"), [("by name", (2, 3)), ("flat", (3, 2)), ("by number", (2, 3))])
def test_a_live_optimizer_on_another_number_of_ranks_takes_the_state(
    tmp_path: Path, form: str, ranks: tuple[int, int]
) -> None:
    folder = str(tmp_path / "dcp")
    saved = run_ranks(ranks[0], _write, folder, form)[0]
    found = run_ranks(ranks[1], _read, folder)
    assert [loaded for loaded, _ in found] == [saved] * ranks[1]
    assert found[0][1] == found[1][1] != saved


@pytest.mark.parametrize("form", FORMS)
def test_one_process_takes_the_state_and_trains_on_as_the_old_job_would(tmp_path: Path, form: str) -> None:
    old = Training(0, steps=2)
    torch_dcp.save(plain_state(old, form), checkpoint_id=str(tmp_path))
    live = Training(7, steps=1)
    report = holdfast.load(tmp_path, {"model": live.model, "optim": live.optimizer})
    assert live.contents() == old.contents()
    assert report.unexpected == report.missing == ()
    old.step()
    live.optimizer.zero_grad()
    live.model(torch.arange(8) % 11).square().sum().backward()
    live.optimizer.step()
    assert bits(next(live.model.parameters()).detach()) == bits(next(old.model.parameters()).detach())


@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_that_holdfast_saved_as_a_dict_is_taken_too(tmp_path: Path, form: str) -> None:
    old, live = Training(0, steps=2), Training(7, steps=0)
    holdfast.save(tmp_path, plain_state(old, form), 1)
    holdfast.load(tmp_path, {"model": live.model, "optim": live.optimizer}, continues=False)
    assert live.contents() == old.contents()


def _through_fsdp1(folder: str, run: str, original: bool) -> str:
    """Load a folder under FSDP1, and save that; or the error of the load."""
    live = Training(7, steps=0, flat="original" if original else "flat")
    try:
        holdfast.load(folder, {"model": live.model, "optim": live.optimizer})
    except HoldfastError as error:
        return str(error.code)
    holdfast.save(run, {"model": live.model, "optim": live.optimizer}, 0, takeover=True)
    return ""


@pytest.mark.parametrize(("form", "original"), [("by name", True), ("flat", True), ("by name", False)])
def test_an_optimizer_of_fsdp1_takes_the_state_by_the_names_of_its_parameters(
    tmp_path: Path, form: str, original: bool
) -> None:
    old, live = Training(0, steps=2, rates=(0.1, 0.1)), Training(7, steps=0)
    torch_dcp.save(plain_state(old, form), checkpoint_id=str(tmp_path / "dcp"))
    assert run_ranks(2, _through_fsdp1, str(tmp_path / "dcp"), str(tmp_path / "run"), original) == ["", ""]
    holdfast.load(tmp_path / "run", {"model": live.model, "optim": live.optimizer}, strict=False)
    assert live.contents() == old.contents()


def test_numbers_are_refused_by_an_optimizer_of_fsdp1(tmp_path: Path) -> None:
    torch_dcp.save(plain_state(Training(0, steps=2), "by number"), checkpoint_id=str(tmp_path / "dcp"))
    found = run_ranks(2, _through_fsdp1, str(tmp_path / "dcp"), str(tmp_path / "run"), True)
    assert found == ["incompatible.optimizer"] * 2


def test_a_dict_with_numbers_takes_the_state_that_dcp_stored_under_texts(tmp_path: Path) -> None:
    old, new = _numbered(1), _numbered(2)
    torch_dcp.save(old, checkpoint_id=tmp_path, no_dist=True)
    report = holdfast.load(tmp_path, into=new)
    assert "optim/state/%int=1/exp_avg" in report.loaded
    assert new["losses"] == {0: 1, 10: 1.5}
    assert _slot_bits(new["optim"]) == _slot_bits(old["optim"])


def test_an_imported_dict_with_texts_is_advised_to_load_into_the_optimizer_itself(tmp_path: Path) -> None:
    state = {"optim": _trained(1).state_dict()}
    torch_dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_state(find_state(parse(str(tmp_path / "dcp"))).state, open_store(Location(str(tmp_path / "run"))), 1)
    with pytest.raises(IncompatibleError, match=r"as \{\"model\": model, \"optim\": optimizer\}") as caught:
        holdfast.load(tmp_path / "run", into=state)
    assert "tree" not in str(caught.value)  # its numbers are text, of which load_state_dict finds none


def test_a_number_without_a_text_in_the_checkpoint_is_missing(tmp_path: Path) -> None:
    torch_dcp.save({"d": {0: torch.ones(2), "a": torch.ones(1)}}, checkpoint_id=tmp_path, no_dist=True)
    live: dict[str, dict[Any, Any]] = {"d": {0: torch.zeros(2), 1: torch.zeros(2), "a": torch.zeros(1)}}
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(tmp_path, into=live)
    assert "d/%int=1" in str(caught.value)
    assert "d/%int=0" not in str(caught.value)
    assert "DCP stores" not in str(caught.value)
    holdfast.load(tmp_path, into=live, strict=False)
    assert [x.tolist() for x in live["d"].values()] == [[1, 1], [0, 0], [1]]


def test_rules_of_the_user_are_not_changed(tmp_path: Path) -> None:
    torch_dcp.save({"d": {0: torch.ones(2)}, "e": {1: torch.ones(1)}}, checkpoint_id=tmp_path, no_dist=True)
    live: dict[str, dict[Any, Any]] = {"d": {0: torch.zeros(2)}, "e": {"1": torch.zeros(1)}}
    holdfast.load(tmp_path, into=live, mapping=[Rename("d/{i}", "d/%int={i}")])
    assert live["d"][0].tolist() == [1, 1]
    assert live["e"]["1"].tolist() == [1]


def _trained(seed: int) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


def _numbered(seed: int) -> dict[str, Any]:
    return {"optim": _trained(seed).state_dict(), "losses": {0: seed, 10: seed + 0.5}}


def _slot_bits(state: dict[str, Any]) -> dict[Any, Any]:
    return {key: {slot: bits(x) for slot, x in slots.items()} for key, slots in state["state"].items()}


def test_state_of_frozen_and_untrained_parameters_is_none(tmp_path: Path) -> None:
    old, live = Training(0, steps=0), Training(7, steps=0)
    for training in (old, live):
        training.layers[0].weight.requires_grad_(False)
    old.step()
    torch_dcp.save(plain_state(old, "by number"), checkpoint_id=str(tmp_path))
    holdfast.load(tmp_path, {"model": live.model, "optim": live.optimizer})
    assert live.contents() == old.contents()
    assert live.layers[0].weight not in live.optimizer.state


def refused(folder: Path, into: dict[str, object]) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        holdfast.load(folder, into)
    return caught.value


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_of_another_shape_is_refused_before_anything_changes(tmp_path: Path, form: str) -> None:
    torch_dcp.save(plain_state(Training(0, steps=2), form), checkpoint_id=str(tmp_path))
    live = Training(7, steps=1, widths=(6, 8))
    before = live.contents()
    error = refused(tmp_path, {"model": live.model, "optim": live.optimizer})
    assert isinstance(error, IncompatibleError)
    assert live.contents() == before


def test_groups_of_other_sizes_are_refused_where_parameters_have_numbers(tmp_path: Path) -> None:
    old, live = Training(0, steps=1), Training(7, steps=0)
    torch_dcp.save(plain_state(old, "by number"), checkpoint_id=str(tmp_path))
    first, second, *rest = live.model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first, second]}, {"params": rest}])
    assert refused(tmp_path, {"model": live.model, "optim": optimizer}).code == "incompatible.optimizer"


def test_parameters_by_name_may_be_grouped_in_another_way(tmp_path: Path) -> None:
    old = Training(0, steps=1)
    for group in old.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.5
    torch_dcp.save(plain_state(old, "by name"), checkpoint_id=str(tmp_path))
    live = Training(7, steps=0)
    optimizer = torch.optim.AdamW(reversed(list(live.model.parameters())))
    optimizer.param_groups[0]["initial_lr"] = 0.0
    holdfast.load(tmp_path, {"model": live.model, "optim": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5
    for mine, theirs in zip(live.model.parameters(), old.model.parameters(), strict=True):
        assert bits(optimizer.state[mine]["exp_avg"]) == bits(old.optimizer.state[theirs]["exp_avg"])


@pytest.mark.parametrize("form", ["by name", "flat"])
def test_a_live_group_whose_parameters_had_different_rates_is_refused(tmp_path: Path, form: str) -> None:
    torch_dcp.save(plain_state(Training(0, steps=1), form), checkpoint_id=str(tmp_path))
    live = Training(7, steps=0)
    optimizer = torch.optim.AdamW(live.model.parameters())
    assert refused(tmp_path, {"model": live.model, "optim": optimizer}).code == "incompatible.groups"


@pytest.mark.parametrize("form", ["by name", "flat"])
def test_rates_that_are_tensors_and_differ_are_refused_in_one_live_group(tmp_path: Path, form: str) -> None:
    old, live = Training(0, steps=1), Training(7, steps=0)
    for group in old.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    torch_dcp.save(plain_state(old, form), checkpoint_id=str(tmp_path))
    optimizer = torch.optim.AdamW(live.model.parameters(), lr=torch.tensor(1.0))
    optimizer.param_groups[0]["initial_lr"] = 0.0
    assert isinstance(refused(tmp_path, {"model": live.model, "optim": optimizer}), IncompatibleError)


def test_two_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    state = {
        "one": one.state_dict(),
        "two": two.state_dict(),
        "optim": get_optimizer_state_dict(one, torch.optim.SGD(one.parameters())),
    }
    torch_dcp.save(state, checkpoint_id=str(tmp_path))
    error = refused(tmp_path, {"one": one, "two": two, "optim": optimizer})
    assert error.code == "incompatible.optimizer"
    assert "one/weight, two/weight" in error.message


@pytest.mark.parametrize("content", [{}, {"state": {}}, {"x": 1}, {"state": {}, "param_groups": []}, {"state.x": 1}])
def test_a_dict_that_is_no_optimizer_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    holdfast.save(tmp_path, {"model": model, "optim": content}, 0)
    live = torch.optim.SGD(model.parameters(), lr=0.1)
    assert isinstance(refused(tmp_path, {"model": model, "optim": live}), IncompatibleError)
