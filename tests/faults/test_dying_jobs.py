"""A job is restarted beside processes of the last one that are still dying, or stand still: its saves go on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from holdfast.errors import CorruptError
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from tests.faults.engine_job import WORLD_SIZE, Job, Restored, Spec, Truth, job
from tests.faults.engine_points import Deed
from tests.faults.test_engine_faults import after
from tests.support.nursery import until

TIMEOUT_S = 20.0
#: No save of the next job may take longer.
AT_ONCE_S = 8.0


@contextmanager
def standing_still(spec: Spec, *, stalled: Collection[int]) -> Iterator[Job]:
    """A job whose `stalled` ranks stand still while they copy step 2. Rank 1, which is one of them, is stopped; rank 0
    is dead. Step 1 is durable."""
    deeds = [Deed("trainer", "copy", rank=rank, stalls=True) for rank in stalled]
    with job(replace(spec, pauses={2: "durable"}, deeds=deeds), keeper=True) as training:
        training.until_told("paused", step=2)
        training.arm("trainer")
        training.log.let("pass-2")
        training.until_told("stalled", ranks=list(stalled))
        if 0 not in stalled:
            until(lambda: (0, SlotState.SEALED) in slots_of_step_2(spec))
        training.ranks[1].stop()
        training.log.kill("rank-0")
        yield training


def slots_of_step_2(spec: Spec) -> set[tuple[int, SlotState]]:
    """The ranks whose slots hold step 2, with the states of these slots."""
    found = set()
    with spec.folder(spec.node_dirs[0]) as folder:
        for name in slot_names(folder):
            with suppress(FileNotFoundError, CorruptError), Slot(folder, name) as slot:
                if slot.record.contents is not None and slot.record.contents.step == 2:
                    found.add((slot.rank, slot.state))
    return found


def next_job(spec: Spec) -> Spec:
    return replace(after(spec, stop=6), timeout_s=TIMEOUT_S, pauses={2: "staged"})


def assert_saves_go_on(training: Job, truth: Truth) -> None:
    """The next job, which has restored step 1 and pauses, saves all its steps, and no save waits in vain."""
    training.log.let("pass-2")
    training.ended_well()
    for rank in range(WORLD_SIZE):
        who = f"rank-{rank}"
        saved = [each["at"] for each in training.log.told(who, "saved")]
        assert len(saved) == 4
        begun = [training.log.told(who, "paused")[0]["at"], *saved]
        assert max(end - begin for begin, end in zip(begun, saved, strict=False)) < AT_ONCE_S
    assert truth.loaded(training.spec.run) == 5


@pytest.mark.parametrize("stalled", [{1}, {0, 1}], ids=["the other rank's part is sealed", "no part is sealed"])
def test_beside_a_stopped_rank_of_the_last_job_that_was_copying_every_save_waits_for_its_slot(
    spec: Spec, truth: Truth, stalled: set[int]
) -> None:
    with standing_still(spec, stalled=stalled), job(next_job(spec)) as following:
        assert following.restored(truth) == Restored(1, "node memory")
        following.until_told("paused", step=2)
        assert (1, SlotState.WRITING) in slots_of_step_2(spec)
        assert_saves_go_on(following, truth)


def test_the_part_of_a_checkpoint_whose_other_part_was_being_copied_at_the_restore_holds_up_all_saves(
    spec: Spec, truth: Truth
) -> None:
    with standing_still(spec, stalled={1}) as last, job(next_job(spec)) as following:
        assert following.restored(truth) == Restored(1, "node memory")
        following.until_told("paused", step=2)
        last.log.kill("rank-1")
        assert slots_of_step_2(spec) >= {(0, SlotState.SEALED)}
        assert_saves_go_on(following, truth)
