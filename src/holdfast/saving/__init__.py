"""`save`: describe, plan, write, commit. Messages only coordinate; storage alone decides whether a checkpoint exists.

1. *describe*: every rank sends digests of its layout, its values and its undeclared replicas.
2. *plan*, if the last plan does not fit: one rank per distinct layout sends that layout, and rank 0 makes a new plan.
3. *compare*, if the plan shows that ranks of different layouts hold one part without a declaration, or if replicas are
   known to differ: the ranks send digests of those tensors. In any case rank 0 then takes the next place of the run and
   publishes the manifest.
4. *commit*: every rank derives its share from the manifest (once per plan) and writes its data file; rank 0 seals and
   commits. A rank that cannot write its file raises an alarm, and the others give theirs up.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol, SupportsFloat, SupportsIndex

import numpy as np
import torch
from torch.distributed import ProcessGroup

from holdfast.agreement.assignment import StoredShare
from holdfast.agreement.local import RankState
from holdfast.agreement.planner import Planner
from holdfast.agreement.planning import Planning, StoredPlanCache
from holdfast.agreement.request import SaveRequest
from holdfast.calls import PLAIN, SAVE, outer, refuse_nested
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.errors import ConfigurationError, HoldfastError, StorageError
from holdfast.format.patterns import Globs
from holdfast.format.records import MAX_RECORD_NBYTES, MAX_STEP, Commit, now
from holdfast.io.meter import Meter
from holdfast.options import check_flag
from holdfast.phases import LOG, Stopwatch, attempt, done, told
from holdfast.progress import PATIENCE_S, of_first_rank, progress
from holdfast.reports import SaveReport
from holdfast.run.loads import Sources
from holdfast.run.paths import parse
from holdfast.run.session import Takeover
from holdfast.saving.messages import ANSWERS, GIVEN_UP, Planned, Written
from holdfast.saving.rank_loss import commit_after_rank_loss, is_desertion
from holdfast.saving.shares import share_in, write_share
from holdfast.saving.stored_place import StoredPlace
from holdfast.snapshot.device import await_queued
from holdfast.state.flatten import flatten
from holdfast.state.identity import sources_of
from holdfast.state.watched_positions import note_saved_positions
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store
from holdfast.wording import count, kind_of

#: Time limit for the commit of a save by a single rank after other ranks are gone.
_FINISH_LIMIT_S = 60.0

#: The last plan, per run and group.
_known: dict[tuple[Location, tuple[int, ...]], StoredPlanCache] = {}


@outer(SAVE)
def save(
    run: str | os.PathLike[str] | Location,
    state: Mapping[str, object],
    step: int,
    *,
    metrics: Mapping[str, SupportsFloat] | None = None,
    select: str | Sequence[str] | None = None,
    group: ProcessGroup | None = None,
    takeover: bool = False,
    on_divergence: Literal["warn", "error"] = "warn",
    timeout_s: float = 600.0,
) -> SaveReport:
    """Save `state` into `run` and return when the checkpoint is committed and durable.

    Blocking and collective over `group` (default: all ranks of the job): every rank calls it with the same `run` and
    `step`; one plain process may call it too. `step` is the number of the last finished step. A save after a
    load logs a warning if its `step` is not greater than that of the loaded checkpoint. `save` creates `run` if it does
    not exist. If it has a history, this job must have loaded from it, unless ``takeover=True``. `metrics`, those of
    the first rank, are recorded with the commit. Extra memory is three buffers of 2 MiB. While layouts do not change,
    later saves exchange a few kilobytes per rank and no plan.

    `select` are globs of names, as in `load`. Only the names that they match are saved, such as the adapters of a model
    (``"**lora_*"``), and nothing else is read. Optimizers, objects and values are selected by their own names, and a
    list with all its entries or none. Load such a checkpoint with the same `select`.

    Plain tensors that several ranks hold under one name without a declaration (by DTensor or DDP) are compared: all of
    them at the first save and whenever a plan is made, a rotating share later. Copies that differ are an error at the
    first save. Later, with ``on_divergence="warn"``, `save` logs a warning and saves one holder's copy whole, and the
    checkpoint and the report list these tensors.

    On any error every rank raises, no part of the checkpoint becomes visible, and the head does not change. (After a
    load of an older checkpoint, that checkpoint becomes the head as soon as a save begins to write.) One exception: if
    a rank dies when all data files are durable, the others commit them, and the error says so.

    Raises:
        StateError: a part of `state` cannot be saved truthfully, or ranks disagree about it.
        IncompatibleError: a glob of `select` matches nothing on any rank.
        ConfigurationError: `run` is not a run, or has a history from which this job has not loaded. Code
            ``config.nested``: this thread is inside a call of a `Checkpointer`.
        StorageError: the store failed, or did not answer within nine tenths of `timeout_s`; the error names the path.
        DeadlineError: ranks named in the message did not answer within `timeout_s`.
        FencedError: another job opened a newer epoch of the run.
    """
    refuse_nested(SAVE, allowed=PLAIN)
    step = whole(step)
    if on_divergence not in ("warn", "error"):
        raise ValueError(f"on_divergence must be 'warn' or 'error', not {on_divergence!r}")
    check_flag("takeover", takeover)
    return save_to_storage(
        run_location(run),
        state,
        step,
        numbers=numbers_of(metrics),
        select=None if select is None else Globs(select),
        group=group,
        takeover=takeover,
        is_strict=on_divergence == "error",
        timeout_s=timeout_s,
    )


def save_to_storage(
    location: Location,
    state: Mapping[str, object],
    step: int,
    *,
    numbers: dict[str, float],
    select: Globs | None,
    group: ProcessGroup | None,
    takeover: Takeover,
    is_strict: bool = False,
    room: RoomMaker | None = None,
    timeout_s: float,
) -> SaveReport:
    """As `save`, with checked arguments, for a call that may be inside another one of the library. `numbers` are the
    metrics; with `is_strict`, copies that differ are always an error. `room` is asked for space where it is missing."""
    deadline = Deadline(timeout_s)
    channel = default_channel(f"save of step {step}", group, deadline=deadline, step=step)
    ranks = group_ranks(group)
    note_saved_positions(state, is_first_rank=channel.rank == 0)
    return save_over(
        channel,
        deadline,
        location,
        state,
        step,
        ranks=ranks,
        numbers=numbers,
        select=select,
        takeover=takeover,
        is_strict=is_strict,
        sources=sources_of(state, is_first_rank=channel.rank == 0),
        known=_known.setdefault((location, ranks), StoredPlanCache()),
        room=room,
    )


def save_over(
    channel: Channel,
    deadline: Deadline,
    location: Location,
    state: Mapping[str, object],
    step: int,
    *,
    ranks: Sequence[int],
    numbers: dict[str, float],
    select: Globs | None,
    takeover: Takeover,
    is_strict: bool,
    sources: Sources,
    known: StoredPlanCache,
    room: RoomMaker | None = None,
) -> SaveReport:
    """As `save_to_storage`, over a channel between the global `ranks`. `sources` are the loads that filled the state,
    and `known` is the plan of the last save, which is updated."""
    with TimedStore(open_store(location), timeout_s=deadline.for_storage_s) as storage:
        request = SaveRequest(storage, step, numbers, takeover, now(), sources)
        saving = _Saving(channel, deadline, request, ranks, select, known, is_strict=is_strict, room=room)
        report = saving.run(state)
    channel.await_readers(deadline)
    if channel.rank == 0 and not state and not report.num_tensors:
        LOG.warning("the state of step %d is empty, so its checkpoint holds nothing", step)
    if channel.rank == 0:
        LOG.info("saved %s, to %s", report.summary, report.path)
    return report


def whole(step: object) -> int:
    """Convert a step, which may be one of numpy's integers, to the int that is recorded. Raises `ValueError` for
    anything that is not a step, and `ConfigurationError`, code ``config.step``, for one above 10**18 - 1."""
    number = operator.index(step) if isinstance(step, SupportsIndex) and not isinstance(step, bool) else -1
    if number < 0:
        raise ValueError(f"step must be a whole number from 0 to 10**18 - 1, not {step!r}")
    if number > MAX_STEP:
        raise ConfigurationError(
            f"step {number} is too large: the name of a checkpoint's folder has 18 digits for it.",
            code="config.step",
            action="Number the steps from 0 to 10**18 - 1.",
        )
    return number


def numbers_of(metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float]:
    """Convert `metrics` to the floats that are recorded. Raises `TypeError` or `ValueError` for anything that is not a
    metric."""
    # torch warns about the conversion of a number with a gradient.
    return {
        name: float(value.detach() if isinstance(value, torch.Tensor) else value)
        for name, value in checked_metrics(metrics).items()
    }


def checked_metrics(metrics: Mapping[str, SupportsFloat] | None) -> Mapping[str, SupportsFloat]:
    """The `metrics`; empty for None. Raises `TypeError` or `ValueError` unless they are names with one number each, and
    fit into a record. Reads none of the numbers, which may be on a device."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of numbers, such as {{'loss': 0.5}}, not {metrics!r}")
    for name, value in metrics.items():
        check_metric(name, value)
    if sum(6 * len(name) + 32 for name in metrics) > MAX_RECORD_NBYTES // 2:  # as JSON, at most
        raise ValueError(f"{count(len(metrics), 'metric')} and their names do not fit into the record of a commit")
    return metrics


def check_metric(name: object, value: object) -> None:
    """Raise `TypeError` or `ValueError` unless this is a name with one number, which it does not read."""
    if type(name) is not str:
        raise TypeError(f"the name of a metric must be a string, not {kind_of(name)}: {name!r}")
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"metric {name!r} must be a number, not {kind_of(value)}: {value!r}")
    if isinstance(value, np.ndarray) and (value.size != 1 or value.dtype.kind not in "biuf"):
        raise ValueError(f"metric {name!r} must be one number, not of shape {value.shape} and {value.dtype}")
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex() or value.is_meta):
        raise ValueError(f"metric {name!r} must be one number, not of shape {tuple(value.shape)} and {value.dtype}")


def run_location(run: str | os.PathLike[str] | Location) -> Location:
    """The location of the run that `run` names. Raises `ConfigurationError` if it names one checkpoint."""
    target = parse(run)
    if target.step is not None or target.place is not None:
        raise ConfigurationError(
            f"'{target}' is one checkpoint; saves go into a run.",
            code="config.path",
            action=f"Name the run, '{target.root}'. To go on from an older checkpoint, load it first: "
            f"holdfast.load('{target}', into=state, continues=True).",
            path=target.root,
        )
    return target.location


class RoomMaker(Protocol):
    """Somebody who can make room in the store for a save that found no space."""

    def made(self, error: StorageError, channel: Channel, deadline: Deadline) -> bool:
        """Whether there is room now for a save that has ended in `error` on all ranks. Collective. If not, and the
        error is about space, it says why not."""


class _WrittenPart(NamedTuple):
    """One rank's part of a save: its share in the plan, and the data files that it wrote."""

    share: StoredShare
    written: Written


class _OtherFailedError(Exception):
    """Another rank has failed, so this one has given up its file. Never leaves this module."""


def _is_about_space(error: Exception) -> bool:
    return isinstance(error, StorageError) and error.code == "storage.full"


class _Saving:
    """One save on one rank. `ranks` are the global ranks of the group, in its order."""

    def __init__(
        self,
        channel: Channel,
        deadline: Deadline,
        request: SaveRequest,
        ranks: Sequence[int],
        select: Globs | None,
        known: StoredPlanCache,
        *,
        is_strict: bool,
        room: RoomMaker | None,
    ) -> None:
        self._select = select
        self._room = room
        self._channel = channel
        self._deadline = deadline
        self._request = request
        self._storage = request.storage
        self._rank = ranks[channel.rank]
        self._watch = Stopwatch()
        self._known = known
        self._placing = StoredPlace(request, num_ranks=len(ranks))
        what = f"step {request.step}"
        equal = partial(request.sources.made_equal, ranks)
        self._planner = Planner(self._placing, ranks, self._known.memory, what=what, strict=is_strict, equal=equal)
        self._planning = Planning(
            channel, deadline, self._rank, self._planner, self._known, self._watch, answers=ANSWERS
        )

    def run(self, state: Mapping[str, object]) -> SaveReport:
        """Save and report."""
        number, world_size, walk = self._channel.rank, self._channel.world_size, self._known.walk
        planned, mine = self._planning.agree(
            lambda: flatten(state, rank=number, world_size=world_size, last=walk, select=self._select)
        )
        what = of_first_rank(f"saving step {self._request.step}", world_size)
        with progress(what, shown=number == 0, after_s=PATIENCE_S) as meter:
            part, commit = self._write_and_commit(planned, lambda: self._write(planned, mine, meter))
        share, written = part
        return SaveReport(
            step=commit.step,
            place=str(commit.place),
            path=self._storage.path(f"checkpoints/{commit.checkpoint}"),
            nbytes=commit.nbytes,
            written_nbytes=written.nbytes,
            referenced_nbytes=written.referenced_nbytes,
            num_tensors=len(share.manifest.body.names),
            diverged=planned.diverged,
            seconds=self._watch.seconds,
        )

    def _write_and_commit(self, planned: Planned, write: Callable[[], _WrittenPart]) -> tuple[_WrittenPart, Commit]:
        """Write this rank's part, and have rank 0 commit. If that fails on all ranks because space is missing, and
        somebody can make some, the ranks that have not written their parts write them again."""
        part: _WrittenPart | Exception | None = None
        while True:
            if not isinstance(part, _WrittenPart):
                with self._watch.phase("write"):
                    part = attempt(write)
            try:
                with self._watch.phase("commit"):
                    commit = self._commit(planned, self._told(part))
                return done(part), commit
            except StorageError as error:
                if self._room is None or not self._room.made(error, self._channel, self._deadline):
                    raise

    def _told(self, part: _WrittenPart | Exception) -> Written | Exception:
        """The message about this rank's part. If it has failed, the other ranks hear of that at once: nobody needs the
        files that they are writing. (Not so where space is missing that somebody can make.)"""
        if isinstance(part, _OtherFailedError):
            return GIVEN_UP
        if isinstance(part, Exception) and (self._room is None or not _is_about_space(part)):
            self._channel.raise_alarm(self._deadline)
        return told(part, lambda mine: mine.written)

    def _heed_alarm(self) -> None:
        if self._channel.is_alarmed(self._deadline):
            raise _OtherFailedError

    def _write(self, planned: Planned, mine: RankState, meter: Meter) -> _WrittenPart:
        share = share_in(self._storage, planned, self._rank, self._known.share)
        self._known.remember(share, self._planner.memory)
        await_queued(part for local in mine.flat.tensors.values() for part in local.memory)
        values = self._planning.values(mine)
        written = write_share(
            share,
            self._storage,
            planned.folder,
            mine.flat,
            values,
            self._rank,
            meter=meter,
            meanwhile=self._heed_alarm,
            every_s=self._channel.look_s,
        )
        return _WrittenPart(share, written)

    def _commit(self, planned: Planned, written: Written | Exception) -> Commit:
        """Let rank 0 commit. If ranks are gone, this rank tries to commit by itself, and the error says whether it
        succeeded."""
        try:
            return self._channel.exchange(
                "commit", written, self._placing.commit, self._deadline, takes=Written, gives=Commit
            )
        except HoldfastError as error:
            if isinstance(written, Written) and is_desertion(error):
                # If the group's store does not answer, rank 0 counts as gone, because it usually serves that store.
                absent = error.absent or (0,)
                number, step = self._channel.rank, self._request.step
                # The deadline of the save has passed, so this has a time limit of its own.
                limit_s = min(self._deadline.timeout_s, _FINISH_LIMIT_S)
                with TimedStore(open_store(self._storage.location), timeout_s=limit_s) as storage:
                    error.message += " " + commit_after_rank_loss(storage, planned, step, number=number, absent=absent)
            raise
