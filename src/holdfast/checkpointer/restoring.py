"""The restore of the newest checkpoint: from the memory of the nodes if they hold it whole, else from storage."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import msgspec
from torch.distributed import ProcessGroup

from holdfast.checkpoint.catalogue import EVERY_RANK, FileCopy
from holdfast.checkpoint.catalogue import Tier as NodeTier
from holdfast.checkpoint.sealed import Sealed
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.stored_state import StoredState
from holdfast.checkpointer.choosing import (
    Chosen,
    Clearing,
    DamagedCopy,
    FailedNode,
    PassedOver,
    Survey,
)
from holdfast.checkpointer.commit_wait import RestoredCheckpoint
from holdfast.checkpointer.first_save import check_first_save
from holdfast.checkpointer.found_on_node import FoundOnNode, copies_of, drained_parts, held_rows, let_go, sealed_slots
from holdfast.checkpointer.inventories import Inventory, ToldKnowledge, Unknown, inventory, known_of
from holdfast.checkpointer.lost_slots import RebuildOutcome, are_hopeless, rebuild_lost
from holdfast.checkpointer.memory_option import NodeDirs
from holdfast.checkpointer.peer_meeting import CopiesLeft, check_policies
from holdfast.checkpointer.restore_report import RejectedSource, RestoreReport, Tier
from holdfast.checkpointer.save_errors import is_unusable
from holdfast.collector import collector_paused
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel, global_rank, group_ranks
from holdfast.errors import ConfigurationError, HoldfastError, IncompatibleError, NotFoundError
from holdfast.format import records
from holdfast.format import values as value_codec
from holdfast.format.records import Fork, Place, Seal
from holdfast.loading import load_from_storage
from holdfast.loading.load_options import LoadOptions
from holdfast.loading.older import begin_with_older, restore_older
from holdfast.loading.one_load import Loading, Opened
from holdfast.node_disk.disk_folder import check_root, use_disk
from holdfast.node_disk.disk_store import is_disk_failure
from holdfast.node_memory.claims import Claim, has_trainer
from holdfast.node_memory.generations import give_up_generation
from holdfast.node_memory.node_folder import NodeFolder, unusable_memory
from holdfast.node_memory.slots import Slot, promote_all
from holdfast.phases import attempt, done, told
from holdfast.reports import LoadReport
from holdfast.run.fallback import Skipped, is_damage
from holdfast.run.history import Run, is_folder, resolve
from holdfast.run.paths import Selection, parse
from holdfast.run.resumes import ResumeLimit
from holdfast.run.session import JOB
from holdfast.store.base import Location, Store
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store, text_of

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """The report of a restore. `uncommitted` is the checkpoint if it was not committed yet, and `whole` its place if
    memory holds it whole; then `left` are its files of which memory has only copies (None: it has no such files).
    `parts` are checkpoints of which memory has only a part, to be given up when the job saves."""

    report: RestoreReport
    uncommitted: RestoredCheckpoint | None = None
    whole: Place | None = None
    left: CopiesLeft | None = None
    parts: tuple[str, ...] = ()


def restore(
    run: Location,
    state: Mapping[str, object],
    *,
    node: NodeDirs | None,
    select: str | Sequence[str] | None,
    group: ProcessGroup | None,
    verify: bool,
    fallback: bool,
    timeout_s: float,
    resumes: ResumeLimit,
    at: Selection | None = None,
    initial: Selection | None = None,
    is_fork: bool = False,
) -> Restored:
    """Fill `state` from the newest checkpoint of `run`, or from the one that `at` selects. In a run without any,
    fill it from the `initial` checkpoint of another run, whose steps it continues if it `is_fork`. `resumes` records
    which checkpoint this job resumes. Collective over `group`. See `Checkpointer.restore`."""
    options = LoadOptions(
        select, fallback=fallback, verify=verify, continues=True, resumes=resumes, older=restore_older
    )
    setbacks = _Setbacks()
    damaged = setbacks.damaged
    if node is not None and at is None:
        restored = _from_memory(run, state, node, group, options, setbacks, timeout_s=timeout_s)
        if restored is not None:
            return restored
    try:
        report = load_from_storage(at or parse(run), state, options, group=group, timeout_s=timeout_s)
    except NotFoundError as error:
        if at is not None or error.code not in ("not_found.run", "not_found.head"):
            raise
        if damaged:  # the only copies: they may have filled a part of the state, and are not nothing
            damage = damaged[0].error
            damage.action = (
                "Nothing is committed yet, so there is no other copy: start the training again in another folder."
            )
            raise damage from None
        check_first_save(run, state, select=select, group=group, timeout_s=timeout_s)
        if initial is None:
            return Restored(RestoreReport(None, None, None, None), parts=tuple(sorted(setbacks.parts)))
        options = LoadOptions(select, fallback=fallback, verify=verify, continues=False, older=begin_with_older)
        try:
            report = load_from_storage(initial, state, options, group=group, timeout_s=timeout_s)
        except IncompatibleError as mismatch:
            mismatch.action = _with_load_of_initial(mismatch.action, initial)
            raise
        if is_fork and not report.place:
            raise _no_steps(initial) from None
        if is_fork and group_ranks(group)[0] == global_rank():
            _note_fork(run, initial, report, timeout_s=timeout_s)
        return Restored(
            RestoreReport(report.step if is_fork else None, None, "storage", report),
            parts=tuple(sorted(setbacks.parts)),
        )
    report, rejected = _with_skipped(report, damaged), setbacks.rejected()
    told = RestoreReport(report.step, report.place, "storage", report, resumes.earlier, rejected)
    return Restored(told, parts=tuple(sorted(setbacks.parts)))


def _with_skipped(report: LoadReport, damaged: Sequence[_DamagedSnapshot]) -> LoadReport:
    """The report of a load from storage, which comes after newer checkpoints in memory proved damaged."""
    told, newer = dict(report.skipped), _skipped(damaged, Place.parse(report.place))
    first = ((str(each.place), each.reason) for each in newer if str(each.place) not in told)
    return replace(report, skipped=(*first, *report.skipped))


def _skipped(damaged: Sequence[_DamagedSnapshot], loaded: Place) -> list[Skipped]:
    """The damaged checkpoints that are newer than the one at `loaded`, which is used instead."""
    newer = {each.place: each.error.message for each in damaged if each.place > loaded}
    return [Skipped(place, reason) for place, reason in newer.items()]


def _no_steps(initial: Selection) -> ConfigurationError:
    return ConfigurationError(
        f"'{initial}' was written by another system and has no steps, so a run cannot continue them.",
        code="config.fork",
        action="Leave fork=True out: the run then begins at step 0 with that state.",
        path=initial.root,
    )


def _note_fork(run: Location, initial: Selection, report: LoadReport, *, timeout_s: float) -> None:
    """Remember, for the first epoch of the run, which checkpoint it goes on from."""
    with TimedStore(open_store(initial.location), timeout_s=timeout_s) as source:
        if is_folder(source):
            run_id = Checkpoint(resolve(initial, source).sealed).manifest.body.run_id
        else:
            run_id = Run.open(source).run_id
    with TimedStore(open_store(run), timeout_s=timeout_s) as storage:
        fork = Fork(run_id=run_id, place=Place.parse(report.place), step=report.step, path=report.path)
        JOB.note_fork(storage.resolved(), fork)


def drop_parts(
    run: Location, node: NodeDirs, channel: Channel, deadline: Deadline, *, may_begin_anew: bool
) -> Place | None:
    """Give up the checkpoints of which the nodes' memory has only a part. Returns the place of the newest whole
    checkpoint in memory on the lineage of the run's head; None if there is none. Collective.

    Raises:
        ConfigurationError: code ``config.unloaded_history``: memory holds a whole checkpoint and storage has none yet,
            so this job, which restored nothing, would begin the run anew, and `may_begin_anew` is false.
    """
    with _looked_at(run, node, channel, deadline, Survey()) as ((folder, *_), chosen):
        if not chosen.seal:
            return None
        seal = records.decode(chosen.seal, Seal, path=str(folder.path))
        if chosen.is_all and not may_begin_anew:
            raise ConfigurationError(
                f"an earlier job saved step {seal.step} of run '{run}'. It is in the memory of this job's nodes, but "
                "not in storage yet, and this job has restored nothing.",
                code="config.unloaded_history",
                action="Call restore() before the first save to continue from that step, save into another folder, or "
                "begin the run anew with takeover=True.",
                path=run.url,
                step=seal.step,
            )
        return seal.place


def make_room(run: Location, node: NodeDirs, channel: Channel, deadline: Deadline, clearing: Clearing) -> None:
    """Give up the checkpoints that `clearing` names: at the last look, a trainer may have been filling the rest of one.
    Collective."""
    with _looked_at(run, node, channel, deadline, Survey(clearing)):
        pass


class _DamagedSnapshot(NamedTuple):
    """A checkpoint on the nodes that all ranks passed over, because one of them found it damaged; or only the `copy`
    that is damaged, where another one of the same file may be sound."""

    place: Place
    error: HoldfastError
    copy: DamagedCopy | None

    @property
    def tier(self) -> Tier:
        """The tier of what is damaged."""
        told = self.error.tier
        return "peer memory" if told == "peer memory" else "node disk" if told == "node disk" else "node memory"


@dataclass
class _Setbacks:
    """The setbacks of this restore so far: checkpoints and copies that are `damaged`, what was `rebuilt`, or was to be,
    the newer checkpoints that looks have `passed` over, by place, and those of which they found `parts` alone, by id;
    and the `trouble` that ended the looks."""

    damaged: list[_DamagedSnapshot] = field(default_factory=list)
    rebuilt: list[RebuildOutcome] = field(default_factory=list)
    passed: dict[Place, PassedOver] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    trouble: HoldfastError | None = None

    def failed(self) -> set[FailedNode]:
        """The nodes that this restore does without: those that failed, and those that did not answer twice. The second
        try starts a keeper again that has died."""
        silent = Counter(FailedNode(each.checkpoint_id, node) for each in self.rebuilt for node in each.silent)
        failed = {FailedNode(each.checkpoint_id, node) for each in self.rebuilt for node in each.failed}
        return failed | {each for each, number in silent.items() if number > 1}

    def full(self) -> set[FailedNode]:
        """The nodes that have no room for what is rebuilt."""
        return {FailedNode(each.checkpoint_id, node) for each in self.rebuilt for node in each.full}

    def rejected(self) -> tuple[RejectedSource, ...]:
        """The sources that the restore did not use."""
        found = [RejectedSource(each.tier, str(each.place), each.error.message) for each in self.damaged]
        told = {each.place for each in self.damaged if each.copy is None}
        newer = (each for place, each in self.passed.items() if place not in told)
        found += [RejectedSource("node memory", str(each.place), each.reason) for each in newer]
        if self.trouble is not None and not is_damage(self.trouble):
            found.append(RejectedSource("node memory", None, self.trouble.message))
        return tuple(found)


def _from_memory(
    run: Location,
    state: Mapping[str, object],
    node: NodeDirs,
    group: ProcessGroup | None,
    options: LoadOptions,
    setbacks: _Setbacks,
    *,
    timeout_s: float,
) -> Restored | None:
    """Fill `state` from the newest checkpoint in memory that is sound. None if there is none, or memory cannot be used.
    Adds to the `setbacks`. Collective: all ranks hear of the damage that any of them finds."""
    damaged = setbacks.damaged
    try:
        while True:
            found = _newest_in_memory(run, state, node, group, options, setbacks, timeout_s=timeout_s)
            if isinstance(found, RebuildOutcome):
                setbacks.rebuilt.append(found)
                continue
            if not isinstance(found, _DamagedSnapshot):
                break
            damaged.append(found)
            if group_ranks(group)[0] == global_rank():
                _log.warning(
                    "checkpoint %s is damaged in the memory of a node, looking for an older one there: %s"
                    if found.copy is None
                    else "a copy of a file of checkpoint %s is damaged, looking for another one: %s",
                    found.place,
                    found.error.message,
                )
    except HoldfastError as error:
        if not is_damage(error) and not is_unusable(error):
            raise
        setbacks.trouble = trouble = error
    else:
        if found is not None or not damaged:
            return found
        trouble = damaged[0].error
    _log.warning("the snapshots in memory cannot be used, restoring from storage instead: %s", trouble)
    return None


def _newest_in_memory(
    run: Location,
    state: Mapping[str, object],
    node: NodeDirs,
    group: ProcessGroup | None,
    options: LoadOptions,
    setbacks: _Setbacks,
    *,
    timeout_s: float,
) -> Restored | _DamagedSnapshot | RebuildOutcome | None:
    """Fill `state` from the newest checkpoint that the nodes hold whole and that is older than the damaged ones. None
    if there is none; the checkpoint itself, or the copy of its file, if a rank found it damaged. If files of it have to
    be rebuilt, only does that."""
    damaged, rebuilt = setbacks.damaged, setbacks.rebuilt
    deadline = Deadline(timeout_s)
    channel = default_channel("restore", group, deadline=deadline)
    bad = frozenset(each.copy for each in damaged if each.copy is not None)
    places = [each.place for each in damaged if each.copy is None]
    survey = Survey(damaged=places, bad=bad, failed=setbacks.failed(), full=setbacks.full())
    with _looked_at(run, node, channel, deadline, survey, options) as (found, chosen):
        folder = found.folder
        setbacks.passed |= {each.place: each for each in chosen.passed}
        setbacks.parts |= set(chosen.parts)
        if not chosen.seal:
            return None
        seal = records.decode(chosen.seal, Seal, path=str(folder.path))
        if chosen.rebuild is not None:
            outcome = rebuild_lost(run, folder, seal, chosen.rebuild, channel, deadline)
            tries = [outcome, *(each for each in rebuilt if each.checkpoint_id == outcome.checkpoint_id)]
            return _DamagedSnapshot(seal.place, outcome.error(folder), None) if are_hopeless(tries) else outcome
        resumes = options.resumes
        assert resumes is not None
        resumes.earlier = chosen.earlier_resumes
        with TimedStore(open_store(run), timeout_s=deadline.for_storage_s) as storage:
            loading = Loading(channel, deadline, storage, group_ranks(group), options)
            held = _CheckpointInMemory(storage, seal, chosen, partial(copies_of, found, seal, chosen))
            try:
                report = _load(channel, deadline, loading, state, held, damaged=damaged)
            except HoldfastError as error:  # all ranks raise it, whichever found it
                copy = _copy_of(seal, chosen, error) if chosen.has_more else None
                # A file that a disk cannot read now may be the only copy of a checkpoint that the run lacks: it stays.
                if not is_damage(error) and not (is_disk_failure(error) and chosen.committed and copy not in bad):
                    raise
                return _DamagedSnapshot(seal.place, error, None if copy in bad else copy)
        channel.await_readers(deadline)
        # The history goes on from it, unless a job that lives makes newer ones. A save of this job makes sure of that.
        promote_all(folder, seal.checkpoint_id, is_meant=partial(_is_to_be_durable, folder, chosen))
        restored = RestoredCheckpoint(held.run_id, chosen.epoch, seal.place, seal.checkpoint_id, chosen.folder)
        uncommitted = None if chosen.committed else restored
        told = RestoreReport(report.step, report.place, chosen.tier, report, resumes.earlier, setbacks.rejected())
        return Restored(told, uncommitted, seal.place, _copies_left(seal, chosen), tuple(sorted(setbacks.parts)))


def _is_to_be_durable(folder: NodeFolder, chosen: Chosen, slot: Slot) -> bool:
    """Whether the keeper of this node has to write a slot to the run, so that the `chosen` checkpoint is committed: a
    copy, too, where the node of its owner is lost."""
    if not slot.is_copy:
        return not has_trainer(folder, slot.rank)
    contents = slot.record.contents
    files = () if contents is None or chosen.committed else contents.files
    return any(part.file in chosen.copied for part in files)


def _copies_left(seal: Seal, chosen: Chosen) -> CopiesLeft | None:
    """The files of the `chosen` checkpoint whose owners are lost."""
    readers = {file: chosen.owners[file] if chosen.owners else 0 for file in chosen.copied}
    return CopiesLeft(seal.checkpoint_id, readers) if readers else None


def _copy_of(seal: Seal, chosen: Chosen, error: HoldfastError) -> DamagedCopy | None:
    """The copy on a node that `error` says is damaged; None where it names none. The same on all ranks."""
    name = (error.path or "").rpartition("/")[2]
    tiers = {kind.value: kind for kind in (NodeTier.NODE_MEMORY, NodeTier.PEER_MEMORY, NodeTier.NODE_DISK)}
    files = {file.name: number for number, file in enumerate(seal.files)}
    if error.tier not in tiers or name not in files:
        return None
    reader = chosen.owners[files[name]] if chosen.owners else error.rank
    return DamagedCopy(seal.checkpoint_id, name, tiers[error.tier], EVERY_RANK if reader is None else reader)


class _CheckpointInMemory:
    """The `chosen` checkpoint, which the memory of the nodes holds whole: its `copies` are looked up when it is
    opened."""

    def __init__(
        self, storage: TimedStore, seal: Seal, chosen: Chosen, copies: Callable[[], dict[str, tuple[FileCopy, ...]]]
    ) -> None:
        self.chosen = chosen
        self._storage = storage
        self._seal = seal
        self._copies = copies
        self._opened: tuple[Checkpoint, Run] | None = None

    def open(self) -> Opened:
        """Open the checkpoint, once. Raises `CorruptError` if its copy or its manifest is damaged or gone."""
        if self._opened is None:
            run = Run.open(self._storage)
            prefix = records.checkpoint_key(self.chosen.folder, "")
            sealed = Sealed(self._storage, prefix, self._seal, run.run_id, nearer=self._copies())
            self._opened = Checkpoint(sealed), run
        return Opened(*self._opened)

    @property
    def place(self) -> Place:
        """The place of the checkpoint."""
        return self._seal.place

    @property
    def run_id(self) -> str:
        """The id of the run, once the checkpoint is open."""
        assert self._opened is not None, "it is opened before it is loaded"
        return self._opened[1].run_id

    def share_values(self, channel: Channel, deadline: Deadline) -> None:
        """Open it on all ranks, and give each the values in files that it cannot read. Collective."""
        opened = attempt(self.open)
        part = told(opened, lambda opened: _values_of(opened.checkpoint, channel.rank))
        values = value_codec.decode(channel.exchange("values", part, _merged_values, deadline))
        checkpoint = done(opened).checkpoint
        assert isinstance(checkpoint, Checkpoint)
        if checkpoint.holders is not None:
            checkpoint.nodes = values


@contextmanager
def _looked_at(
    run: Location,
    node: NodeDirs,
    channel: Channel,
    deadline: Deadline,
    survey: Survey,
    options: LoadOptions | None = None,
) -> Iterator[tuple[FoundOnNode, Chosen]]:
    """Look at the memory and disks of all nodes, and choose the checkpoint that all ranks restore. Yields what this
    node has, and the choice of the `survey`. Gives up what the choice says, and lets go of checkpoints of another
    history. With the `options` of a restore, records that this job resumes the checkpoint; without, this job saves, and
    gives up the checkpoints of which memory has only a part. Collective."""
    with ExitStack() as stack:

        def look() -> FoundOnNode:
            with unusable_memory(node.memory):
                folder = stack.enter_context(NodeFolder(text_of(run), node_dir=node.memory))
                stack.enter_context(Claim(folder))  # so that no process removes slots while this one looks at them
                if node.disk is not None:
                    check_root(node.disk, run)
                    use_disk(folder, node.disk, run)
                slots = stack.enter_context(sealed_slots(folder, run, timeout_s=deadline.for_storage_s / 2))
                parts = drained_parts(folder, run)
                found = inventory(folder, slots, parts.values(), held_rows(folder))
                found = msgspec.structs.replace(found, protect=node.protect)
                return FoundOnNode(folder, slots, parts, found)

        def give_up() -> None:
            with unusable_memory(node.memory):
                for checkpoint_id in given_up:
                    give_up_generation(found.folder, checkpoint_id)
                let_go(found, chosen.let_go)

        looked = attempt(look)
        chosen = _choose(run, looked, channel, deadline, survey, options)
        found = done(looked)
        given_up = (*chosen.given_up, *(chosen.parts if options is None else ()))
        if given_up or chosen.let_go:
            channel.confirm("inventory", attempt(give_up), deadline)
        yield found, chosen


@collector_paused()
def _choose(
    run: Location,
    node: FoundOnNode | Exception,
    channel: Channel,
    deadline: Deadline,
    survey: Survey,
    options: LoadOptions | None,
) -> Chosen:
    """Choose the checkpoint that all ranks restore from memory. Collective."""

    def choose(inventories: Sequence[Inventory]) -> Chosen | Unknown:
        here = done(node)
        check_policies([each.protect for each in inventories])
        survey.look(here.folder, here.parts, inventories)
        with TimedStore(open_store(run), timeout_s=deadline.for_storage_s) as storage:
            answer = survey.answer(storage)
            return _resumed(answer, storage, options) if isinstance(answer, Chosen) else answer

    def choose_when_told(told: Sequence[ToldKnowledge]) -> Chosen:
        with TimedStore(open_store(run), timeout_s=deadline.for_storage_s) as storage:
            return _resumed(survey.answer_when_told(storage, told), storage, options)

    mine = told(node, lambda node: node.inventory)
    answer: Chosen | Unknown = channel.exchange(
        "inventory", mine, choose, deadline, takes=Inventory, gives=Chosen | Unknown
    )
    if isinstance(answer, Chosen):
        return answer
    here = done(node)
    known = attempt(partial(known_of, here.folder, here.parts, answer, rank=channel.rank))
    return channel.exchange("inventory", known, choose_when_told, deadline, takes=ToldKnowledge, gives=Chosen)


def _resumed(chosen: Chosen, storage: Store, options: LoadOptions | None) -> Chosen:
    """Record on the first rank that this job resumes the `chosen` checkpoint, unless it is to be rebuilt first. If too
    many jobs have, returns the choice of none: the restore then falls back to storage, if it may.

    Raises:
        ConfigurationError: too many jobs have, and it may not fall back (``config.restart_loop``).
    """
    if not chosen.seal or chosen.rebuild is not None or options is None or options.resumes is None:
        return chosen
    run, place = Run.open(storage), records.decode(chosen.seal, Seal, path=chosen.folder).place
    if not options.fallback:
        options.resumes.check(run, place)
    elif (objection := options.resumes.objection(run, place)) is not None:
        if not chosen.committed:  # else storage has it too, and the restore from there says so
            _log.warning("checkpoint %s ends the jobs that resume it, restoring from storage: %s", place, objection)
        return msgspec.structs.replace(chosen, seal=b"")
    earlier = options.resumes.begin(run, place, chosen.epoch)
    return msgspec.structs.replace(chosen, earlier_resumes=earlier)


@collector_paused()
def _load(
    channel: Channel,
    deadline: Deadline,
    loading: Loading,
    state: Mapping[str, object],
    held: _CheckpointInMemory,
    *,
    damaged: Sequence[_DamagedSnapshot],
) -> LoadReport:
    if held.chosen.owners:
        held.share_values(channel, deadline)
    skipped = _skipped(damaged, held.place)
    # Else every rank can read all of it: each opens it while it matches names, and the exchange that follows tells all
    # ranks of a failure. One exchange less is a wait less for the slowest rank.
    return loading.fill(state, held.open, epoch=held.chosen.epoch, skipped=skipped)


def _values_of(checkpoint: StoredState, rank: int) -> bytes:
    """The encoded values in those files that `rank` reads for all."""
    assert isinstance(checkpoint, Checkpoint)
    holders = checkpoint.holders or ()
    mine = [file for file, holder in enumerate(holders) if max(holder, 0) == rank]  # rank 0's: all can read it
    return value_codec.encode(checkpoint.values_in(mine))


def _merged_values(payloads: Sequence[bytes]) -> bytes:
    tables = map(value_codec.decode, payloads)
    return value_codec.encode({path: node for table in tables for path, node in table.items()})


_NO_OPTIONS: Final = "takes no options of a load"
#: The options that `holdfast.load` has, and `restore` has not, in an advice; and one of a rule for its option mapping.
_LOAD_OPTION: Final = re.compile(r"\b(?:select|mapping|cast|strict|allow_empty|fill)=")


def with_load(action: str, run: Location) -> str:
    """The advice of a load, which `restore` made; if it names options, with the call that has them."""
    if not _LOAD_OPTION.search(action) or _NO_OPTIONS in action:
        return action
    return (
        f"{action} restore() {_NO_OPTIONS}: holdfast.load('{run}', into=state, ..., continues=True) has these options."
    )


def _with_load_of_initial(action: str, initial: Selection) -> str:
    """As `with_load`, for the checkpoint that a run without one begins with."""
    if not _LOAD_OPTION.search(action):
        return action
    return (
        f"{action} initial= {_NO_OPTIONS}: leave it out, and only where restore().step is None call "
        f"holdfast.load('{initial}', into=state, ...), which has these options."
    )
