"""`save` and `async_save` with the arguments of DCP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, Self, cast

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import AsyncStager

from holdfast.agreement.planning import StoredPlanCache
from holdfast.calls import PLAIN, SAVE, outer, refuse_nested
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.dcp.dcp_arguments import TIMEOUT_S, cannot_honour, check_save_planner, participants, plain_states
from holdfast.dcp.dcp_storage import Beginning, Destination, begin, destination
from holdfast.dcp.replaced import mark_replaced, remove_replaced
from holdfast.dcp.torch_saving import AsyncCheckpointerType, AsyncSaveResponse, check_stagers, new_stager
from holdfast.errors import FencedError
from holdfast.phases import attempt, done
from holdfast.reports import SaveReport
from holdfast.run.loads import Sources
from holdfast.saving import save_over
from holdfast.state.identity import sources_of
from holdfast.state.sharded_tensors import is_sharded

#: The advice for a job whose folder another one has taken over. Saves take over by themselves, so no option does.
_FENCED: Final = (
    "Stop this job, or save into another folder (checkpoint_id). If this job is the one to go on, stop the other one "
    "and restart this one: the first save of a new process takes the folder over."
)


@outer(SAVE)
def save(
    state_dict: Mapping[str, object],
    storage_writer: object = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> SaveReport:
    """Save `state_dict` into the folder `checkpoint_id`, and return when the checkpoint is committed and durable. Waits
    for the saves of `async_save` before it.

    Blocking and collective over `process_group` (default: all ranks of the job); with `no_dist`, this rank saves alone.
    The arguments are those of ``torch.distributed.checkpoint.save``. Objects with ``state_dict`` and
    ``load_state_dict`` are saved by their ``state_dict()``. The folder becomes a run with one checkpoint, whose step is
    the number at the end of the folder's name. If it has one already, that stays until the new one is committed, and is
    deleted then, or by the next save where the job is killed meanwhile. A run with several checkpoints keeps them all.

    Copies that ranks hold of one plain tensor or value must be equal, and values must be plain: DCP takes one of the
    copies, and pickles.

    Raises:
        ConfigurationError: code ``config.dcp_option``: an argument has no counterpart; the error says what to do.
            ``config.dcp_exists``: the folder has a checkpoint, and the writer has ``overwrite=False``.
            ``config.not_a_run``: the folder holds other files, such as a checkpoint of DCP. ``config.dcp_mixed``: DCP
            wrote one into it later.
        StateError, StorageError, DeadlineError, FencedError: as `holdfast.save`.
    """
    refuse_nested("holdfast.dcp.save", allowed=PLAIN)
    _BACKGROUND.finish()  # else an older state could be committed after this one
    into = _checked(checkpoint_id, storage_writer, planner, use_collectives=use_collectives)
    deadline = Deadline(TIMEOUT_S)
    channel, ranks = participants(f"dcp.save to {into.location}", process_group, deadline, no_dist=no_dist)
    state = attempt(lambda: plain_states(state_dict))
    beginning = _begin(channel, state, into, deadline)
    writing = _FolderSave(
        channel, ranks, into, beginning.step, sources_of(done(state), is_first_rank=channel.rank == 0)
    )
    return writing.run(done(state), deadline)


@outer(SAVE)
def async_save(
    state_dict: Mapping[str, object],
    storage_writer: object = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[SaveReport] | AsyncSaveResponse:
    """Copy `state_dict`, and save the copy as `save` does, in a thread. The arguments are those of
    ``torch.distributed.checkpoint.async_save``.

    Returns when the state is copied on all ranks, with a future: its ``result()`` is the report of `save`, or raises
    what `save` would raise. The copy is made by `async_stager`, such as a ``DefaultStager`` with pinned memory, which
    stays yours to close; by default by one of torch, into new host memory. If it copies in the background, the result
    is an ``AsyncSaveResponse`` with a future for the copy and one for the save, as in DCP.

    The saves of a process run one after another, in the order of the calls. A process that exits waits for them.
    ``AsyncCheckpointerType.PROCESS`` is refused (``config.dcp_option``); `holdfast.Checkpointer` has a process of its
    own, which outlives the job.

    Raises what `save` raises, as far as it is known when this returns.
    """
    refuse_nested("holdfast.dcp.async_save", allowed=PLAIN)
    check_stagers()
    into = _checked(checkpoint_id, storage_writer, planner, use_collectives=use_collectives)
    if async_checkpointer_type is not AsyncCheckpointerType.THREAD:
        raise cannot_honour(
            f"async_checkpointer_type={async_checkpointer_type}",
            "it saves in a thread, which hashes and writes without Python's lock",
            "Leave it out, or use holdfast.Checkpointer, whose keeper is a process of its own.",
        )
    deadline = Deadline(TIMEOUT_S)
    channel, ranks = participants(f"dcp.async_save to {into.location}", process_group, deadline, no_dist=no_dist)
    ready = attempt(lambda: _StagedState.of(state_dict, async_stager))
    try:
        beginning = _begin(channel, ready, into, deadline)
    except BaseException:
        if isinstance(ready, _StagedState):
            ready.close()
        raise
    copied = done(ready)
    sources = sources_of(copied.state, is_first_rank=channel.rank == 0)
    writing = _FolderSave(channel.in_background(), ranks, into, beginning.step, sources, is_background=True)
    saved = _BACKGROUND.submit(lambda: writing.run_staged(copied))
    if isinstance(copied.staged, Future):
        return AsyncSaveResponse(_ended(copied.staged), cast("Future[None]", saved))
    if copied.stager.should_synchronize_after_execute:
        copied.stager.synchronize_staging()
    return saved


class _StagedState(NamedTuple):
    """A state, its copy or a future of that, and the stager that copies it, which may be our own."""

    state: Mapping[str, object]
    staged: Mapping[str, object] | Future[Mapping[str, object]]
    stager: AsyncStager
    is_own: bool

    @classmethod
    def of(cls, state_dict: Mapping[str, object], given: AsyncStager | None) -> Self:
        """Have the stager copy the state: the `given` one, or one of torch that copies into new host memory."""
        state = plain_states(state_dict)
        stager = new_stager(with_sharded=_holds_sharded(state)) if given is None else given
        try:
            staged = stager.stage(state)
        except BaseException:
            if given is None:
                stager.close()
            raise
        return cls(state, cast("Mapping[str, object]", staged), stager, given is None)

    def close(self) -> None:
        """Close a stager of our own."""
        if self.is_own:
            self.stager.close()


def _holds_sharded(item: object) -> bool:
    if isinstance(item, dict):
        return any(map(_holds_sharded, item.values()))
    return any(map(_holds_sharded, item)) if isinstance(item, (list, tuple)) else is_sharded(item)


def _checked(
    checkpoint_id: str | os.PathLike[str] | None, storage_writer: object, planner: object, *, use_collectives: bool
) -> Destination:
    check_save_planner(planner)
    if not use_collectives:
        raise cannot_honour(
            "use_collectives=False",
            "ranks that agree on nothing write no checkpoint that another layout can load",
            "Leave it out: the ranks exchange a few small messages, and no collectives.",
        )
    return destination(checkpoint_id, storage_writer)


def _begin(channel: Channel, ready: object, into: Destination, deadline: Deadline) -> Beginning:
    """Hear that all ranks are `ready`, or have an error, and what rank 0 finds in the folder."""
    return channel.exchange(
        "begin",
        ready if isinstance(ready, Exception) else b"",
        lambda _: begin(into, deadline.for_storage_s),
        deadline,
        takes=bytes,
        gives=Beginning,
    )


@dataclass
class _FolderSave:
    """One save on one rank, once it has begun."""

    channel: Channel
    ranks: Sequence[int]
    into: Destination
    step: int
    sources: Sources
    is_background: bool = False

    def run(self, state: Mapping[str, object], deadline: Deadline) -> SaveReport:
        """Save, and delete the checkpoint that this one replaces."""
        location, storage_s = self.into.location, deadline.for_storage_s
        is_first = self.channel.rank == 0
        replaced = attempt(lambda: mark_replaced(location, storage_s)) if is_first else None
        try:
            report = save_over(
                self.channel,
                deadline,
                location,
                state,
                self.step,
                ranks=self.ranks,
                numbers={},
                select=None,
                takeover=True,
                is_strict=False,
                sources=self.sources,
                known=_PLANS.of(self.ranks, is_background=self.is_background),
            )
        except FencedError as error:
            error.action = _FENCED
            raise
        if replaced is not None and not isinstance(replaced, Exception):
            remove_replaced(replaced, storage_s)
        return report

    def run_staged(self, copied: _StagedState) -> SaveReport:
        """Save a state in the background, once it is staged."""
        staged = copied.staged
        try:
            state = attempt(lambda: staged.result() if isinstance(staged, Future) else staged)
            deadline = Deadline(TIMEOUT_S)
            self.channel.confirm("staged", state, deadline)
            return self.run(done(state), deadline)
        finally:
            self.channel.leave()
            copied.close()


def _ended(staged: Future[Mapping[str, object]]) -> Future[None]:
    """A future that ends as `staged` does, and keeps no state."""
    ended: Future[None] = Future()

    def tell(over: Future[Mapping[str, object]]) -> None:
        error = over.exception()
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    staged.add_done_callback(tell)
    return ended


class _Plans:
    """The last plan of each group of ranks, whatever the folder: states of one form are planned once. Saves in the
    background have plans of their own, since another thread may save meanwhile."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], bool], StoredPlanCache] = {}

    def of(self, ranks: Sequence[int], *, is_background: bool) -> StoredPlanCache:
        """The plan that saves of `ranks` share."""
        return self._known.setdefault((tuple(ranks), is_background), StoredPlanCache())


@dataclass
class _BackgroundSaves:
    """The thread that saves in the background: one, so that all ranks save in the order of their calls."""

    pid: int = field(default_factory=os.getpid)
    last: Future[SaveReport] | None = None

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-dcp")

    def submit(self, work: Callable[[], SaveReport]) -> Future[SaveReport]:
        """Have the thread do `work`. A forked child has a thread of its own."""
        if self.pid != os.getpid():
            self.pid = os.getpid()
            self.__dict__.pop("_executor", None)
        self.last = self._executor.submit(work)
        return self.last

    def finish(self) -> None:
        """Wait until all saves that were submitted have ended. Their futures have their errors."""
        if self.last is not None and self.pid == os.getpid():
            wait([self.last])


_PLANS = _Plans()
_BACKGROUND = _BackgroundSaves()
