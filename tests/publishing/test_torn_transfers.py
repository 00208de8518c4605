"""A state that a transfer or a load filled in part before it failed is not saved until something fills it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import ConfigurationError, CorruptError, HoldfastError
from holdfast.publishing import live
from holdfast.store.base import Bytes

State = dict[str, Any]


def state(fill: float) -> State:
    model = nn.Linear(1024, 1024)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(fill)
    return {"model": model, "loose": torch.full((5,), fill)}


def fail_to_transfer(source: State, target: State, **options: Any) -> BaseException:
    read_at = live.LiveFile.read_at

    def fail(file: live.LiveFile, offset: int, out: Bytes) -> None:
        if len(out) > 1 << 20:
            raise OSError(5, "Input/output error")
        read_at(file, offset, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.LiveFile, "read_at", fail)
        with pytest.raises(HoldfastError) as caught:
            holdfast.transfer(source, target, **options)
    return caught.value


def refused(path: Path, saved: State, step: int) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.partly_filled.*a load or a transfer failed half way"):
        holdfast.save(path, saved, step)


@pytest.mark.parametrize("lifted_by", ["transfer", "load"])
def test_what_a_transfer_left_partly_filled_is_not_saved_before_something_fills_it(
    lifted_by: str, tmp_path: Path
) -> None:
    source, target = state(1), state(2)
    holdfast.save(tmp_path / "source", source, 1)
    holdfast.save(tmp_path / "run", target, 1)
    error = fail_to_transfer(source, target)
    assert error.__notes__ == ["The live state is partly filled: transfer or load it again before using it."]
    for saved in (target, {"student": target["model"]}, {"loose": target["loose"]}):
        refused(tmp_path / "other", saved, 2)
    refused(tmp_path / "run", target, 2)
    holdfast.save(tmp_path / "source", source, 2)  # the source has not changed
    if lifted_by == "transfer":
        holdfast.transfer(source, target)
    else:
        holdfast.load(tmp_path / "source", target)
    holdfast.save(tmp_path / "run", target, 2)
    assert holdfast.open(tmp_path / "run").step == 2


def test_a_transfer_of_a_part_does_not_lift_the_refusal_of_the_rest(tmp_path: Path) -> None:
    source, target = state(1), state(2)
    fail_to_transfer(source, target)
    holdfast.transfer(source, target, select="model/weight")
    refused(tmp_path / "run", target, 1)
    holdfast.transfer(source, target, select=["model/bias", "loose"])
    holdfast.save(tmp_path / "run", target, 1)
    assert holdfast.open(tmp_path / "run").step == 1


def test_a_transfer_that_mends_lets_the_job_go_on_in_its_run(tmp_path: Path) -> None:
    source, target = state(1), state(2)
    holdfast.save(tmp_path / "run", target, 1)
    holdfast.load(tmp_path / "run", target)
    holdfast.transfer(source, target)
    holdfast.save(tmp_path / "run", target, 2)
    fail_to_transfer(source, target)
    holdfast.transfer(source, target)
    holdfast.save(tmp_path / "run", target, 3)
    assert holdfast.open(tmp_path / "run").step == 3


def test_a_transfer_that_fails_before_it_fills_anything_hinders_no_save(tmp_path: Path) -> None:
    target = state(2)
    with pytest.raises(holdfast.IncompatibleError):
        holdfast.transfer(state(1), {**target, "more": torch.ones(1)})
    holdfast.save(tmp_path / "run", target, 1)


def test_a_load_of_a_part_does_not_lift_the_refusal_of_what_a_failed_load_filled(tmp_path: Path) -> None:
    loaded = state(1)
    holdfast.save(tmp_path / "sound", loaded, 1)
    holdfast.save(tmp_path / "damaged", loaded, 1)
    (file,) = tmp_path.glob("damaged/checkpoints/*/data-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        holdfast.load(tmp_path / "damaged", loaded)
    holdfast.load(tmp_path / "sound", loaded, select="model/bias")
    refused(tmp_path / "run", loaded, 1)
    holdfast.load(tmp_path / "sound", loaded)
    holdfast.save(tmp_path / "run", loaded, 1)
