"""A save of a `Checkpointer` that goes to storage: training waits until the checkpoint is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed import ProcessGroup

from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.control.torch_store import global_rank, group_ranks
from holdfast.format.patterns import Globs
from holdfast.format.records import Place
from holdfast.run.session import Takeover
from holdfast.saving import RoomMaker, save_to_storage
from holdfast.snapshot.guard import Guard
from holdfast.store.base import Location


def save_through(
    machine: SaveMachine,
    guard: Guard,
    run: Location,
    state: Mapping[str, object],
    *,
    metrics: dict[str, float],
    select: str | Sequence[str] | None,
    group: ProcessGroup | None,
    takeover: Takeover,
    room: RoomMaker,
    timeout_s: float,
) -> None:
    """Save to storage, and return when the checkpoint is committed. Nobody else may change the state meanwhile
    (`guard`). Asks for `room` where space is missing. Raises as `holdfast.save`."""
    machine.begin("storage", is_first_rank=group_ranks(group)[0] == global_rank())
    hold = guard.hold(timeout_s=timeout_s)
    try:
        report = save_to_storage(
            run,
            state,
            machine.step,
            numbers=metrics,
            select=None if select is None else Globs(select),
            group=group,
            takeover=takeover,
            room=room,
            timeout_s=timeout_s,
        )
    finally:
        hold.drop()
    machine.put(Place.parse(report.place))
    machine.stage(report.written_nbytes)
    machine.commit(report.written_nbytes, seconds=report.seconds, referenced_nbytes=report.referenced_nbytes)
