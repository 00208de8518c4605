"""Megatron-FSDP: weights of its folders are read bit by bit, and its live DTensors are refused. ``make test-megatron``
runs these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import StateError
from tests.support.ranks import run_ranks
from tests.trainers.megatron_fsdp_job import trained_model, whole_weights

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # Megatron warns of what is not installed, and torch of old functions
]


def save_weights(folder: str) -> tuple[dict[str, torch.Tensor], list[tuple[int, ...]]]:
    """Save by DCP; returns the weights, and the shapes of this rank's parts."""
    with trained_model() as model:
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/iter_0000002")
        return whole_weights(model), [tuple(each.to_local().shape) for each in model.state_dict().values()]


def test_weights_that_the_ranks_divide_unevenly_are_read_from_a_folder(tmp_path: Path) -> None:
    found = run_ranks(3, save_weights, str(tmp_path))
    assert any(0 in shape for _, shapes in found for shape in shapes)
    view = holdfast.open(tmp_path / "iter_0000002")
    assert view.names() == sorted(f"model/{name}" for name in found[0][0])
    assert all(torch.equal(view[f"model/{name}"][...], tensor) for name, tensor in found[0][0].items())


def save_live(folder: str) -> str:
    with trained_model() as model, pytest.raises(StateError) as caught:
        holdfast.save(f"{folder}/run", {"model": model.state_dict()}, 2)
    return f"{caught.value.code}: {caught.value}"


def test_a_live_tensor_that_is_not_cut_as_its_placements_say_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(2, save_live, str(tmp_path)):
        assert text.startswith("state.local_shape:")
        assert "by its placements (Shard(dim=0),) it should hold" in text
