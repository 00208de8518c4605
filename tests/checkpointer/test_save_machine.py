"""The states of a save: listeners hear of each state once, in order, and of one end, whatever interrupts it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpointer.events import (
    SaveBegun,
    SaveCommitted,
    SaveEvent,
    SaveFailed,
    SavePlaced,
    SaveSealed,
    SaveSkipped,
    SaveStaged,
    SaveUnwatched,
)
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.save_log import SaveLog
from holdfast.checkpointer.save_machine import SaveMachine, SaveState
from holdfast.errors import StorageError
from holdfast.format.records import Place

_ERROR = StorageError("the disk is full.", code="storage.full", action="Make room.")
_ENDS = (SaveCommitted, SaveSkipped, SaveFailed, SaveUnwatched)

Note = Callable[[SaveMachine], None]
NOTES: dict[str, Note] = {
    "stage": lambda machine: machine.stage(8),
    "seal": lambda machine: machine.seal(),
    "delay": lambda machine: machine.delay("no answer"),
    "commit": lambda machine: machine.commit(8),
    "skip": lambda machine: machine.skip(_ERROR),
    "leave": lambda machine: machine.leave(_ERROR),
    "fail": lambda machine: machine.fail(_ERROR),
}


def test_a_save_goes_from_its_call_to_its_commit() -> None:
    heard: list[SaveEvent] = []
    machine = SaveMachine(3, heard.append)
    machine.begin("node memory", is_first_rank=True)
    machine.put(Place(1, 2))
    machine.stage(10)
    machine.seal()
    machine.commit(20)
    assert heard == [
        SaveBegun(3, "node memory", is_first_rank=True),
        SavePlaced(3, Place(1, 2)),
        SaveStaged(3, 10),
        SaveSealed(3),
        SaveCommitted(3, 20),
    ]
    assert machine.is_over


@given(st.lists(st.sampled_from(sorted(NOTES)), max_size=12))
def test_whatever_is_noted_listeners_hear_of_each_state_once_and_of_the_first_end_alone(notes: list[str]) -> None:
    heard: list[SaveEvent] = []
    handle = Handle(3)
    machine = SaveMachine(3, handle.hear, heard.append)
    for note in notes:
        NOTES[note](machine)
        assert machine.is_over == any(isinstance(event, _ENDS) for event in heard) == handle.durable.is_over
    kinds = [type(event) for event in heard]
    assert len(set(kinds)) == len(kinds)
    assert sum(kind in _ENDS for kind in kinds) <= 1
    if machine.is_over:
        assert kinds[-1] in _ENDS
        assert handle.staged.is_over
    if SaveCommitted in kinds:
        assert handle.staged.is_done
        assert handle.durable.is_done
        assert not handle.trouble
    elif machine.is_over:
        assert handle.durable.error is _ERROR
        assert handle.staged.error is (None if SaveStaged in kinds else _ERROR)


def test_an_exception_between_listeners_leaves_none_without_the_end() -> None:
    interrupts = [KeyboardInterrupt()]

    def interrupted(event: SaveEvent) -> None:
        if isinstance(event, SaveCommitted) and interrupts:
            raise interrupts.pop()

    handle = Handle(3)
    machine = SaveMachine(3, interrupted, handle.hear)
    machine.stage(1)
    with pytest.raises(KeyboardInterrupt):
        machine.commit(1)
    assert machine.state is SaveState.STAGED
    machine.commit(1)  # the thread that watches it looks again
    assert handle.durable.is_done


def logged(caplog: pytest.LogCaptureFixture, *notes: Note) -> list[str]:
    caplog.clear()
    handle = Handle(3)
    machine = SaveMachine(3, handle.hear, SaveLog(handle).hear)
    with caplog.at_level(logging.INFO):
        for note in notes:
            note(machine)
    return [f"{record.levelname}: {record.getMessage().partition(':')[0]}" for record in caplog.records]


def test_the_log_says_once_what_became_of_a_save(caplog: pytest.LogCaptureFixture) -> None:
    delay, commit, fail = NOTES["delay"], NOTES["commit"], NOTES["fail"]

    def begin(machine: SaveMachine) -> None:
        machine.begin("node memory", is_first_rank=True)
        machine.put(Place(1, 2))

    def begin_elsewhere(machine: SaveMachine) -> None:
        machine.begin("node memory", is_first_rank=False)

    stage = NOTES["stage"]
    late = "WARNING: step 3 is not durable yet; the keeper tries again"
    assert logged(caplog, begin, stage, commit) == ["INFO: saved step 3 at 1.2"]
    assert logged(caplog, begin_elsewhere, stage, commit) == []
    other: Note = lambda machine: machine.delay("another reason")  # noqa: E731
    assert logged(caplog, begin_elsewhere, stage, delay, delay, other, delay, commit) == [late, late]
    assert logged(caplog, begin, fail, fail) == ["ERROR: step 3 is not saved"]
    assert logged(caplog, begin, stage, fail) == ["ERROR: step 3 is not durable"]
    assert logged(caplog, begin, lambda machine: machine.fail(_ERROR, is_raised=True)) == []
    assert logged(caplog, begin, stage, NOTES["leave"]) == []
    assert logged(caplog, begin, NOTES["skip"]) == ["WARNING: [storage.full] the disk is full. Make room."]
