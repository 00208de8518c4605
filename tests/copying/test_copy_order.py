"""The order in which the records of a run are copied. The end of a copy may come behind each step."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.copying.copy_order import EpochStep, copy_order
from holdfast.format.records import Place


def places(*texts: str) -> list[Place]:
    return [Place.parse(text) for text in texts]


def told(steps: Sequence[EpochStep | Place]) -> list[str]:
    return [str(step) if isinstance(step, Place) else f"epoch {step.number}" for step in steps]


def test_each_epoch_comes_before_its_checkpoints_oldest_first() -> None:
    steps = copy_order(2, places("2.2", "1.2", "2.1", "1.1"), {1: None, 2: Place(1, 2)})
    assert told([*steps]) == ["epoch 1", "1.1", "1.2", "epoch 2", "2.1", "2.2"]


def test_an_epoch_comes_right_behind_its_origin_and_abandoned_checkpoints_come_last() -> None:
    steps = copy_order(3, places("1.1", "1.2", "1.3", "2.1", "3.1"), {1: None, 2: Place(1, 3), 3: Place(1, 1)})
    assert told([*steps]) == ["epoch 1", "1.1", "epoch 3", "3.1", "1.2", "1.3", "epoch 2", "2.1"]


def test_epochs_that_the_copy_has_are_not_created_again() -> None:
    steps = copy_order(3, places("1.2", "2.3", "2.4", "3.1"), {3: Place(2, 3)})
    assert told([*steps]) == ["2.3", "epoch 3", "3.1", "1.2", "2.4"]


def test_one_checkpoint_comes_with_the_epochs_of_its_lineage() -> None:
    steps = copy_order(3, places("3.7"), {1: None, 3: Place(1, 9)})
    assert told([*steps]) == ["epoch 1", "epoch 3", "3.7"]
