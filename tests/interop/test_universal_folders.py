"""DeepSpeed's universal folders are read without it: those of its own converter, and those of `holdfast.export`.

The fixtures were made by `ds_to_universal` of DeepSpeed 0.19.8 from folders that engines on three ranks wrote, each
with the values of the live engine beside it.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from holdfast.mapping import Rename
from tests.interop.deepspeed_model import TWO_GROUPS, TiedNet, grouped
from tests.interop.test_deepspeed import bits, expected, one
from tests.interop.test_deepspeed import unpacked as native
from tests.support.ranks import run_ranks

FIXTURES = Path(__file__).parent / "fixtures/deepspeed_universal"
CASES = ["zero1-two", "zero3-two"]
TRAINED = [name for group in TWO_GROUPS for name in group]


def unpacked(case: str, target: Path) -> Path:
    """The folder with ``latest_universal``."""
    with tarfile.open(FIXTURES / f"{case}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target / case


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_and_value_of_a_converted_folder_is_read(tmp_path: Path, case: str) -> None:
    folder = unpacked(case, tmp_path)
    view, wanted = holdfast.open(folder), expected(folder)
    wanted |= {f"optimizer/state/model/{name}/step": torch.tensor(4.0) for name in TRAINED}
    assert sorted(view.names()) == sorted([*wanted, "client_state/rng"])
    for name, tensor in wanted.items():
        assert bits(view[name][...]) == bits(tensor), name
    assert "a universal checkpoint of DeepSpeed" in repr(view)
    groups: Any = [view.value(f"optimizer/param_groups/{index}") for index in range(2)]
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.1, 0.01 / 5), (0.0, 0.02 / 5)]
    assert (view.value("engine/global_steps"), view.value("client_state/epoch")) == (4, 3)
    tag = holdfast.open(folder / "global_step4_universal")
    assert tag.names() == view.names()


def load_rows(folder: str) -> None:
    """Load onto rows of FSDP2, and compare what the ranks hold together."""
    model = TiedNet()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(grouped(model, TWO_GROUPS), lr=1.0)
    scheduler = LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * 2)
    live = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    holdfast.load(folder, live, select=[*live], cast="model/frozen.weight", timeout_s=40)
    wanted = expected(Path(folder))
    for name in TRAINED:
        parameter = model.get_parameter(name)
        for key, tensor in (
            ("", parameter),
            *((f"/{slot}", optimizer.state[parameter][slot]) for slot in ("exp_avg",)),
        ):
            assert isinstance(tensor, DTensor)
            place = f"optimizer/state/model/{name}{key}" if key else f"model/{name}"
            assert bits(tensor.full_tensor()) == bits(wanted[place]), name
        assert optimizer.state[parameter]["step"] == 4
    assert scheduler.last_epoch == 4


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_fsdp_go_on_from_a_converted_folder(tmp_path: Path, case: str) -> None:
    run_ranks(2, load_rows, str(unpacked(case, tmp_path)))


@pytest.mark.parametrize("case", ["zero1-on-3", "zero2-round-robin-on-3", "zero3-on-2"])
def test_an_export_is_read_back_as_the_folder_that_it_comes_from(tmp_path: Path, case: str) -> None:
    folder = native(case, tmp_path)
    parts = ["model", "optimizer", "lr_scheduler", "engine", "scaling", "client_state/nested", "client_state/rng"]
    holdfast.export(folder, tmp_path / "universal", "deepspeed-universal", select=parts)
    before, after = holdfast.open(folder), holdfast.open(tmp_path / "universal")
    names = [name for name in before.names() if not name.startswith("module/")]
    assert sorted(after.names()) == names
    for name in names:
        assert bits(after[name][...]) == bits(before[name][...]), name
    for path in ("optimizer/param_groups", "lr_scheduler", "client_state/nested"):
        assert (
            after.tree(path) == before.tree(path) if path.startswith("opt") else after.value(path) == before.value(path)
        )
    mine, theirs = dict(after.value("engine")), dict(before.value("engine"))  # type: ignore[call-overload]
    assert {key: mine[key] for key in ("global_steps", "global_samples", "ds_config", "ds_version")} == {
        key: theirs[key] for key in ("global_steps", "global_samples", "ds_config", "ds_version")
    }
    if "round-robin" in case:
        assert after.value("scaling/loss_scaler") == before.value("scaling/loss_scaler")


def test_a_converted_folder_is_imported_and_exported_again(tmp_path: Path) -> None:
    folder = unpacked("zero3-two", tmp_path)
    rules = [Rename(part, f"engine/{part}") for part in ("engine", "model", "optimizer", "lr_scheduler", "scaling")]
    chosen = ["engine", "client_state/epoch"]
    holdfast.export(folder, tmp_path / "again", "deepspeed-universal", mapping=rules, select=chosen)
    view, wanted = holdfast.open(tmp_path / "again"), expected(folder)
    assert {name for name in view.names() if not name.endswith("/step")} == wanted.keys()
    for name, tensor in wanted.items():
        assert bits(view[name][...]) == bits(tensor), name


# --- bad input ---


def refused(folder: Path) -> holdfast.HoldfastError:
    with pytest.raises((holdfast.CorruptError, holdfast.IncompatibleError)) as caught:
        holdfast.open(folder)
    assert caught.value.code in ("corrupt.foreign", "incompatible.foreign")
    return caught.value


@pytest.mark.parametrize(
    ("case", "file", "said"),
    [
        ("zero1-two", "zero/up.bias/fp32.pt", "zero/up.bias/fp32.pt is missing"),
        ("zero1-two", "zero/up.bias/exp_avg_sq.pt", "zero/up.bias/exp_avg_sq.pt is missing"),
        ("zero1-two", "zero/up.bias/step.pt", "zero/up.bias/step.pt is missing"),
        ("zero3-two", "zero/mid.0.weight/exp_avg_sq.pt", "zero/mid.0.weight/exp_avg_sq.pt is missing"),
        ("zero1-two", "zero/gain", "zero/gain/fp32.pt is missing"),
        ("zero3-two", "zero/optimizer_state.pt", "zero/optimizer_state.pt is missing"),
        (
            "zero3-two",
            "zero_pp_rank_1_mp_rank_00_model_states.pt",
            "zero_pp_rank_1_mp_rank_00_model_states.pt is missing",
        ),
    ],
)
def test_missing_files_are_named(tmp_path: Path, case: str, file: str, said: str) -> None:
    folder = unpacked(case, tmp_path)
    lost = folder / "global_step4_universal" / file
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    error = refused(folder)
    assert said in error.details, error.details


def test_one_moment_of_a_parameter_was_read_as_the_other_one(tmp_path: Path) -> None:
    folder = unpacked("zero1-two", tmp_path)
    parameter = folder / "global_step4_universal/zero/up.weight"
    shutil.copy(parameter / "exp_avg_sq.pt", parameter / "exp_avg.pt")
    with pytest.raises(holdfast.CorruptError, match=r"exp_avg\.pt was saved as exp_avg_sq\.pt, which is there, too"):
        holdfast.open(folder)


def test_the_last_rank_of_zero_3_is_missed_too(tmp_path: Path) -> None:
    folder = unpacked("zero3-two", tmp_path)
    (folder / "global_step4_universal/zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    assert "has 2 model files of 3 ranks" in str(refused(folder))


def test_files_that_are_something_else_are_refused_with_the_version_that_is_known(tmp_path: Path) -> None:
    folder = unpacked("zero1-two", tmp_path)
    tag = folder / "global_step4_universal"
    shutil.copy(tag / "zero/gain/exp_avg.pt", tag / "zero/up.bias/exp_avg.pt")
    assert "exp_avg" in str(refused(folder))
    assert "[1], and the model file has [8]" in str(refused(folder))
    torch.save({"param": "a text"}, tag / "zero/up.bias/exp_avg.pt")
    assert "tested with DeepSpeed 0.19.8" in str(refused(folder))
    (tag / "zero/up.bias/exp_avg.pt").write_bytes(b"cut off")
    assert "is no file of torch.save" in str(refused(folder))
    (folder / "latest_universal").write_text("global_step5")
    assert "names 'global_step5', where no universal folder is" in str(refused(folder))


def test_a_folder_of_model_parallel_ranks_has_whole_parameters_and_names_what_is_in_slices(tmp_path: Path) -> None:
    folder = unpacked("zero1-two", tmp_path)
    tag, wanted = folder / "global_step4_universal", expected(folder)
    with (
        zipfile.ZipFile(tag / "mp_rank_00_model_states.pt") as first,
        zipfile.ZipFile(tag / "mp_rank_01_model_states.pt", "w") as second,
    ):
        for entry in first.infolist():  # as torch.save writes it under the second name
            second.writestr(entry.filename.replace("mp_rank_00", "mp_rank_01"), first.read(entry))
    shutil.rmtree(tag / "zero/shift")
    view = holdfast.open(folder)
    for name in TRAINED:
        assert bits(view[f"model/{name}"][...]) == bits(wanted[f"model/{name}"])
    with pytest.raises(holdfast.IncompatibleError, match=r"holds shift in parts of model-parallel ranks"):
        view.value("model/shift")


def test_both_kinds_in_one_folder_are_read_by_latest_or_by_the_folder(tmp_path: Path) -> None:
    folder = native("zero1-on-3", tmp_path)
    shutil.copytree(unpacked("zero3-two", tmp_path / "other"), folder, dirs_exist_ok=True)
    assert "a DeepSpeed checkpoint" in repr(holdfast.open(folder))
    assert "universal" in repr(holdfast.open(folder / "global_step4_universal"))


def test_a_rank_file_that_a_native_folder_lacks_stops_an_export_before_it_begins(tmp_path: Path) -> None:
    folder = native("zero1-on-3", tmp_path)
    one(folder, "*rank_1_*").unlink()
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.export(folder, tmp_path / "universal", "deepspeed-universal")
    assert caught.value.details[0] == "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt is missing"
    assert not (tmp_path / "universal").exists()
