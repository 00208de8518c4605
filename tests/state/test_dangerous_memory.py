"""A load refuses memory that would crash the process on access; it names the tensor and changes nothing before."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, StateError
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def mapped(folder: Path, access: int) -> torch.Tensor:
    """Four numbers in a file that is mapped."""
    (folder / "file").write_bytes(torch.arange(4.0).numpy().tobytes())
    with open(folder / "file", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_target_in_a_file_that_is_mapped_for_reading_only_is_refused(tmp_path: Path) -> None:
    start_new_job()
    holdfast.save(tmp_path / "run", {"first": torch.ones(3), "numbers": torch.zeros(4)}, 1)
    state = {"first": torch.zeros(3), "numbers": mapped(tmp_path, mmap.ACCESS_READ)}
    for verb in (
        lambda: holdfast.load(tmp_path / "run", state),
        lambda: holdfast.transfer({name: torch.ones_like(tensor) for name, tensor in state.items()}, state),
    ):
        with pytest.raises(StateError, match="mapped read-only") as raised:
            verb()
        assert (raised.value.code, raised.value.tensor) == ("state.read_only", "numbers")
        assert state["first"].eq(0).all()


def test_files_that_are_mapped_for_writing_are_saved_and_filled(tmp_path: Path) -> None:
    start_new_job()
    state = {"numbers": mapped(tmp_path, mmap.ACCESS_WRITE)}
    holdfast.save(tmp_path / "run", state, 1)
    state["numbers"].zero_()
    holdfast.load(tmp_path / "run", state)
    assert state["numbers"].equal(torch.arange(4.0))


@pytest.mark.parametrize("tensor", [torch.zeros(3, 4), torch.zeros(4, 3).t()])
def test_a_target_whose_storage_was_made_smaller_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    start_new_job()
    holdfast.save(tmp_path / "run", {"w": torch.ones(3, 4)}, 1)
    tensor = tensor.clone(memory_format=torch.preserve_format)
    tensor.untyped_storage().resize_(tensor.nbytes - 4)
    with pytest.raises(StateError, match="beyond the end") as raised:
        holdfast.load(tmp_path / "run", {"w": tensor})
    assert (raised.value.code, raised.value.tensor) == ("state.unsupported_tensor", "w")


def grow(run: str, num_rows: int) -> list[torch.Tensor]:
    """Tensors after each of our verbs, which somebody has made larger then."""
    state, target, moved = ({"rows": torch.full((num_rows, 3), float(fill))} for fill in range(3))
    holdfast.save(run, state, 1)
    holdfast.load(run, target)
    holdfast.transfer(state, moved)
    with Checkpointer(run, target, memory=None) as checkpointer:
        checkpointer.save(2)
        checkpointer.restore()
    return [each["rows"].resize_(2 * num_rows, 3)[:num_rows] for each in (state, target, moved)]


@pytest.mark.parametrize("num_rows", [20, 200_000])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_buffer_that_was_saved_or_filled_can_still_grow(tmp_path: Path, world_size: int, num_rows: int) -> None:
    for tensors in run_ranks(world_size, grow, str(tmp_path / "run"), num_rows):
        assert all(tensor.shape == (num_rows, 3) and tensor.eq(0).all() for tensor in tensors)
