"""The checkpoint that a loop goes on from because its caller has loaded it, in place of a restore."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
from torch.distributed import ProcessGroup

from holdfast.checkpointer.loop_rules import LoopRules, check_alike
from holdfast.checkpointer.restore_report import RestoreReport
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
from holdfast.phases import LOG, attempt
from holdfast.run.loads import Load
from holdfast.run.paths import some_quoted
from holdfast.run.session import JOB
from holdfast.state.identity import parts_of
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

_log = logging.getLogger(__name__)


class _LoopStart(msgspec.Struct, frozen=True):
    """One rank's rules for a loop, and the step and place of the checkpoint that the rank has loaded for it. `left` are
    the keys of the entries of its state that the load did not restore whole."""

    rules: LoopRules
    step: int | None = None
    place: str | None = None
    left: tuple[str, ...] = ()


class _AgreedStart(msgspec.Struct, frozen=True):
    """The checkpoint that all ranks have loaded; None if there is none. `is_mixed`: some have loaded another one.
    `left` are the keys of the entries that the load of any rank did not restore whole."""

    step: int | None = None
    place: str | None = None
    is_mixed: bool = False
    left: tuple[str, ...] = ()


def loaded_before(
    run: Location, state: Mapping[str, object], rules: LoopRules, *, group: ProcessGroup | None, timeout_s: float
) -> RestoreReport | None:
    """The report of a restore whose place a call of `holdfast.load` has taken on all ranks: it filled `state` from a
    checkpoint of `run`, with options that a restore does not have, after the `Checkpointer` was made, and no restore,
    save, step or begin of a loop has followed it. None otherwise.

    Collective over `group`. Raises, on all ranks, the error that their `rules` for the loop differ."""
    deadline = Deadline(timeout_s)
    channel = default_channel("resume", group, deadline=deadline)

    def start() -> _LoopStart:
        load = _chosen(run, state, deadline) if JOB.has_loaded else None
        if load is None or load.number <= JOB.trained:
            if load is not None and load.continues and channel.rank == 0:
                _log.warning(
                    "the loop does not go on from step %d at %s, which this job has loaded: training may have changed "
                    "the state since. Load it after the Checkpointer was made, right before the loop",
                    load.step,
                    load.place,
                )
            return _LoopStart(rules)
        return _LoopStart(rules, load.step, str(load.place), load.left)

    agreed = channel.exchange("resume", attempt(start), _agreed, deadline, takes=_LoopStart, gives=_AgreedStart)
    if channel.rank == 0 and agreed.is_mixed:
        _log.warning("the ranks have not all loaded one checkpoint of '%s', so the loop does not go on from it", run)
    if agreed.step is None:
        return None
    if channel.rank == 0:
        LOG.info("the loop goes on after step %d at %s, which this job has loaded", agreed.step, agreed.place)
        if agreed.left:
            _log.warning(
                "the loop goes on after step %d at %s, but not all of the state is from there: the load has left out "
                "%s (select=, strict=False), or a part of each. If that is not meant, load them too",
                agreed.step,
                agreed.place,
                some_quoted(list(agreed.left)),
            )
    return RestoreReport(agreed.step, agreed.place, "storage", None)


def _chosen(run: Location, state: Mapping[str, object], deadline: Deadline) -> Load | None:
    with TimedStore(open_store(run), timeout_s=deadline.for_storage_s) as store:
        return JOB.chosen(store.resolved(), JOB.sources(lambda: parts_of(state)))


def _agreed(ranks: Sequence[_LoopStart]) -> _AgreedStart:
    check_alike([rank.rules for rank in ranks])
    first = ranks[0]
    if any((rank.step, rank.place) != (first.step, first.place) for rank in ranks):
        return _AgreedStart(is_mixed=True)
    return _AgreedStart(
        first.step, first.place, left=tuple(dict.fromkeys(chain.from_iterable(rank.left for rank in ranks)))
    )
