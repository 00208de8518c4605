"""Folders of Megatron are read directly. The fixtures were written by megatron-core 0.16.1, and that in ranges by
0.14.0 (`megatron_folders`), from weights that are known from their keys, on two tensor-parallel times two data-parallel
ranks."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import HoldfastError, IncompatibleError
from holdfast.mapping import FromMegatron
from tests.interop.changed_bytes import SOUND, changed_bytes, outcome
from tests.interop.megatron_state import SHAPES, named_weight, state_after_a_step
from tests.support.bound import bits
from tests.support.command_line import holdfast_command

FIXTURES = Path(__file__).parent / "fixtures" / "megatron"
ITERATION = "iter_0000001"
TRACKER = "latest_checkpointed_iteration.txt"
GROUP = "wd_mult=1.0,lr_mult=1.0,is_decoupled_lr=False"


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A checkpoint whose optimizer any layout loads."""
    return unpacked("full-on-4", tmp_path)


@pytest.fixture
def buckets(tmp_path: Path) -> Path:
    """A checkpoint whose optimizer is in the buckets of its layout."""
    return unpacked("buckets-on-4", tmp_path)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    view = holdfast.open(folder)
    return {name: view[name][...] for name in view.names() if "random" not in name}


@pytest.mark.parametrize("name", ["full-on-4", "ranges-on-4"])
def test_weights_and_the_state_of_the_optimizer_have_the_names_of_a_live_job(tmp_path: Path, name: str) -> None:
    found = tensors(unpacked(name, tmp_path))
    expected: dict[str, torch.Tensor] = {}
    for key, shape in SHAPES.items():
        weight = named_weight(key, shape).bfloat16()
        expected[f"model/{key}"] = weight
        expected[f"optimizer/state/model/{key}/fp32"] = weight.float()
        for slot, value in state_after_a_step(key, shape).items():
            expected[f"optimizer/state/model/{key}/{slot}"] = value
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_folder_is_no_optimizer_for_other_frameworks_because_it_names_no_groups(full: Path) -> None:
    with pytest.raises(IncompatibleError, match="names no group for each parameter") as caught:
        holdfast.load(full, into={"optimizer": {}}, mapping=[FromMegatron()])
    assert caught.value.code == "incompatible.mapping"


def test_values_of_the_job_are_read_without_megatron(full: Path) -> None:
    view = holdfast.open(full)
    tree: Any = view.tree()
    assert view.step == 1
    assert tree["optimizer"]["step"] == 1
    assert tree["optimizer"]["param_groups"][GROUP]["weight_decay"] == 0.1
    assert tree["scheduler"]["num_steps"] == 1
    assert tree["megatron"]["iteration"] == 1
    assert tree["megatron"]["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert tree["megatron"]["args"] == {
        "world_size": 4,
        "params_dtype": torch.bfloat16,
        "attention_backend": "megatron.core.transformer.enums.AttnBackend(5)",
    }
    assert "a Megatron checkpoint" in repr(view)


def test_each_rank_has_the_random_numbers_of_its_tensor_parallel_rank(full: Path) -> None:
    tree: Any = holdfast.open(full).tree()
    for rank, column in enumerate((0, 1, 0, 1)):
        found = tree["random"][rank]
        assert found["torch"] == torch.Generator().manual_seed(column).get_state().numpy().tobytes()
        words = random.Random(column).getstate()[1]
        assert found["python"]["words"] == np.asarray(words, "<u4").tobytes()
        expected: Any = np.random.RandomState(column).get_state()
        assert found["numpy"]["words"] == np.asarray(expected[1], "<u4").tobytes()
        tracked = tree["model_parallel_random"][rank]["model-parallel-rng"]
        assert tracked.tolist() == [column] * 16


def test_buckets_are_tensors_of_one_axis(buckets: Path) -> None:
    view = holdfast.open(buckets)
    found = [name for name in view.names() if name.startswith("optimizer/")]
    assert found
    assert all(name.startswith("optimizer/buckets/optimizer.distributed.dp_group_idx_") for name in found)
    assert {name.rpartition("/")[2] for name in found} == {"fp32", "exp_avg", "exp_avg_sq"}
    held = sum(view[name].shape[0] for name in found if name.endswith("/fp32"))
    assert held >= sum(torch.Size(shape).numel() for shape in SHAPES.values())
    tree: Any = view.tree()
    assert tree["optimizer"]["step"] == 1
    assert tree["optimizer"]["param_groups"][GROUP]["weight_decay"] == 0.1


def test_buffers_have_the_elements_of_all_buckets(tmp_path: Path) -> None:
    """They were refused as no tensors."""
    gathered = holdfast.open(unpacked("gathered-on-4", tmp_path))
    names = [name for name in gathered.names() if name.startswith("optimizer/")]
    assert len(names) == 6
    assert all(
        "bucket_idx" not in name and ".gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16)/" in name for name in names
    )
    for slot in ("fp32", "exp_avg", "exp_avg_sq"):
        held = torch.cat([gathered[name][...] for name in names if name.endswith(f"/{slot}")])
        for key, shape in SHAPES.items():
            slots = {"fp32": named_weight(key, shape).bfloat16().float(), **state_after_a_step(key, shape)}
            assert torch.isin(slots[slot], held).all(), (key, slot)
    assert gathered.value("optimizer/step") == 1


def test_an_optimizer_in_an_unknown_format_gave_parts_in_the_shape_of_the_file(full: Path) -> None:
    common = {"iteration": 1, "optimizer": {"param_state_sharding_type": "fully_sharded_bucket_space"}}
    torch.save(common, full / ITERATION / "common.pt")
    view = holdfast.open(full)
    assert all(name.startswith(("model/", "random", "model_parallel_random")) for name in view.names())
    with pytest.raises(IncompatibleError, match=r"'fully_sharded_bucket_space'; fully_reshardable, .* are read"):
        view.tree()
    with pytest.raises(IncompatibleError, match="fully_sharded_bucket_space"):
        holdfast.load(full, {"optimizer": {"step": 0}}, select="optimizer")


@pytest.mark.parametrize("name", ["full-on-4", "buckets-on-4", "gathered-on-4", "ranges-on-4"])
def test_an_import_has_all_of_a_folder(tmp_path: Path, name: str) -> None:
    folder = unpacked(name, tmp_path)
    assert holdfast_command("import", str(folder), str(tmp_path / "run"), "--step", "1").status in (0, None)
    before, after = tensors(folder), tensors(tmp_path / "run")
    assert before.keys() == after.keys()
    assert [each for each in before if bits(before[each]) != bits(after[each])] == []


def test_the_folder_of_an_iteration_is_read_by_its_path(full: Path) -> None:
    assert holdfast.open(full / ITERATION).names() == holdfast.open(full).names()


def test_the_tracker_names_a_release(full: Path) -> None:
    names = holdfast.open(full).names()
    (full / ITERATION).rename(full / "release")
    (full / TRACKER).write_text("release\n")
    assert holdfast.open(full).names() == names


# --- damaged, foreign and hostile folders -----------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def other_backend(folder: Path, **changes: object) -> None:
    config = folder / ITERATION / "metadata.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def as_legacy(folder: Path) -> None:
    shutil.rmtree(folder / ITERATION)
    (folder / ITERATION / "mp_rank_00_001").mkdir(parents=True)


def as_fsdp(folder: Path) -> None:
    for name in ("metadata.json", "common.pt"):
        (folder / ITERATION / name).unlink()


CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no tracker": (lambda at: (at / TRACKER).unlink(), "corrupt.foreign", f"one iteration: {ITERATION}"),
    "an empty tracker": (
        lambda at: (at / TRACKER).write_text(""),
        "corrupt.foreign",
        "is empty, so a save",
    ),
    "a tracker of text": (
        lambda at: (at / TRACKER).write_text("soon"),
        "corrupt.foreign",
        "no iteration, but 'soon'",
    ),
    "another iteration": (
        lambda at: (at / TRACKER).write_text("7"),
        "corrupt.foreign",
        f"names iter_0000007, which is not there.*{ITERATION}",
    ),
    "no metadata.json": (
        lambda at: (at / ITERATION / "metadata.json").unlink(),
        "corrupt.foreign",
        "its save did not finish",
    ),
    "half of metadata.json": (
        lambda at: (at / ITERATION / "metadata.json").write_text('{"sharded_b'),
        "corrupt.foreign",
        "its save did not finish",
    ),
    "zarr": (lambda at: other_backend(at, sharded_backend="zarr"), "incompatible.foreign", "in Megatron's format zarr"),
    "a new version": (
        lambda at: other_backend(at, sharded_backend_version=2),
        "incompatible.foreign",
        "version 2 of torch_dist",
    ),
    "legacy": (as_legacy, "incompatible.foreign", "legacy format .*mp_rank_00_001"),
    "Megatron-FSDP": (as_fsdp, "incompatible.foreign", r"fsdp_dtensor \(Megatron-FSDP\).*Name that folder itself"),
    "no common.pt": (lambda at: (at / ITERATION / "common.pt").unlink(), "corrupt.foreign", "common.pt is missing"),
    "no .metadata": (lambda at: (at / ITERATION / ".metadata").unlink(), "corrupt.foreign", ".metadata is missing"),
    "no data file": (lambda at: (at / ITERATION / "__1_0.distcp").unlink(), "corrupt.foreign", "lacks 1 file"),
    "a short data file": (lambda at: cut(at / ITERATION / "__0_1.distcp"), "corrupt.foreign", "is cut off"),
    "a short common.pt": (lambda at: cut(at / ITERATION / "common.pt"), "corrupt.foreign", "common.pt is malformed"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_is_not_whole_or_of_another_format_is_refused_by_name(full: Path, case: str) -> None:
    change, code, text = CASES[case]
    change(full)
    with pytest.raises(HoldfastError, match=f"(?s){text}") as caught:
        holdfast.open(full)
    assert caught.value.code == code


class Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("called",)


def test_a_metadata_that_calls_code_is_refused(full: Path) -> None:
    (full / ITERATION / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(HoldfastError, match=r"builtins\.print"):
        holdfast.open(full)


def test_a_value_that_calls_code_is_refused_by_the_name_of_what_it_calls(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"iteration": 1, "secret": Attack()}, full / ITERATION / "common.pt")
    view = holdfast.open(full)
    with pytest.raises(HoldfastError, match=r"__builtin__\.print"):
        view.tree()
    assert view.value("megatron/iteration") == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("step", [[1], {"a": 1}, float("inf"), float("nan"), "one"], ids=repr)
def test_a_count_of_steps_that_is_none_is_refused_where_it_is_loaded(full: Path, step: object) -> None:
    optimizer = {"optimizer": {"param_groups": [{"step": step, "lr": 1.0}]}}
    torch.save({"iteration": 1, "optimizer": optimizer}, full / ITERATION / "common.pt")
    view = holdfast.open(full)
    assert view.value("megatron/iteration") == 1
    with pytest.raises(HoldfastError, match=r"which is no count"):
        view.value("optimizer/step")


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_refused_or_read(full: Path, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from([".metadata", "common.pt", "metadata.json", "__0_1.distcp"]))
    with changed_bytes(full / ITERATION / part, data):
        assert outcome(full) in SOUND
