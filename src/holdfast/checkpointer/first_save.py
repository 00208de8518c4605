"""The check of a job that found nothing to restore: its first save, which may be hours away, must be possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from torch.distributed import ProcessGroup

from holdfast.checkpointer.loop_rules import LoopRules, check_alike
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
from holdfast.errors import NotFoundError, StateError
from holdfast.format import records
from holdfast.format.patterns import Globs, check_matched
from holdfast.phases import attempt
from holdfast.policy.when import SavePolicy
from holdfast.run.history import Run
from holdfast.run.session import JOB
from holdfast.state.flatten import flatten
from holdfast.store.base import Location
from holdfast.store.posix_errors import check_creatable
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: Errors of a state that training does not mend. Others may pass: a model on the meta device gets its memory later.
_LASTING: Final = frozenset({"state.collision", "state.nesting", "state.unnamed_parameter", "state.unsupported_leaf"})


def check_first_save(
    run: Location,
    state: Mapping[str, object],
    *,
    select: str | Sequence[str] | None,
    group: ProcessGroup | None,
    timeout_s: float,
) -> None:
    """Raise, on all ranks, the error that the first save into `run` would end in, as far as it can be told without a
    change: the path cannot become a run, or the state of a rank cannot be saved. Collective."""
    deadline = Deadline(timeout_s)
    channel = default_channel("restore", group, deadline=deadline)

    def check() -> dict[str, list[str]]:
        if channel.rank == 0:
            _check_path(run, deadline)
        return _unmatched(state, select, rank=channel.rank, world_size=channel.world_size)

    def answer(ranks: Sequence[dict[str, list[str]]]) -> bytes:
        check_matched("select", ranks, where="the state")
        return b""

    channel.exchange("first save", attempt(check), answer, deadline, takes=dict[str, list[str]], gives=bytes)
    channel.await_readers(deadline)


def check_first_step(
    continued: Location | None, policy: SavePolicy, *, group: ProcessGroup | None, timeout_s: float
) -> None:
    """Raise, on all ranks, the error with which the first save of a loop would end that has restored nothing, if the
    run that it `continued` has a history (None for one that is taken over); or the error that the policies of their
    loops differ. Collective."""
    deadline = Deadline(timeout_s)
    channel = default_channel("first step", group, deadline=deadline)

    def check() -> LoopRules:
        if channel.rank == 0 and continued is not None:
            with (
                TimedStore(open_store(continued), timeout_s=deadline.for_storage_s) as storage,
                suppress(NotFoundError),
            ):
                JOB.check_loaded(Run.open(storage))
        return LoopRules.of(policy)

    channel.exchange("first step", attempt(check), check_alike, deadline, takes=LoopRules, gives=bytes)
    channel.await_readers(deadline)


def _check_path(run: Location, deadline: Deadline) -> None:
    with TimedStore(open_store(run), timeout_s=deadline.for_storage_s) as storage:
        Run.checked_names(storage)
        newest = 0
        with suppress(NotFoundError):
            newest = Run.open(storage).newest_epoch() or 0
        JOB.note_empty(storage.resolved(), newest)
        if run.folder is not None:
            path = storage.path(records.MARKER_KEY)
            storage.limit.run("look at", path, lambda: check_creatable(path))


def _unmatched(
    state: Mapping[str, object], select: str | Sequence[str] | None, *, rank: int, world_size: int
) -> dict[str, list[str]]:
    """The globs of the selection that match nothing in the state, with names that are near. Raises the error of a state
    that can never be saved."""
    globs = None if select is None else Globs(select)
    walk = attempt(lambda: flatten(state, rank=rank, world_size=world_size, select=globs))
    if isinstance(walk, StateError) and walk.code in _LASTING:
        raise walk
    return {} if isinstance(walk, Exception) else dict(walk.unmatched)
