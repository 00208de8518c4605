"""Weights of a checkpoint that the workers read by themselves: all of them read one and the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.errors import HoldfastError
from holdfast.inference import InferenceWorker, ModuleEngine, Publisher, StoredWeights
from tests.inference.test_failing_engines import Plain, ThreadedClient


class _Interrupted(InferenceWorker):
    """A worker that begins to read after something has happened."""

    def __init__(self, model: Plain, *, index: int, before: Callable[[], object] | None) -> None:
        super().__init__(ModuleEngine(model, model.load_weights), index=index)
        self._before = before

    def update(self, info: object) -> None:
        if self._before is not None:
            self._before()
        super().update(info)  # type: ignore[arg-type]


def published(weights: StoredWeights, between: Callable[[], object]) -> list[list[float]]:
    """The weights of two workers after they have read `weights`. The second one begins to read after `between`."""
    models = [Plain(), Plain()]
    workers = [_Interrupted(each, index=at, before=between if at else None) for at, each in enumerate(models)]
    Publisher(weights, [ThreadedClient([*workers])], [2], host="127.0.0.1", timeout_s=30.0).publish()
    return [each.weight.tolist() for each in models]


def save(run: Path, step: int) -> None:
    holdfast.save(run, {"model": {"weight": torch.full((4,), float(step))}}, step)


@pytest.mark.parametrize("name", ["run", "run@1.1"])
def test_workers_showed_two_versions_where_a_run_got_a_checkpoint_while_they_read(tmp_path: Path, name: str) -> None:
    run = f"{tmp_path / name}/"  # a slash, since the second name looks like a place in a run
    save(Path(run) if "@" not in name else Path(tmp_path / "run"), 1)
    if "@" in name:
        (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
        folder.rename(run)
        assert published(StoredWeights(run), lambda: None) == [[1.0] * 4] * 2
    else:
        assert published(StoredWeights(run), lambda: save(tmp_path / name, 2)) == [[1.0] * 4] * 2
        assert published(StoredWeights(run), lambda: None) == [[2.0] * 4] * 2


def test_workers_showed_two_versions_where_a_folder_was_replaced_while_they_read(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"weight": torch.full((4,), 1.0)}, folder / "model.safetensors")
    save_file({"weight": torch.full((4,), 2.0)}, tmp_path / "new")
    weights = StoredWeights(folder, under="")
    assert published(weights, lambda: None) == [[1.0] * 4] * 2
    with pytest.raises(HoldfastError, match="was replaced or changed") as raised:
        published(weights, lambda: os.replace(tmp_path / "new", folder / "model.safetensors"))
    assert raised.value.code == "corrupt.foreign"


def test_nothing_was_published_without_an_error_where_no_weights_lay_below_the_given_part(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(HoldfastError, match="holds no tensors below 'model'") as raised:
        Publisher(StoredWeights(tmp_path), [ThreadedClient([])], [1], host="127.0.0.1", timeout_s=30.0)
    assert raised.value.code == "incompatible.select"
