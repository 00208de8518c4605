"""Loads where live and stored values differ in kind, in order, or under two names: a load refuses the values, or
restores them exactly."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import holdfast
from holdfast import IncompatibleError, PerRank
from holdfast.mapping import Rename
from tests.support.bound import bits


class Progress(NamedTuple):
    """The named tuple in the checkpoint."""

    epoch: int
    seen: int


class Renamed(NamedTuple):
    """The same fields under another name."""

    epoch: int
    seen: int


def code_of(path: Path, into: dict[str, Any], **options: Any) -> str:
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(path, into, **options)
    return f"{caught.value.code}: {caught.value}"


@pytest.mark.parametrize("strict", [True, False])
def test_a_scaler_that_is_off_here_does_not_lose_the_stored_state_without_a_word(strict: bool, tmp_path: Path) -> None:
    on, off = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    holdfast.save(tmp_path / "run", {"w": torch.ones(2), "scaler": on}, 1)
    into: dict[str, Any] = {"w": torch.zeros(2), "scaler": off}
    text = code_of(tmp_path / "run", into, strict=strict)
    assert text.startswith("incompatible.no_state")
    assert "'scaler': a GradScaler that is off here" in text
    assert not into["w"].any()
    holdfast.load(tmp_path / "run", into, select="!scaler")


def test_a_state_dict_in_place_of_the_optimizer_that_was_saved_is_told_to_give_the_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "run", {"model": model, "opt": optimizer}, 1)
    text = code_of(tmp_path / "run", {"model": model.state_dict(), "opt": optimizer.state_dict()})
    assert "give the optimizer itself in place of its state_dict(), as {'opt': optimizer}" in text
    holdfast.load(tmp_path / "run", {"model": model, "opt": optimizer})


def test_a_live_deque_or_set_does_not_become_the_list_that_was_stored(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.ones(2), "kept": [1, 2]}, 1)
    for live, kind in ((deque([0], maxlen=5), "deque"), ({0}, "set"), (Path("x"), "Path")):
        text = code_of(tmp_path / "run", {"w": torch.zeros(2), "kept": live})
        assert text.startswith("incompatible.kind")
        assert kind in text
        assert "here, a stored list in the checkpoint" in text


class Cursor:
    def __init__(self, at: int) -> None:
        self.at = at


def test_a_value_of_a_registered_type_does_not_become_a_plain_one(tmp_path: Path) -> None:
    holdfast.register_value(Cursor, lambda cursor: cursor.at, Cursor, name="test_kinds.Cursor")
    holdfast.save(tmp_path / "plain", {"w": torch.ones(2), "cursor": 3}, 1)
    holdfast.save(tmp_path / "run", {"w": torch.ones(2), "cursor": Cursor(4)}, 1)
    into: dict[str, Any] = {"w": torch.zeros(2), "cursor": Cursor(0)}
    assert code_of(tmp_path / "plain", into).startswith("incompatible.kind")
    holdfast.load(tmp_path / "run", into)
    assert into["cursor"].at == 4


def test_an_ordered_dict_gets_the_order_that_was_stored(tmp_path: Path) -> None:
    stored = OrderedDict([("b", 1), ("a", torch.ones(2)), (3, "x")])
    holdfast.save(tmp_path / "run", {"queue": stored}, 1)
    live = OrderedDict([(3, ""), ("a", torch.zeros(2)), ("b", 0)])
    tensor = live["a"]
    into = {"queue": live}
    holdfast.load(tmp_path / "run", into)
    assert list(live) == ["b", "a", 3]
    assert into["queue"] is live
    assert live["a"] is tensor


def test_entries_that_an_ordered_dict_has_only_here_stay_behind_the_stored_ones(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"q": OrderedDict(b=1, a=2), "w": torch.ones(1)}, 1)
    live = OrderedDict(y=0, a=0, x=0, b=0)
    holdfast.load(tmp_path / "run", {"q": live, "w": torch.zeros(1)}, strict=False)
    assert list(live.items()) == [("b", 1), ("a", 2), ("y", 0), ("x", 0)]


def test_a_named_tuple_of_another_class_is_refused_and_taken_by_a_load_that_is_not_strict(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.ones(2), "progress": Progress(1, 2)}, 1)
    into: dict[str, Any] = {"w": torch.zeros(2), "progress": Renamed(0, 0)}
    text = code_of(tmp_path / "run", into)
    assert text.startswith("incompatible.kind")
    assert "a NamedTuple Renamed here, a NamedTuple Progress in the checkpoint" in text
    holdfast.load(tmp_path / "run", into, strict=False)
    assert into["progress"] == Renamed(1, 2)
    assert type(into["progress"]) is Renamed


def test_a_counter_does_not_fill_a_dict(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.ones(2), "seen": Counter(a=3)}, 1)
    assert code_of(tmp_path / "run", {"w": torch.zeros(2), "seen": {"a": 1}}).startswith("incompatible.kind")


def scheduler(step: int) -> StepLR:
    made = StepLR(SGD([nn.Parameter(torch.ones(1))], lr=1.0), 2)
    made.last_epoch = step
    return made


def optimizer(step: int) -> AdamW:
    weight = WEIGHTS["w"]
    made = AdamW([weight], lr=1.0)
    weight.grad = torch.full((2,), float(step))
    made.step()
    return made


WEIGHTS = nn.ParameterDict({"w": nn.Parameter(torch.ones(2))})
MAKERS: dict[str, Callable[[int], object]] = {
    "list": lambda number: [number],
    "list with a tensor": lambda number: [torch.zeros(1), number],
    "dict": lambda number: {"at": {"depth": number}},
    "counter": lambda number: Counter(a=number),
    "scheduler": scheduler,
    "generator": lambda number: torch.Generator().manual_seed(number),
    "PerRank": PerRank,
    "optimizer": optimizer,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_one_live_object_under_two_names_is_refused_where_the_stored_values_differ(kind: str, tmp_path: Path) -> None:
    make = MAKERS[kind]
    holdfast.save(tmp_path / "run", {"model": WEIGHTS, "a": make(1), "b": make(2), "w": torch.ones(3)}, 1)
    live = make(3)
    into: dict[str, Any] = {"model": WEIGHTS, "a": live, "b": live, "w": torch.zeros(3)}
    text = code_of(tmp_path / "run", into)
    assert text.startswith("incompatible.tied")
    assert "b" in text
    # An optimizer's tensors are compared when they have been read.
    assert kind == "optimizer" or not into["w"].any()
    with_one = holdfast.load(tmp_path / "run", into, select=["model", "a", "w"])
    assert not with_one.missing


@pytest.mark.parametrize("kind", MAKERS)
def test_one_object_under_two_names_comes_back(kind: str, tmp_path: Path) -> None:
    saved, live = (MAKERS[kind](number) for number in (1, 2))
    holdfast.save(tmp_path / "run", {"model": WEIGHTS, "a": saved, "b": saved, "w": torch.ones(3)}, 1)
    into: dict[str, Any] = {"model": WEIGHTS, "a": live, "b": live, "w": torch.zeros(3)}
    holdfast.load(tmp_path / "run", into)
    assert into["a"] is into["b"]
    assert bits(into["w"]) == bits(torch.ones(3))


def test_equal_dicts_of_another_order_fill_one_dict(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"a": {"x": 1, "y": 2}, "c": {"y": 2, "x": 1}, "w": torch.ones(1)}, 1)
    live = {"x": 0, "y": 0}
    into = {"a": live, "b": live, "w": torch.zeros(1)}
    holdfast.load(tmp_path / "run", into, mapping=[Rename("c", "b")])
    assert live == {"x": 1, "y": 2}
