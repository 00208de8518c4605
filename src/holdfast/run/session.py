"""One process's memory of the runs that it loaded from and saved to, and its right to save that follows from it.

A place that a save got is never given out again, whether its checkpoint was committed or not: the start of a save
uses up a number. So an aborted save leaves a gap, and its late commit cannot collide with another checkpoint.

A load moves a run only when it filled, completely, the very objects that are saved later, or when its caller said so.
The session remembers for each object the load that filled it last. So the order of loads decides, and a load into other
objects (such as a teacher model) changes nothing. A save whose objects come from several places is refused.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final, Literal, NamedTuple, TypeAlias

from holdfast.calls import NOTES, outer
from holdfast.errors import FencedError
from holdfast.format.records import Epoch, Fork, Place, Why
from holdfast.run.history import Run
from holdfast.run.loads import NEVER_LOADED, FilledMemory, Identity, Load, Sources, StatePart
from holdfast.run.session_errors import torn, unclear, unloaded
from holdfast.store.base import Location

_log = logging.getLogger(__name__)

#: Whether a job may save into a run that it has not loaded: never; once, at its first save; or whenever others have
#: saved since, which goes on from the head.
Takeover: TypeAlias = bool | Literal["always"]


@dataclass(slots=True)
class _RunNotes:
    """The notes of a session about one run.

    `last` is the last place given out in the epoch that this process owns, `step` the step saved there. `loaded` is
    the last load of the run, `continued` the last load with ``continues=True``. `used` is the number of the last load
    that a save has taken into account. `took_over` says whether this process took the run over, which it may do once.
    """

    root: str
    run_id: str
    last: Place | None = None
    step: int = 0
    loaded: Load | None = None
    continued: Load | None = None
    used: int = 0
    took_over: bool = False
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def unused_load(self) -> Load | None:
        """The last load where no save of this run came after it."""
        return None if self.loaded is None or self.loaded.number <= self.used else self.loaded

    @property
    def unused(self) -> int:
        """The number of `unused_load`; 0 if there is none."""
        return _number_of(self.unused_load)


class UnseenPlace(NamedTuple):
    """A place that was taken without a look at the store, in the run with id `run_id`, in an epoch whose record has
    this `incarnation`."""

    run_id: str
    place: Place
    incarnation: str


class Session:
    """The runs of one job, by their roots as `Store.resolved` gives them. Safe for several threads."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all loads and saves, as a new job knows none."""
        self._memories: dict[str, _RunNotes] = {}
        #: The roots of the runs that this process saved into, by their locations.
        self._roots: dict[Location, str] = {}
        #: By the root of a run that has no checkpoint yet, the checkpoint of another run that this job has for it.
        self._forks: dict[str, Fork] = {}
        #: By root, the newest epoch of a run in which this job found nothing to restore.
        self._empty: dict[str, int] = {}
        self._lock = Lock()
        #: The last load that filled each object, by the key of its identity.
        self._filled: dict[Hashable, tuple[Identity, Load]] = {}
        #: The tensor memory that each load filled and no later load filled again, the newest load last.
        self._filled_memory: list[tuple[FilledMemory, Load]] = []
        self._number = 0
        #: The number of the newest load that filled tensor memory, and of the newest one that a save must consider.
        self._newest_in_memory = 0
        self._unused = 0
        #: The number of the newest load when a loop last began or ended a step, or a `Checkpointer` was made.
        self.trained = 0
        #: Whether a load or a transfer has failed half way: then every save must look at what it saves.
        self._has_torn = False

    @outer(NOTES)
    def note_loaded(self, load: Load, filled: Iterable[Identity] = (), memory: FilledMemory | None = None) -> None:
        """Remember that `load` filled the objects `filled`, and the tensors' `memory`."""
        filled = list(filled)
        with self._lock:
            self._number += 1
            load = replace(load, number=self._number)
            self._filled = {key: entry for key, entry in self._filled.items() if entry[0].is_alive}
            self._filled |= {identity.key: (identity, load) for identity in filled}
            self._filled_memory = [entry for entry in self._filled_memory if entry[0].forget(memory)]
            if memory is not None:
                self._filled_memory.append((memory, load))
                self._newest_in_memory = load.number
            self._unused = load.number
            self._has_torn |= load.is_torn
            if load.place is not None:
                remembered = self._memory(load.root, load.run_id)
                remembered.loaded = load
                if load.continues:
                    remembered.continued = load

    @outer(NOTES)
    def note_refilled(self, filled: Iterable[Identity], memory: FilledMemory) -> None:
        """Remember that a transfer has filled the objects `filled`, and the tensors' `memory`: nothing of what had
        failed half way is left in them. It does not say from which checkpoint they are."""
        with self._lock:
            if self._has_torn:
                for identity in filled:
                    load = self._load_of(identity)
                    if load is not None and load.is_torn:
                        del self._filled[identity.key]
                self._filled_memory = [
                    entry for entry in self._filled_memory if not entry[1].is_torn or entry[0].forget(memory)
                ]

    @outer(NOTES)
    def note_fork(self, root: str, fork: Fork) -> None:
        """Remember that the run at `root`, which has no checkpoint yet, goes on from `fork`, which this job loaded."""
        with self._lock:
            self._forks[root] = fork

    @outer(NOTES)
    def note_empty(self, root: str, newest: int) -> None:
        """Remember that this job found nothing to restore in the run at `root`, whose `newest` epoch was this one. So a
        job that has opened another one since was first."""
        with self._lock:
            self._empty[root] = newest

    @outer(NOTES)
    def sources(self, parts: Callable[[], Sequence[StatePart]]) -> Sources:
        """The loads that last filled the `parts` of a state that is about to be saved."""
        with self._lock:
            if not (self._unused or self._has_torn):
                return NEVER_LOADED._replace(number=self._number)
            return Sources(frozenset(load for part in parts() for load in self._last(part)), self._number)

    @property
    def has_loaded(self) -> bool:
        """Whether anything was loaded or failed to load."""
        return self._number > 0

    def note_trained(self) -> None:
        """Remember that training may have changed what was loaded before. (One assignment, because every step calls
        this.)"""
        self.trained = self._number

    @outer(NOTES)
    def chosen(self, root: str, sources: Sources) -> Load | None:
        """The load of the run at `root` by which the caller chose what a loop goes on from: a call of `holdfast.load`
        that filled a state with these `sources`, as a save from there requires it, and that no save has followed. None
        if there is none. Training may have followed it: compare its number with `trained`."""
        with self._lock:
            memory = self._memories.get(root)
            if memory is None:
                return None
            loads = sources.loads or frozenset((memory.loaded,))
            load = max(loads, key=_number_of)
            # A later load with `continues` that filled another object says nothing about what this state holds.
            if load is None or load.is_restore or load.is_torn or _counted(load, memory, sources.number) is not load:
                return None
            return load if load.continues or (load.is_whole and len(loads) == 1) else None

    @outer(NOTES)
    def begin(self, run: Run, *, takeover: Takeover, world_size: int, sources: Sources, step: int = 0) -> Place:
        """The place of the next save into `run`. Opens an epoch, durably, where this process owns none that fits.

        Only the coordinator calls this, once per save; the place is used up even when the save fails. Where the saved
        objects were loaded (`sources`), the save continues from that checkpoint: in a new epoch, unless the checkpoint
        is the last one that this process began. `takeover` lets a process that loaded nothing continue from the head of
        a run that it does not own. It has effect at the first save that says so, and not again: another job that takes
        over later must be able to stop this one. With ``"always"``, every save continues from the head, whoever saved
        it: the job says that its state is newer than all that the run has.

        Raises:
            ConfigurationError: the run has commits, and the state to save was not loaded from it
                (``config.unloaded_history``), or only a part of it was (``config.unclear_history``); or a load
                or transfer into it failed half way (``config.partly_filled``).
            FencedError: another job opened an epoch that is newer than this job's own, or than the newest one when it
                loaded; a rollback of the run opens one, too. Code ``fenced.behind``: a job that always takes over
                would save a lower `step` than the head has.
        """
        root = run.storage.resolved()  # before taking the lock, because storage may hang
        with self._lock:
            self._roots[run.storage.location] = root
            memory = self._memory(root, run.run_id)
            newest = run.newest_epoch() or 0
            loaded = _source(run, memory, sources)
            if takeover == "always":
                loaded = _unless_left_behind(run, loaded)
            is_takeover = takeover == "always" or (takeover and not memory.took_over)
            place = _next_in_own_epoch(run, memory, loaded, newest, takeover=is_takeover)
            if place is None:
                if takeover == "always" and loaded is None:
                    _check_ahead(run, step)
                epoch = _open_epoch(
                    run,
                    memory,
                    loaded,
                    newest,
                    takeover=is_takeover,
                    world_size=world_size,
                    moved_from=self._other_root(memory),
                    fork=self._forks.get(root),
                    known=min(newest, self._empty.get(root, newest)),
                )
                place = Place(epoch.epoch, 1)
            memory.last = place
            memory.took_over |= is_takeover
            memory.used = sources.number
            self._unused = max((each.unused for each in self._memories.values()), default=0)
            return place

    @outer(NOTES)
    def begin_unseen(self, location: Location, sources: Sources) -> UnseenPlace | None:
        """As `begin`, for a run whose store does not answer: the next place of the epoch that this process has opened.
        Whoever commits there checks that no other job has opened a newer one. None, and no place is used up, where only
        the store can tell what this save goes on from."""
        root = self._roots.get(location)
        with self._lock:
            memory = None if root is None else self._memories.get(root)
            if memory is None or not self._goes_on_unseen(memory, sources):
                return None
            assert memory.last is not None
            memory.last = Place(memory.last.epoch, memory.last.seq + 1)
            memory.used = sources.number
            return UnseenPlace(memory.run_id, memory.last, memory.incarnation)

    @outer(NOTES)
    def can_begin_unseen(self, location: Location, sources: Sources) -> bool:
        """Whether `begin_unseen` would give a place now."""
        root = self._roots.get(location)
        with self._lock:
            memory = None if root is None else self._memories.get(root)
            return memory is not None and self._goes_on_unseen(memory, sources)

    def _goes_on_unseen(self, memory: _RunNotes, sources: Sources) -> bool:
        """Whether a save with these `sources` goes on from the last one: it loaded nothing since."""
        loads = sources.loads or frozenset((memory.loaded,))
        is_torn = any(load is not None and load.is_torn for load in loads)
        return (
            memory.last is not None
            and not is_torn
            and all(_counted(load, memory, sources.number) is None for load in loads)
        )

    @outer(NOTES)
    def base(self, run: Run, newest: int) -> Place | None:
        """The place that this process goes on from, where it said so (a restore, or a load with ``continues=True``)
        while `newest` was the newest epoch of `run`; else None."""
        root = run.storage.resolved()
        with self._lock:
            load = self._memory(root, run.run_id).continued
            return None if load is None or load.is_torn or load.seen != newest else load.place

    @outer(NOTES)
    def check_loaded(self, run: Run) -> None:
        """Raise the `ConfigurationError` (``config.unloaded_history``) with which the first save of this process would
        end, because `run` has commits, and this process has neither loaded from it nor saved into it."""
        root = run.storage.resolved()
        with self._lock:
            memory = self._memory(root, run.run_id)
            is_known = memory.loaded is not None or memory.last is not None
            head = None if is_known else run.head()
            if head is not None:
                raise unloaded(run, head, unused=memory.unused_load, moved_from=self._other_root(memory))

    @outer(NOTES)
    def note_step(self, run: Run, step: int) -> int | None:
        """Remember the step that is saved at the last place that `begin` gave.

        Returns the step of the save before it in the same epoch, or None where it is the first one.
        """
        root = run.storage.resolved()
        with self._lock:
            memory = self._memory(root, run.run_id)
            before = memory.step if memory.last is not None and memory.last.seq > 1 else None
            memory.step = step
            return before

    @outer(NOTES)
    def has_opened(self, run: Run, epoch: int) -> bool:
        """Whether this process opened `epoch` of `run`."""
        root = run.storage.resolved()
        with self._lock:
            return _is_own(run, self._memory(root, run.run_id), epoch)

    @outer(NOTES)
    def incarnation(self, run: Run) -> str:
        """The incarnation in the records of all epochs of `run` that this process opens."""
        root = run.storage.resolved()
        with self._lock:
            return self._memory(root, run.run_id).incarnation

    def _last(self, part: StatePart) -> set[Load | None]:
        """The loads that last filled a part."""
        whole = None if part.itself is None else self._load_of(part.itself)
        if not self._has_torn and self._newest_in_memory <= (0 if whole is None else whole.number):
            return {whole}
        # Memory that no load filled is new memory of the object, which was moved or sharded after its load.
        # The contents of a load that failed half way stay in the memory that nothing has filled since.
        loads = self._loads_into(set(part.memory()))
        return {load if load is not None and load.is_torn else max(load, whole, key=_number_of) for load in loads}

    def _loads_into(self, numbers: AbstractSet[int]) -> set[Load | None]:
        """The loads that last filled the memory with these numbers; None stands for memory that no load filled."""
        loads: set[Load | None] = set()
        for memory, load in reversed(self._filled_memory):
            filled = memory.among(numbers)
            if filled:
                loads.add(load)
                numbers = numbers - filled
        return loads | {None} if numbers or not loads else loads

    def _load_of(self, identity: Identity) -> Load | None:
        entry = self._filled.get(identity.key)
        return None if entry is None or not entry[0].is_alive else entry[1]

    def _other_root(self, memory: _RunNotes) -> str | None:
        """Another root at which this process knows the same run; None where there is none."""
        same = (each for each in self._memories.values() if each.run_id == memory.run_id and each is not memory)
        return next((each.root for each in same), None)

    def _memory(self, root: str, run_id: str) -> _RunNotes:
        memory = self._memories.get(root)
        if memory is None or memory.run_id != run_id:
            # The run at a known root was deleted and replaced by another: the notes about the old one are void.
            if memory is not None and memory.last is not None:
                _log.warning(
                    "the run at '%s' was removed or replaced: the checkpoints that this job saved there, up to %s, are "
                    "gone",
                    root,
                    memory.last,
                )
            memory = self._memories[root] = _RunNotes(root, run_id)
        return memory


def _number_of(load: Load | None) -> int:
    return 0 if load is None else load.number


def _source(run: Run, memory: _RunNotes, sources: Sources) -> Load | None:
    """The load that the state of a save comes from; None where it comes from no load since the last save."""
    loads = sources.loads
    if any(load is not None and load.is_torn for load in loads):
        raise torn(run)
    if not loads:  # the state has only values: no object tells which load filled it
        loads = frozenset((memory.loaded,))
    each = {_counted(load, memory, sources.number) for load in loads}
    from_here = sorted((load for load in each if load is not None), key=_number_of)
    if not from_here:
        return None
    newest = from_here[-1]
    is_clear = len(from_here) == 1 and (newest.is_whole or bool(newest.continues))
    if is_clear and None not in each:
        return newest
    if all(load.place == memory.last for load in from_here):
        return None  # loading the last save back moves nothing
    # Objects beside those that a new job loaded from the head may be new: continuing abandons nothing.
    if is_clear and memory.last is None and _is_head(run, newest):
        return newest
    raise unclear(run, memory.last, from_here)


def _counted(load: Load | None, memory: _RunNotes, number: int) -> Load | None:
    """The load that counts for the run of `memory` where `load` filled an object.

    That is `load` itself, or a later load of the run with ``continues=True``, or None where `load` does not count.
    """
    continued = memory.continued
    if continued is not None and memory.used < continued.number <= number and _number_of(load) < continued.number:
        return continued
    if load is None or load.number <= memory.used or load.continues is False or load.place is None:
        return None
    return load if (load.root, load.run_id) == (memory.root, memory.run_id) else None


def _unless_left_behind(run: Run, loaded: Load | None) -> Load | None:
    """`loaded`, while the head of `run` is the checkpoint that it found there. None where others have saved since."""
    return loaded if loaded is not None and run.head_place() in (loaded.place, loaded.passed) else None


def _check_ahead(run: Run, step: int) -> None:
    """Raise `FencedError`, code ``fenced.behind``, where the head of `run` has a greater step than `step`."""
    head = run.head()
    if head is None or head.step <= step:
        return
    raise FencedError(
        f"step {step} is not saved: another job has saved step {head.step} of run '{run.storage.location}' already, at "
        f"{head.place}.",
        code="fenced.behind",
        action="Start this job again: it then restores what the other one saved. To go back to an older checkpoint, "
        f"run 'holdfast rollback {run.storage.location}' first.",
        path=run.storage.location.url,
        step=step,
    )


def _is_head(run: Run, load: Load) -> bool:
    return load.place is not None and run.head_place() == load.place


def _next_in_own_epoch(
    run: Run, memory: _RunNotes, loaded: Load | None, newest: int, *, takeover: bool
) -> Place | None:
    """The next place of the epoch that this process owns, or None where it must open another epoch."""
    last = memory.last
    if not takeover:
        # A job may continue in a newer epoch only if it loaded after that epoch was opened. Neither an earlier load nor
        # an epoch of its own may let a zombie take the run back, or let a job undo a rollback that it does not know.
        known = loaded.seen if loaded is not None else None if last is None else last.epoch
        if known is not None and newest != known and not _is_own(run, memory, newest):
            run.check_fence(known)
    if last is None or newest != last.epoch:
        return None
    if loaded is not None and loaded.place != last:
        # This includes a load of the newest commit when this process has begun a later place: the save at that place is
        # in progress or was aborted, may still be committed, and would come between the loaded state and its successor.
        return None
    return Place(last.epoch, last.seq + 1)


def _is_own(run: Run, memory: _RunNotes, newest: int) -> bool:
    """Whether this process opened epoch `newest` itself, although the store reported a failure."""
    return newest > 0 and run.epoch(newest).incarnation == memory.incarnation


def _open_epoch(
    run: Run,
    memory: _RunNotes,
    loaded: Load | None,
    newest: int,
    *,
    takeover: bool,
    world_size: int,
    moved_from: str | None,
    fork: Fork | None,
    known: int,
) -> Epoch:
    """Open the epoch after `newest`, from the checkpoint that this process's state comes from. Where it comes from
    none, the epoch after the newest one that the process has `known`."""
    at = run.head_place()  # not the record: a load with fallback=True may have passed over a damaged one
    origin: Place | None
    why: Why
    if loaded is not None:
        origin = _committed_origin(run, loaded)
        # A job that this one replaces may have saved since the load: that is no rollback.
        is_resume = loaded.is_newest or at in (origin, loaded.passed)
        why = "start" if origin is None else "resume" if is_resume else "rollback"
    elif takeover and newest:
        origin, why = at, "takeover"
    elif at is None or (head := run.head()) is None:
        # There is no checkpoint to load or to lose: earlier epochs, if any, ended before their first commit.
        origin, why, newest = None, "start", known
    else:
        raise unloaded(run, head, unused=memory.unused_load, moved_from=moved_from)
    return run.open_epoch(
        after=newest,
        opened_from=origin,
        why=why,
        world_size=world_size,
        incarnation=memory.incarnation,
        forked_from=fork if why == "start" else None,
    )


def _committed_origin(run: Run, load: Load) -> Place | None:
    """The place from which an epoch after `load` is opened: that of the load. For a checkpoint that was restored from
    node memory and never committed, the newest committed place before it, if there is one."""
    place = load.place
    if load.has_commit or place is None or run.is_committed(place) or run.is_removed(place):
        return place
    origin = next(run.lineage_places(start=place), None)
    _log.warning(
        "the checkpoint %s of '%s', which this job restored from memory, was never committed: the history goes on "
        "from %s, with this job's state",
        place,
        run.storage.location.url,
        origin or "its beginning",
    )
    return origin


#: The session of this process, which `save` and `load` share.
JOB: Final = Session()
# A forked child is a job of its own: its saves must not go on in the epoch of its parent, who would be fenced. And the
# lock may be held by a thread that the child does not have.
os.register_at_fork(after_in_child=JOB.begin_anew)
