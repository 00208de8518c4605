"""A save of a `Checkpointer` into memory, up to the moment when training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch.distributed import ProcessGroup

from holdfast.checkpointer.background import Background
from holdfast.checkpointer.background_save import BackgroundSave, SavingJob, capture
from holdfast.checkpointer.memory_tier import MemoryTier
from holdfast.checkpointer.save_errors import skipped, skipped_in_memory
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
from holdfast.format.patterns import Globs
from holdfast.snapshot.capture import Snapshot
from holdfast.state.identity import sources_of
from holdfast.state.watched_positions import note_saved_positions


def save_into_memory(
    tier: MemoryTier,
    machine: SaveMachine,
    metrics: dict[str, float],
    state: Mapping[str, object],
    job: SavingJob,
    *,
    select: Globs | None,
    group: ProcessGroup | None,
    when_full: Literal["wait", "skip"],
    timeout_s: float,
    left_s: Callable[[], float],
    check: Callable[[str], None],
) -> None:
    """Save into memory, or skip the save. Returns when training may go on; a background thread does the rest.
    ``left_s`` is the time until the machine of this rank is taken away. The first rank calls `check`, in an exchange of
    all ranks, with the reason why a snapshot is not durable yet; if that raises, all ranks raise. Collective. Raises an
    error that `is_unusable` on all ranks if the memory of any node cannot be used."""
    deadline = Deadline(timeout_s)
    label = f"save of step {machine.step}{' to memory alone' if machine.memory_only else ''}"
    channel = default_channel(label, group, deadline=deadline, step=machine.step)
    if tier.is_put_off:
        tier.put_off(channel, deadline)
    machine.begin("node memory", is_first_rank=channel.rank == 0)
    stager = tier.stager
    note_saved_positions(state, is_first_rank=channel.rank == 0)
    sources = sources_of(state, is_first_rank=channel.rank == 0)
    hold = stager.guard.hold(timeout_s=deadline.remaining_s())
    try:
        taken = capture(state, select=select, stager=stager, channel=channel, known=job.known)
        free = tier.room(
            channel,
            deadline,
            is_as_before=isinstance(taken, Snapshot) and taken.is_as_before,
            when_full=when_full,
            may_begin_anew=bool(job.takeover),
            memory_only=machine.memory_only,
            left_s=left_s,
            check=check,
            tell=machine.wait_for_slot,
        )
        if not free.has_room:
            why_skipped = skipped_in_memory if machine.memory_only else skipped
            machine.skip(why_skipped(machine.step, free))
            return
        saving = BackgroundSave(
            job,
            machine,
            metrics,
            channel.in_background(),
            deadline,
            stager,
            hold,
            taken,
            sources,
            needed=free.needed,
            is_awaited=not free.as_before or tier.was_refused,
        )
        background = Background(saving)
        copier = tier.begin(background)
        if saving.is_awaited:
            background.wait()
            if background.error is not None:
                raise background.error
        if isinstance(taken, Snapshot):
            background.wait_for(taken.instant)
        hold.pass_on(copier)
    finally:
        hold.drop()  # no effect once it is passed on; before that, it makes the background give the save up
