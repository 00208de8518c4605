"""Defects of formats: code that runs, bytes that nobody else can read, versions that are misjudged."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import holdfast
from holdfast import CorruptError, IncompatibleError
from holdfast.format import records
from tests.known_defects.saved import data_file


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def read_all(run: Path) -> None:
    """Read every file of a run: a load, and a look through the whole lineage, which takes the epochs' records."""
    holdfast.load(run, into={"weight": torch.zeros(4), "epoch": 0})
    holdfast.open(f"{run}@step=7")


def test_a_pickle_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    """A person who can write one file of a checkpoint runs code on every rank that loads it.

    Seen in: PyTorch DCP 2.13 (``.metadata``), pytorch/pytorch#189308; torchft, nvidia-resiliency-ext, DeepSpeed.
    """
    run, marker = tmp_path / "run", tmp_path / "executed"
    holdfast.save(run, {"weight": torch.ones(4), "epoch": 1}, 1)
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    assert len(files) == 6
    for name in files:
        copy = tmp_path / "copy"
        shutil.copytree(run, copy)
        (copy / name).write_bytes(pickle.dumps(Payload(marker)))
        with pytest.raises(CorruptError):
            read_all(copy)
        assert not marker.exists(), name
        shutil.rmtree(copy)


def test_saving_or_loading_needs_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain values go through pickle in both directions: slow, unsafe, and bound to the code of that day.

    Seen in: PyTorch DCP 2.13, torchsnapshot, Megatron-LM (``common.pt``), mlfoundations/open_clip#1150.
    """

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    for module, names in ((pickle, ("dumps", "loads", "load", "dump")), (torch, ("save", "load"))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    state: dict[str, object] = {"weight": torch.ones(2), "rng": torch.Generator(), "shape": torch.Size([1]), "n": 2**80}
    holdfast.save(tmp_path / "run", state, 1)
    assert holdfast.load(tmp_path / "run", into=state).step == 1


def test_one_unusual_tensor_makes_the_file_unreadable_for_others(tmp_path: Path) -> None:
    """A dtype that the stock reader does not know makes it refuse the whole file.

    Seen in: safetensors (additions of dtypes break old readers); PyTorch DCP 2.13 (``.distcp`` is read by nobody else).
    """
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3, dtype=torch.int8)}
    odd = {"c": torch.ones(2, dtype=torch.complex128), "d": torch.ones(3, dtype=torch.complex64), "e": torch.ones(0, 2)}
    holdfast.save(tmp_path / "run", {**weights, **odd, "epoch": 2}, 1)
    with safe_open(data_file(tmp_path / "run"), "pt") as file:
        read = {name.partition("@")[0]: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    for name, weight in weights.items():
        assert read[name].dtype == weight.dtype
        assert torch.equal(read[name].reshape(weight.shape), weight)


def test_versions_are_compared_as_text(tmp_path: Path) -> None:
    """ "2.10" counts as older than "2.6": what is newer is misread and what is sound is refused.

    Seen in: ByteCheckpoint 0.0.3 (``"2.1.0" <= version < "2.6.0"``).
    """
    run = tmp_path / "run"
    holdfast.save(run, {"weight": torch.ones(2)}, 1)
    marker = run / records.MARKER_KEY
    written = records.decode(marker.read_bytes(), records.Marker, path=str(marker))
    for features, writer in (((), "999.10.0"), (("delta-2",), "0.0.1")):
        changed = records.Marker(
            run_id=written.run_id,
            format=written.format,
            writer=writer,
            created=written.created,
            reader_features=features,
        )
        marker.write_bytes(records.encode(changed))
        if features:
            with pytest.raises(IncompatibleError, match="delta-2"):
                holdfast.open(run)
        else:
            assert holdfast.open(run).step == 1


def test_a_checkpoint_does_not_know_its_step(tmp_path: Path) -> None:
    """The step is the name of a folder, which tools parse; the metadata knows neither step nor number of ranks.

    Seen in: PyTorch DCP 2.13, torchtitan (a regular expression on folder names is the catalogue).
    """
    holdfast.save(tmp_path / "run", {"weight": torch.ones(2)}, 41)
    moved = tmp_path / "renamed-by-hand"
    Path(holdfast.open(tmp_path / "run").path).rename(moved)
    view = holdfast.open(moved)
    assert (view.step, view.place, view.in_history) == (41, "1.1", False)
    assert torch.equal(view["weight"][:], torch.ones(2))
