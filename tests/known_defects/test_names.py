"""Defects of names and of the structure around tensors."""

from __future__ import annotations

import enum
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import holdfast
from holdfast import ConfigurationError, StateError
from tests.known_defects.saved import data_file


def test_keys_become_strings_and_empty_containers_vanish(tmp_path: Path) -> None:
    """A nested dict comes back with "0" for 0, without its empty dicts, and with lists for tuples.

    Seen in: PyTorch DCP 2.13.
    """
    values: dict[str, Any] = {
        "seen": {2: "a", 1: "b", "1": "c", None: 2, 0.5: 3, False: 4},
        "empty": {"dict": {}, "list": [], "tuple": (), "ordered": OrderedDict()},
        "pair": (1, [2, (3,)]),
        "ordered": OrderedDict(b=1, a=2),
    }
    holdfast.save(tmp_path / "run", values, 1)
    assert repr({name: holdfast.open(tmp_path / "run").value(name) for name in values}) == repr(values)


def test_names_joined_by_dots_collide(tmp_path: Path) -> None:
    """{"a": {"b": x}, "a.b": y} cannot be told apart once keys are joined by dots.

    Seen in: PyTorch DCP 2.13 (refuses the state).
    """
    numbers = iter(range(1, 100))

    def next_tensor() -> torch.Tensor:
        return torch.full((1,), float(next(numbers)))

    saved = {
        "a": {"b": next_tensor(), "b.c": next_tensor(), "b/c": next_tensor(), 1: next_tensor(), "1": next_tensor()},
        "a.b": next_tensor(),
        "a/b": next_tensor(),
        "a%2Fb": next_tensor(),
        "a@0:1": next_tensor(),
        "": next_tensor(),
        "\u00e9": {"..": next_tensor()},
    }
    into: dict[str, Any] = {
        name: {key: torch.zeros(1) for key in value} if isinstance(value, dict) else torch.zeros(1)
        for name, value in saved.items()
    }
    holdfast.save(tmp_path / "run", saved, 1)
    holdfast.load(tmp_path / "run", into=into)
    assert repr(into) == repr(saved)
    assert len(holdfast.open(tmp_path / "run").names()) == 11


def test_wrappers_change_the_names(tmp_path: Path) -> None:
    """Names carry ``_orig_mod`` or ``_checkpoint_wrapped_module``, so that the unwrapped model does not load.

    Seen in: torchtitan#2622; PyTorch, pytorch/pytorch#117399 and #119980.
    """
    saved, fresh = (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) for _ in range(2))
    wrapped = nn.Sequential(checkpoint_wrapper(saved[0]), cast("nn.Module", torch.compile(saved[1], backend="eager")))
    holdfast.save(tmp_path / "run", {"model": torch.compile(wrapped, backend="eager")}, 1)
    holdfast.load(tmp_path / "run", into={"model": fresh})
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), fresh.parameters(), strict=True))


def test_attributes_that_look_like_wrappers_lose_their_names(tmp_path: Path) -> None:
    """Wrapper prefixes are cut out of names as text, also where a user's own attribute is called so.

    Seen in: PyTorch DCP 2.13 (`state_dict.py` replaces plain strings, unchecked).
    """
    names = ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]
    saved, fresh = (nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names}) for _ in range(2))
    holdfast.save(tmp_path / "run", {"model": saved}, 1)
    assert holdfast.open(tmp_path / "run").names() == sorted(f"model/{name}.weight" for name in names)
    holdfast.load(tmp_path / "run", into={"model": fresh})
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), fresh.parameters(), strict=True))


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(256, 16), "head": nn.Linear(16, 256, bias=False)})
    model["head"].register_parameter("weight", model["embed"].get_parameter("weight"))
    return model


def test_tied_weights_are_stored_twice_and_come_back_untied(tmp_path: Path) -> None:
    """A weight under two names is written once for each, and is two tensors after the load.

    Seen in: PyTorch DCP 2.13.
    """
    saved, fresh = tied(), tied()
    holdfast.save(tmp_path / "run", {"model": saved}, 1)
    assert data_file(tmp_path / "run").stat().st_size < 1.5 * 256 * 16 * 4 + 8192
    holdfast.load(tmp_path / "run", into={"model": fresh})
    assert fresh["head"].get_parameter("weight") is fresh["embed"].get_parameter("weight")
    assert torch.equal(fresh["head"].get_parameter("weight"), saved["head"].get_parameter("weight"))
    view = holdfast.open(tmp_path / "run")
    assert view["model/head.weight"].name == "model/embed.weight"


def test_a_url_becomes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with a scheme that is not known makes a local folder of that name, and the job believes it is saved.

    Seen in: ByteCheckpoint 0.0.3 (``hdfs://``).
    """
    monkeypatch.chdir(tmp_path)
    for call in (lambda: holdfast.save("hdfs://a/run", {}, 1), lambda: holdfast.load("nfs://a/run", into={})):
        with pytest.raises(ConfigurationError, match="URL"):
            call()
    assert list(tmp_path.iterdir()) == []


class Stage(enum.Enum):
    """A type of the user's own."""

    SECOND = 2


class Schedule:
    """An object that says nothing about its state."""


@pytest.mark.parametrize(
    "held", [Stage.SECOND, Schedule(), lambda: 0, {1, 2}], ids=["enum", "object", "function", "set"]
)
def test_what_was_saved_cannot_be_loaded_again(tmp_path: Path, held: object) -> None:
    """A value is pickled without a question and refused at load, when nothing can be done about it any more.

    Seen in: DeepSpeed, deepspeedai/DeepSpeed#8500 (its own enum), #6094; axolotl#2634.
    """
    with pytest.raises(StateError, match="progress/stage"):
        holdfast.save(tmp_path / "run", {"progress": {"stage": held}, "weight": torch.ones(1)}, 1)
    assert not (tmp_path / "run").exists()
