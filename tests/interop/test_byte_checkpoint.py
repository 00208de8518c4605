"""Folders of ByteCheckpoint are read directly. The fixtures were written by the real package, version 0.0.2
(`write_byte_checkpoint`), from tensors that are known from their names."""

from __future__ import annotations

import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.mapping import Rename
from tests.interop.byte_checkpoint_state import SHAPES, SLOTS, STEP, named_tensor
from tests.interop.changed_bytes import SOUND, changed_bytes, outcome
from tests.support.ranks import run_ranks

FIXTURES = Path(__file__).parent / "fixtures" / "byte_checkpoint"
CASES = {"fsdp2": 3, "fsdp": 2, "ddp": 2}


def unpacked(kind: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"byte-checkpoint-{kind}-on-{CASES[kind]}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint that three ranks wrote, of uneven and empty shards."""
    return unpacked("fsdp2", tmp_path / "saved")


@pytest.mark.parametrize("kind", CASES)
def test_every_element_is_read_under_its_name(tmp_path: Path, kind: str) -> None:
    view = holdfast.open(unpacked(kind, tmp_path / "saved"))
    above = "module." if kind == "ddp" else ""
    for name, shape in SHAPES.items():
        assert torch.equal(torch.as_tensor(view[f"model/{above}{name}"][...]), named_tensor(name, shape))
        for slot in SLOTS if kind == "fsdp2" else ():
            found = view[f"optimizer/state/{name}/{slot}"][...]
            assert torch.equal(torch.as_tensor(found), named_tensor(f"{name}/{slot}", shape))
    assert torch.equal(view.torch()[f"model/{above}seen"], named_tensor("seen", (4,)).bfloat16())
    assert "a folder of ByteCheckpoint" in repr(view)


def test_values_and_the_state_of_each_rank_are_read(sharded: Path) -> None:
    tree: Any = holdfast.open(sharded).tree()
    assert tree["optimizer"]["param_groups"][0]["lr"] == 0.25
    assert [tree["extra_state"][f"rank_{rank}"]["rank"] for rank in range(3)] == [0, 1, 2]
    assert tree["extra_state"]["rank_2"]["rng"].tolist() == [2, 2, 2]


def test_the_folder_of_a_step_and_that_of_the_model_alone_are_read_too(sharded: Path) -> None:
    step = sharded / f"global_step_{STEP}"
    assert holdfast.open(step).names() == holdfast.open(sharded).names()
    weight = holdfast.open(step / "model")["0.weight"][...]
    assert torch.equal(torch.as_tensor(weight), named_tensor("0.weight", SHAPES["0.weight"]))


def loaded_on_two_ranks(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    model = {
        name: distribute_tensor(torch.zeros(shape), mesh, [Shard(len(shape) - 1)]) for name, shape in SHAPES.items()
    }
    holdfast.load(folder, into={"model": model}, select=[f"model/{name}" for name in SHAPES])
    return all(torch.equal(held.full_tensor(), named_tensor(name, SHAPES[name])) for name, held in model.items())


def test_a_checkpoint_of_three_ranks_loads_on_two_along_another_axis(sharded: Path) -> None:
    assert run_ranks(2, loaded_on_two_ranks, str(sharded)) == [True, True]


def test_a_checkpoint_of_ddp_loads_into_a_module_by_a_mapping(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    model.register_buffer("seen", torch.zeros(4).bfloat16())
    into = {"model": model}
    folder = unpacked("ddp", tmp_path / "saved")
    holdfast.load(folder, into=into, mapping=[Rename("model/module.{x:**}", "model/{x}")], select="model")
    assert torch.equal(model.state_dict()["0.weight"], named_tensor("0.weight", (5, 3)))


# --- damaged and hostile folders --------------------------------------------------------------------------------------


def test_the_tracker_chooses_the_step_and_one_that_names_none_is_refused(sharded: Path) -> None:
    shutil.copytree(sharded / f"global_step_{STEP}", sharded / "global_step_9")
    (sharded / "global_step_9" / "model" / ".metadata").unlink()
    assert holdfast.open(sharded).names()
    (sharded / "latest_checkpointed_iteration.txt").write_text("11")
    with pytest.raises(holdfast.CorruptError, match="no such step"):
        holdfast.open(sharded)
    with pytest.raises(holdfast.CorruptError, match="did not finish"):
        holdfast.open(sharded / "global_step_9")


def test_a_missing_and_a_short_file_are_named(sharded: Path) -> None:
    file = sharded / f"global_step_{STEP}" / "optimizer" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(holdfast.CorruptError, match=r"__1_0.distcp is cut off"):
        holdfast.open(sharded)
    file.unlink()
    with pytest.raises(holdfast.CorruptError, match="lacks 1 file"):
        holdfast.open(sharded)


class Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("called",)


def test_the_state_of_one_rank_was_read_as_that_of_another(sharded: Path) -> None:
    files = sharded / "global_step_7/extra_state"
    shutil.copy(files / "extra_state_rank_2.pt", files / "extra_state_rank_0.pt")
    with pytest.raises(holdfast.CorruptError, match=r"rank_0\.pt was saved as extra_state_rank_2\.pt, which is there"):
        holdfast.open(sharded)


@pytest.mark.parametrize(("lost", "said"), [([0], "1 rank of 3"), ([2], "1 rank of 3"), ([0, 1], "2 ranks of 3")])
def test_the_lost_state_of_a_rank_was_left_out_without_a_word(sharded: Path, lost: list[int], said: str) -> None:
    for rank in lost:
        (sharded / f"global_step_7/extra_state/extra_state_rank_{rank}.pt").unlink()
    with pytest.raises(holdfast.CorruptError, match=f"lacks the state of {said}") as caught:
        holdfast.open(sharded)
    assert caught.value.details[0].endswith(f"extra_state_rank_{lost[0]}.pt is missing")


def test_a_folder_with_the_state_of_rank_0_alone_is_read(sharded: Path) -> None:
    for rank in (1, 2):
        (sharded / f"global_step_7/extra_state/extra_state_rank_{rank}.pt").unlink()
    assert holdfast.open(sharded).value("extra_state/rank_0/step") == 7


def test_a_pickle_that_calls_code_is_refused(sharded: Path, tmp_path: Path) -> None:
    for part in ("model/.metadata", "extra_state/extra_state_rank_0.pt"):
        folder = shutil.copytree(sharded, tmp_path / part.partition("/")[0])
        (folder / f"global_step_{STEP}" / part).write_bytes(pickle.dumps(Attack()))
        with pytest.raises(holdfast.HoldfastError) as caught:
            holdfast.open(folder).tree()
        assert caught.value.code in ("incompatible.foreign", "corrupt.foreign")


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_refused_or_read(sharded: Path, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(["model/.metadata", "optimizer/.metadata", "extra_state/extra_state_rank_1.pt"]))
    with changed_bytes(sharded / f"global_step_{STEP}" / part, data):
        assert outcome(sharded) in SOUND
