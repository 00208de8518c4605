"""The checkpoint that a loop goes on from because its caller has loaded it, in place of a restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from torch.distributed import ProcessGroup

from holdfast.checkpointer.loop_rules import LoopRules, check_alike
from holdfast.checkpointer.restore_report import RestoreReport
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
from holdfast.phases import LOG
from holdfast.run.session import JOB
from holdfast.state.identity import parts_of
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store


class _LoadedBefore(msgspec.Struct, frozen=True):
    """The step and the place of the checkpoint that the first rank has loaded; None if it has loaded none."""

    step: int | None = None
    place: str | None = None


def loaded_before(
    run: Location,
    state: Mapping[str, object],
    restored: RestoreReport | None,
    rules: LoopRules,
    *,
    group: ProcessGroup | None,
    timeout_s: float,
) -> RestoreReport | None:
    """The report of what a loop goes on from: of the last restore (`restored`), or one whose place a call of
    `holdfast.load` has taken: it filled `state` from a checkpoint of `run`, with options that a restore does not have,
    and neither a save nor a step of a loop has followed it. None otherwise. The notes of the first rank decide.

    Collective over `group`. Raises, on all ranks, the error that their `rules` for the loop differ."""
    deadline = Deadline(timeout_s)
    channel = default_channel("resume", group, deadline=deadline)

    def find(ranks: Sequence[LoopRules]) -> _LoadedBefore:
        check_alike(ranks)
        if restored is not None:
            return _LoadedBefore()
        with TimedStore(open_store(run), timeout_s=deadline.for_storage_s) as store:
            load = JOB.chosen(store.resolved(), JOB.sources(lambda: parts_of(state)))
        return _LoadedBefore() if load is None else _LoadedBefore(load.step, str(load.place))

    found = channel.exchange("resume", rules, find, deadline, takes=LoopRules, gives=_LoadedBefore)
    if found.step is None:
        return restored
    if channel.rank == 0:
        LOG.info("the loop goes on after step %d at %s, which this job has loaded", found.step, found.place)
    return RestoreReport(found.step, found.place, "storage", None)
