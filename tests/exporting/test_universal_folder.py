"""Exports as DeepSpeed's universal folders: every file has the bits and the form that DeepSpeed's loaders take.

`tests/interop/test_deepspeed_universal.py` has DeepSpeed itself load such folders.
"""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from holdfast.errors import ConfigurationError, IncompatibleError
from holdfast.exporting import archive_entries, file_tasks, folder_writer
from holdfast.exporting.file_tasks import RECORD_NAME
from holdfast.exporting.file_writes import write_together
from holdfast.format.container import BLOCK_NBYTES
from tests.exporting.exported_runs import bits
from tests.interop.deepspeed_model import GROUPS, TiedNet, grouped
from tests.support.command_line import holdfast_command

FIXTURES = Path(__file__).parents[1] / "interop/fixtures"
TRAINED = [name for group in GROUPS for name in group]
SLOTS = ("exp_avg", "exp_avg_sq")


def trained_state() -> dict[str, Any]:
    """A plain training in fp32 after two steps, with values beside it."""
    torch.manual_seed(0)
    model = TiedNet()
    optimizer = torch.optim.AdamW(grouped(model), lr=1.0)
    scheduler = LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * len(GROUPS))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(6).reshape(2, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    beside = {"epoch": 3, "nested": {"seen": [1, 2.5, None], "pair": (True, b"x"), 7: "seven"}, "rng": torch.arange(5)}
    return {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, **beside}


def exported(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """The folder of the tag in an export of a state."""
    holdfast.save(folder / "run", state, 2)
    holdfast.export(folder / "run", folder / "universal", "deepspeed-universal", **options)
    return tagged(folder / "universal")


def tagged(universal: Path) -> Path:
    """The folder that ``latest_universal`` names."""
    return universal / (universal / "latest_universal").read_text()


def plain(path: Path) -> Any:
    """The content of a file of torch.save that holds nothing but data."""
    return torch.load(path, weights_only=True)


def test_every_tensor_of_a_plain_training_is_a_file_of_its_own(tmp_path: Path) -> None:
    state = trained_state()
    tag = exported(state, tmp_path)
    model, optimizer = state["model"], state["optimizer"]
    assert tag.name == "global_step2_universal"
    assert sorted(path.name for path in (tag / "zero").iterdir()) == sorted(
        [*TRAINED, "head.weight", "optimizer_state.pt"]
    )
    for name in (*TRAINED, "head.weight"):
        atom, parameter = tag / "zero" / name, model.get_parameter(name)
        slots = optimizer.state[parameter]
        assert sorted(path.name for path in atom.iterdir()) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
        for key, live in (("fp32", parameter), *((slot, slots[slot]) for slot in SLOTS)):
            found = plain(atom / f"{key}.pt")
            assert bits(found["param"]) == bits(live), (name, key)
            assert found["cat_dim"] == 0
        assert bits(plain(atom / "step.pt")) == bits(slots["step"])


def test_groups_scheduler_and_values_are_those_of_the_state(tmp_path: Path) -> None:
    state = trained_state()
    tag = exported(state, tmp_path)
    optim, model = plain(tag / "zero/optimizer_state.pt"), plain(tag / "mp_rank_00_model_states.pt")
    groups = state["optimizer"].state_dict()["param_groups"]
    assert optim["param_groups"] == [{k: v for k, v in group.items() if k != "params"} for group in groups]
    (alike,) = optim["optimizer_state_dict"]["param_groups"]
    assert alike["eps"] == 1e-8
    assert not alike.keys() & {"lr", "weight_decay", "betas", "initial_lr"}
    assert optim["optimizer_state_dict"]["state"][0]["step"] == 2
    assert "loss_scaler" not in optim
    assert model["lr_scheduler"] == state["lr_scheduler"].state_dict()
    assert (model["epoch"], model["nested"], model["rng"].tolist()) == (3, state["nested"], [0, 1, 2, 3, 4])
    assert (model["global_steps"], model["skipped_steps"], model["ds_version"]) == (2, 0, "0.19.8")
    kept = {"frozen.weight": state["model"].frozen.weight, **dict(state["model"].named_buffers())}
    assert {name: bits(tensor) for name, tensor in model["module"].items()} == {n: bits(t) for n, t in kept.items()}
    other = plain(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert (other["module"], other.keys()) == ({}, model.keys())


def test_a_model_in_half_precision_gives_single_precision(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    tag = exported({"model": model, "optimizer": optimizer}, tmp_path)
    for key, live in (("fp32", model.weight), ("exp_avg", optimizer.state[model.weight]["exp_avg"])):
        assert bits(plain(tag / f"zero/weight/{key}.pt")["param"]) == bits(live.float())


def unpacked(case: str, target: Path) -> Path:
    with tarfile.open(FIXTURES / f"{case}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target / case


@pytest.mark.parametrize("case", ["zero1-on-3", "zero2-round-robin-on-3", "zero3-on-2", "zero2-own-adam-on-2"])
def test_a_native_folder_becomes_a_universal_one(tmp_path: Path, case: str) -> None:
    folder = unpacked(case, tmp_path)
    chosen = ["model", "optimizer", "lr_scheduler", "engine", "scaling"]
    chosen += [f"client_state/{key}" for key in ("epoch", "name", "rng", "nested")]
    holdfast.export(folder, tmp_path / "universal", "deepspeed-universal", select=chosen)
    tag, engine = tagged(tmp_path / "universal"), torch.load(folder / "expected.pt", weights_only=True)
    assert tag.name == "global_step4_universal"
    model = plain(tag / "mp_rank_00_model_states.pt")
    for key, tensor in engine.items():
        name, kind = key.rsplit("/", 1)
        if kind == "kept":
            assert bits(model["module"][name]) == bits(tensor), key
        elif kind != "module":
            found = plain(tag / "zero" / name / f"{'fp32' if kind == 'master' else kind}.pt")
            assert bits(found["param"]) == bits(tensor), key
    assert plain(tag / "zero/gain/step.pt") == 4
    assert (model["epoch"], model["name"], model["nested"]["pair"]) == (3, "a/b", (True, b"x"))
    assert (model["global_steps"], model["dp_world_size"]) == (4, 1)
    assert model["ds_config"]["zero_optimization"]["stage"] == int(case[4])
    pickle = zipfile.ZipFile(tag / "zero/optimizer_state.pt").read("archive/data.pkl")
    assert (b"cdeepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n" in pickle) == ("round-robin" in case)


def test_an_object_of_the_client_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    with pytest.raises(IncompatibleError, match=r"client_state/args.*argparse\.Namespace"):
        holdfast.export(folder, tmp_path / "universal", "deepspeed-universal")
    assert not (tmp_path / "universal").exists()


def test_small_files_that_threads_write_side_by_side_read_each_stored_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (file_tasks, folder_writer):
        monkeypatch.setattr(module, "WINDOW_NBYTES", 4 * BLOCK_NBYTES)
    monkeypatch.setattr(file_tasks, "_RECORD_NBYTES", 4 * BLOCK_NBYTES)
    monkeypatch.setattr(file_tasks, "_TASK_NBYTES", 12 * BLOCK_NBYTES)
    model = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(400, 700) for number in range(20)})
    optimizer = torch.optim.AdamW(model.parameters())
    torch.stack([parameter.sum() for parameter in model.parameters()]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, 1)
    report = holdfast.export(tmp_path / "run", tmp_path / "universal", "deepspeed-universal")
    tag = tagged(tmp_path / "universal")
    for name, parameter in model.named_parameters():
        slots = {"fp32": parameter.detach(), **optimizer.state[parameter]}
        for slot in ("fp32", "exp_avg", "exp_avg_sq"):
            assert bits(plain(tag / f"zero/{name}/{slot}.pt")["param"]) == bits(slots[slot])
    needed = 3 * sum(parameter.nbytes for parameter in model.parameters())
    assert report.read_nbytes <= needed + BLOCK_NBYTES


def test_an_export_that_failed_goes_on_in_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, write, begun = trained_state(), write_together, list[object]()
    whole = exported(state, tmp_path)

    def fails(*arguments: Any, **options: Any) -> Any:
        begun.append(arguments)
        if len(begun) == 10:
            raise OSError("pulled")
        return write(*arguments, **options)

    monkeypatch.setattr(file_tasks, "_RECORD_NBYTES", 0)
    monkeypatch.setattr(file_tasks, "write_together", fails)
    target = tmp_path / "again"
    with pytest.raises(OSError, match="pulled"):
        holdfast.export(tmp_path / "run", target, "deepspeed-universal")
    assert (target / RECORD_NAME).exists()
    assert not (target / "latest_universal").exists()
    (target / whole.name / "zero/gain/.tmp-left").write_bytes(b"")
    report = holdfast.export(tmp_path / "run", target, "deepspeed-universal")
    assert len(report.kept) >= 9
    files = {path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    first = tmp_path / "universal"
    assert files == {path.relative_to(first): path.read_bytes() for path in first.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match="not empty"):
        holdfast.export(tmp_path / "run", target, "deepspeed-universal")


def test_archives_over_4_gib_have_sizes_of_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained_state()
    monkeypatch.setattr(archive_entries, "_MOST_NBYTES", 90)
    monkeypatch.setattr(archive_entries, "_MOST_ENTRIES", 3)
    tag = exported(state, tmp_path)
    for path in tag.rglob("*.pt"):
        if path.name != "step.pt":
            assert zipfile.ZipFile(path).testzip() is None
            assert plain(path) is not None
    weight = plain(tag / "zero/mid.0.weight/fp32.pt")["param"]
    assert bits(weight) == bits(state["model"].mid[0].weight)
    assert bits(plain(tag / "mp_rank_00_model_states.pt")["module"]["shift"]) == bits(state["model"].shift)
    view = holdfast.open(tag / "zero/mid.0.weight/fp32.pt")
    assert bits(view["param"][...]) == bits(weight)


# --- bad input ---


class Scalar(torch.optim.SGD):
    """An optimizer with a slot of another shape."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"norm": torch.ones(2)}


def simple(kind: type[torch.optim.AdamW | torch.optim.SGD] = torch.optim.AdamW) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_state_that_is_no_single_training_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    one, other = simple(), simple()
    uneven, unused = simple(), simple()
    uneven["optimizer"].state[uneven["model"].bias]["step"] += 1
    del unused["optimizer"].state[unused["model"].bias]
    cases: list[tuple[dict[str, Any], type[holdfast.HoldfastError], str]] = [
        ({"model": one["model"]}, ConfigurationError, "no optimizer"),
        ({"a": one, "b": other}, ConfigurationError, "several optimizers.*a/optimizer"),
        (simple(Scalar), IncompatibleError, "slot 'norm' in another shape"),
        (uneven, IncompatibleError, "different steps"),
        (unused, IncompatibleError, "has no optimizer state"),
        ({**one, "ds_version": 3}, IncompatibleError, "ds_version.*have for themselves"),
        (
            {"optimizer": one["optimizer"], "model": one["model"], "deep": {"ema": other["model"]}},
            IncompatibleError,
            "inside",
        ),
    ]
    for number, (refused, kind, said) in enumerate(cases):
        folder = tmp_path / str(number)
        with pytest.raises(kind, match=said):
            exported(refused, folder)
        assert not (folder / "universal").exists()
    select = ["a"]
    holdfast.export(tmp_path / "1/run", tmp_path / "a", "deepspeed-universal", select=select)
    with pytest.raises(IncompatibleError, match="is trained, but is not among"):
        holdfast.export(tmp_path / "1/run", tmp_path / "b", "deepspeed-universal", select="a/optimizer")
    with pytest.raises(ConfigurationError, match="has no configuration of a model"):
        holdfast.export(tmp_path / "1/run", tmp_path / "b", "deepspeed-universal", config=tmp_path)


def test_the_command_writes_such_a_folder(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", simple(), 7)
    done = holdfast_command("export", tmp_path / "run", tmp_path / "universal", "--to", "deepspeed-universal", "--json")
    assert done.json["to"] == "deepspeed-universal"
    assert (tmp_path / "universal/latest_universal").read_text() == "global_step7_universal"


@pytest.mark.parametrize("name", ["fp32", "..", "step2/../../pwn", "/tmp/pwn"])
def test_a_slot_whose_name_is_none_of_a_file_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    """A slot "fp32" would have overwritten the weight, in the middle of the export."""
    state = simple(torch.optim.SGD)
    optimizer = state["optimizer"]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter][name] = torch.ones_like(parameter)
    with pytest.raises(IncompatibleError, match="whose name is none of a file") as caught:
        exported(state, tmp_path)
    assert caught.value.code == "incompatible.export"
    assert not (tmp_path / "universal").exists()
