"""One load on one rank: find the checkpoint, match names, read, put values in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy.ma  # noqa: F401 - np.unique imports it when it is first called, in the middle of a load

from holdfast.checkpoint.catalogue import EVERY_RANK, Tier
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.stored_state import NO_STEP, StoredState
from holdfast.collector import collector_paused
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.cooperative.reading import CooperativeReading, ReadCost
from holdfast.errors import (
    ConfigurationError,
    CorruptError,
    HoldfastError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from holdfast.format.records import Place
from holdfast.interop.foreign_format import ForeignState
from holdfast.interop.formats import foreign_at, foreign_instead, names_advice
from holdfast.loading.compared_names import Names, compared
from holdfast.loading.filled import note_filled, partly_filled_on_errors
from holdfast.loading.filling import Filling, outside_inference_mode
from holdfast.loading.left_out import left_out
from holdfast.loading.load_options import LoadOptions
from holdfast.loading.number_keys import number_rules
from holdfast.mapping.apply import mapped
from holdfast.mapping.draft import CheckpointTable
from holdfast.mapping.parts import stored_tensors
from holdfast.phases import Stopwatch, attempt, done, told
from holdfast.progress import PATIENCE_S, of_first_rank, progress
from holdfast.reports import LoadReport, ReadSource
from holdfast.run.fallback import Skipped, is_damage, resolve_sound
from holdfast.run.history import Located, Run, is_folder, resolve
from holdfast.run.leases import ReadLease, leased
from holdfast.run.loads import Load, MadeEqual
from holdfast.run.lost_head import lost_head
from holdfast.run.paths import Selection
from holdfast.run.second_reading import remember_damage
from holdfast.state.bind import bind
from holdfast.state.binding import Binding
from holdfast.state.differences import is_leaf
from holdfast.state.match import Terms
from holdfast.store.timed import TimedStore

_name_of = attrgetter("name")
_log = logging.getLogger(__name__)


class _Resolved(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoint that all ranks load: its place in the run (None for a folder outside any history) and its id, the
    newest epoch of the run before the look-up, the checkpoints that were skipped, the number of jobs that resumed it
    before, and whether another system wrote it."""

    place: Place | None
    checkpoint_id: str
    epoch: int | None
    skipped: tuple[Skipped, ...]
    earlier_resumes: int = 0
    is_foreign: bool = False


class Opened(NamedTuple):
    """A checkpoint to load, and its run; None for a checkpoint outside any history."""

    checkpoint: StoredState
    run: Run | None

    @staticmethod
    def of(located: Located) -> Opened:
        """Open the checkpoint that was found by its path."""
        return Opened(Checkpoint(located.sealed), located.run)


class _BoundLoad(NamedTuple):
    """A checkpoint bound to the live state of one rank: the opened checkpoint, the binding, the table of its tensors
    and values after the mapping, and the names that differ."""

    opened: Opened
    binding: Binding
    table: CheckpointTable
    names: Names


class Loading:
    """One load on one rank. `ranks` are the global ranks of the group, in its order."""

    def __init__(
        self,
        channel: Channel,
        deadline: Deadline,
        storage: TimedStore,
        ranks: Sequence[int],
        options: LoadOptions,
    ) -> None:
        self._channel = channel
        self._storage = storage
        self._ranks = ranks
        self._rank = ranks[channel.rank]
        self._deadline = deadline
        self._options = options
        self._watch = Stopwatch()
        #: The checkpoint that rank 0 has found; None on other ranks.
        self._located: Located | None = None
        #: The checkpoint that rank 0 has found instead, if another system wrote it.
        self._foreign: ForeignState | None = None
        #: Whether tensors that an older checkpoint does not fill may hold parts of a damaged one.
        self._is_mixed = False
        #: Whether the caller asked for the newest checkpoint, and not for a certain one.
        self._is_newest = True
        #: The lease of rank 0 on the checkpoint that all ranks read.
        self._lease: ReadLease | None = None

    def run(self, target: Selection, into: Mapping[str, object]) -> LoadReport:
        """Load and report. With `fallback`, continue with the next older checkpoint while one proves damaged.

        All ranks raise the same error in the same phase, so either all of them continue or none does.
        """
        skipped: tuple[Skipped, ...] = ()
        self._is_newest = target.step is None and target.place is None
        while True:
            with self._watch.phase("resolve"):
                resolved = self._resolve(target, skipped)
            if self._options.resumes is not None:
                self._options.resumes.earlier = resolved.earlier_resumes
            if resolved.place is None and self._options.continues:
                raise _outside(target, self._foreign)
            try:
                return self.fill(
                    into,
                    lambda: self._open(target, resolved),  # noqa: B023 - at once
                    epoch=resolved.epoch,
                    skipped=resolved.skipped,
                )
            except HoldfastError as error:
                if resolved.place is None or not is_damage(error):
                    raise
                skipped = (*resolved.skipped, Skipped(resolved.place, error.message))
                if not self._options.fallback or self._is_mixed:
                    error.action = self._advice(target, skipped, error.action)
                    raise
                self._warn(skipped[-1:])
                if self._located is not None and self._located.run is not None:  # on rank 0
                    remember_damage(self._storage, self._located.run, resolved.place, error)

    def end_lease(self) -> None:
        """Let the checkpoint that was read be deleted."""
        if self._lease is not None:
            self._lease.end()

    @outside_inference_mode()
    def fill(
        self,
        into: Mapping[str, object],
        find: Callable[[], Opened],
        *,
        epoch: int | None,
        skipped: Sequence[Skipped] = (),
    ) -> LoadReport:
        """Fill `into` from the checkpoint that `find` returns; `epoch` was the newest epoch of its run before that."""
        with self._watch.phase("match"):
            bound, names = self._match(into, find)
        checkpoint = bound.opened.checkpoint
        filling = Filling(checkpoint, bound.binding, bound.table.parts, self._rank, self._deadline)
        if self._options.fallback and self._options.may_keep:
            with self._watch.phase("check"):
                self._together(checkpoint).read(filling.plan_check)
            self._is_mixed = True
        together = self._together(checkpoint)
        with partly_filled_on_errors(into, bound.binding, together):
            with self._watch.phase("read"):
                cost = self._read(together, filling, step=checkpoint.record.step)
            with self._watch.phase("finish"):
                state = self._finish(filling, checkpoint)
        if bound.binding.reseeded and self._channel.rank == 0:
            _log.warning("seeded anew, because another number of ranks saved it: %s", ", ".join(bound.binding.reseeded))
        is_whole = self._is_whole(bound, names, filling)
        passed = skipped[0].place if skipped else None
        self._note(bound, names, epoch, state, is_whole=is_whole, passed=passed)
        return self._report(bound, names, filling, cost, state, skipped)

    def _match(self, into: Mapping[str, object], find: Callable[[], Opened]) -> tuple[_BoundLoad, Names]:
        """Bind `into` on all ranks and compare the names. Returns this rank's binding, and the names that differ on all
        ranks together."""
        bound = attempt(lambda: self._bind(find(), into))
        names = self._channel.exchange(
            "match",
            told(bound, lambda mine: mine.names),
            lambda ranks: self._compare(ranks, done(bound)),
            self._deadline,
            takes=Names,
            gives=Names,
        )
        return done(bound), names

    def _read(self, together: CooperativeReading, filling: Filling, *, step: int) -> ReadCost:
        """Read the bytes into the live state."""
        what = of_first_rank("loading" if step == NO_STEP else f"loading step {step}", self._channel.world_size)
        with progress(what, shown=self._channel.rank == 0, after_s=PATIENCE_S) as meter:
            return together.read(filling.plan, meter=meter)

    def _finish(self, filling: Filling, checkpoint: StoredState) -> object:
        """Put the values in place, on all ranks, and return the whole tree. Refuses files that changed as they were
        read."""

        def finish() -> object:
            checkpoint.check_unchanged(all_files=False)
            return filling.finish()

        state = attempt(finish)
        self._channel.confirm("finish", state, self._deadline)
        return done(state)

    def _is_whole(self, bound: _BoundLoad, names: Names, filling: Filling) -> bool:
        """Whether everything stored was loaded unchanged, and everything live was filled."""
        options = self._options
        if options.mapping or options.ignores_unexpected or filling.cast or names.missing or names.unexpected:
            return False
        if bound.opened.checkpoint.record.place is None:  # of another system: no run has it
            return False
        # A selection may exclude nothing, as where the checkpoint was saved with the same one.
        select, (stored, nodes) = self._options.select(), (bound.table.stored, bound.table.nodes)
        if select is None:
            return True
        values = (name for name in nodes if is_leaf(name, nodes))
        return stored.keys() <= set(bound.binding.loaded) and all(map(select.covers, values))

    def _report(
        self,
        bound: _BoundLoad,
        names: Names,
        filling: Filling,
        cost: ReadCost,
        state: object,
        skipped: Sequence[Skipped],
    ) -> LoadReport:
        checkpoint, binding = bound.opened.checkpoint, bound.binding
        record = checkpoint.record
        return LoadReport(
            step=record.step,
            place=str(record.place or ""),
            path=checkpoint.folder,
            state=state,
            loaded=tuple(binding.loaded),
            missing=names.missing,
            unexpected=names.unexpected,
            resharded=filling.resharded,
            cast=filling.cast,
            on_meta=names.on_meta,
            reseeded=tuple(binding.reseeded),
            diverged=record.diverged,
            verified=self._options.verify and checkpoint.has_digests,
            read_nbytes=cost.read_nbytes,
            verify_s=cost.verify_s,
            needed_nbytes=filling.needed_nbytes,
            seconds=self._watch.seconds,
            skipped=tuple((str(one.place), one.reason) for one in skipped),
            sources=_sources(checkpoint, cost),
        )

    def _together(self, checkpoint: StoredState) -> CooperativeReading:
        return CooperativeReading(
            checkpoint,
            self._storage.limit,
            self._channel,
            self._deadline,
            verify=self._options.verify,
            memory_nbytes=self._options.memory_budget,
            bandwidths=self._options.bandwidths,
        )

    def _note(
        self, bound: _BoundLoad, names: Names, epoch: int | None, state: object, *, is_whole: bool, passed: Place | None
    ) -> None:
        """Record for this process which objects of `state` were filled, from which checkpoint, and instead of which
        damaged one, and which entries not whole."""
        (checkpoint, run), continues = bound.opened, self._options.continues
        kept = bound.table.partly_kept()
        targets = bound.binding.targets
        whole = [target for target in targets if target.source not in kept] if kept else targets
        filled = frozenset(map(_name_of, whole))
        equal = MadeEqual(filled, frozenset(self._ranks))
        if run is None:
            load = Load(checkpoint.storage.resolved(), "", None, 0, continues, is_whole, equal=equal)
        else:
            assert epoch is not None, "a run with a checkpoint has an epoch"
            root, record = run.storage.resolved(), checkpoint.record
            load = Load(
                root,
                run.run_id,
                record.place,
                epoch,
                continues,
                is_whole,
                passed=passed,
                equal=equal,
                has_commit=record.in_history,
                step=record.step,
                is_restore=self._options.resumes is not None,
                is_newest=self._is_newest,
                left=() if is_whole else left_out(state, bound.table, self._options.select(), names.missing),
            )
        note_filled(load, state, bound.binding, is_whole=is_whole)

    @collector_paused()
    def _bind(self, opened: Opened, into: Mapping[str, object]) -> _BoundLoad:
        """Match names on this rank; changes nothing."""
        checkpoint = opened.checkpoint
        options, body = self._options, checkpoint.manifest.body
        select, cast = options.select(), options.cast()
        stored, rules = stored_tensors(checkpoint.manifest), options.mapping
        if not rules and isinstance(checkpoint, ForeignState):
            rules = number_rules(into, lambda name: name in stored or name in checkpoint.nodes)
        table = mapped(rules, stored, body.aliases, checkpoint.nodes)
        binding = bind(
            into,
            table.stored,
            table.aliases,
            table.nodes,
            strict=False,
            rank=self._channel.rank,
            world_size=self._channel.world_size,
            terms=Terms(
                select,
                cast,
                table.equal,
                table.partly_kept(),
                is_strict=options.strict,
                ignores_unexpected=options.ignores_unexpected,
                dropped=table.dropped,
                recast=table.recast,
            ),
            device=options.device,
        )
        return _BoundLoad(opened, binding, table, Names.of(binding, {"select": select, "cast": cast}))

    def _resolve(self, target: Selection, skipped: tuple[Skipped, ...]) -> _Resolved:
        """The checkpoint that rank 0 finds, for all ranks: a run's head may move, so each rank might find another."""

        def find(_: list[bytes]) -> _Resolved:
            try:
                located, passed = self._find(target, skipped)
            except NotFoundError as error:
                self._foreign = foreign_instead(error, target, self._storage)
                return _Resolved(None, self._seen(self._foreign), None, (), is_foreign=True)
            self._located = located
            self.end_lease()
            self._lease = leased(located)
            seal, commit = located.sealed.seal, located.sealed.commit
            self._warn(passed[len(skipped) :])
            self._warn_of_lost_head(target, located)
            place = None if commit is None else commit.place
            earlier = self._begin_resume(located)
            return _Resolved(place, seal.checkpoint_id, located.epoch, passed, earlier)

        self._located = self._foreign = None
        try:
            return self._channel.exchange("resolve", b"", find, self._deadline, takes=bytes, gives=_Resolved)
        except CorruptError as error:
            if not self._options.fallback:
                error.action = self._advice(target, (), error.action)
            raise

    def _find(self, target: Selection, skipped: tuple[Skipped, ...]) -> tuple[Located, tuple[Skipped, ...]]:
        if self._options.fallback and not is_folder(self._storage):
            return resolve_sound(target, self._storage, skipped, self._options.resumes)
        return resolve(target, self._storage), ()

    def _begin_resume(self, located: Located) -> int:
        """Record on rank 0 that this job resumes a checkpoint, if it does; returns how many jobs did so before."""
        resumes, run, commit = self._options.resumes, located.run, located.sealed.commit
        if resumes is None or run is None or commit is None:
            return 0
        if not self._options.fallback:
            resumes.check(run, commit.place)
        return resumes.begin(run, commit.place, located.epoch or 0)

    def _advice(self, target: Selection, skipped: tuple[Skipped, ...], action: str) -> str:
        """The advice about a damaged checkpoint: the next older one that loads, which rank 0 looks for."""

        def look(_: list[bytes]) -> bytes:
            if self._located is not None and self._located.run is not None:
                commit = self._located.sealed.commit
                if commit is not None and self._located.run.is_removed(commit.place):
                    return b"It was removed during this load, so load another one."
            seal = resolve_sound(target, self._storage, skipped)[0].sealed.seal
            return self._options.older(Selection(target.location, place=seal.place), seal.step).encode()

        try:
            return self._channel.exchange("advice", b"", look, self._deadline).decode()
        except HoldfastError:
            # There is no older one, or the search failed; the error before that matters more.
            return action

    def _warn(self, skipped: Sequence[Skipped]) -> None:
        if self._channel.rank == 0:
            for one in skipped:
                what = "is damaged" if one.is_damaged else "ends the jobs that resume it"
                _log.warning("checkpoint %s %s, falling back to an older one: %s", one.place, what, one.reason)

    def _warn_of_lost_head(self, target: Selection, located: Located) -> None:
        """Warn where a checkpoint beyond the head of a run, which this loads, has no commit."""
        if located.run is None or target.step is not None or target.place is not None:
            return
        assert located.sealed.commit is not None
        text = lost_head(located.run, located.sealed.commit, newest=located.epoch or 0)
        if text is not None:
            _log.warning("%s", text)

    def _open(self, target: Selection, resolved: _Resolved) -> Opened:
        """Open the checkpoint of rank 0 on this rank. Raises `StorageError` if this rank finds another one there."""
        if self._foreign is not None:
            return Opened(self._foreign, None)
        if self._located is not None:
            return Opened.of(self._located)
        if resolved.is_foreign:
            found = foreign_at(target, self._storage)
            opened = Opened.of(resolve(target, self._storage)) if found is None else Opened(found, None)
        else:
            opened = Opened.of(resolve(Selection(target.location, place=resolved.place), self._storage))
        if self._seen(opened.checkpoint) != resolved.checkpoint_id:
            raise StorageError(
                f"rank {self._channel.rank} and rank 0 find different checkpoints at '{target}'.",
                code="storage.not_shared",
                action="Give all ranks one path on a file system that all nodes share.",
                path=target.root,
                rank=self._channel.rank,
            )
        return opened

    def _seen(self, state: StoredState) -> str:
        """A text that differs between ranks that see other checkpoints at one path."""
        return state.seen_content if self._channel.world_size > 1 else state.record.identity

    def _compare(self, ranks: Sequence[Names], mine: _BoundLoad) -> Names:
        stored, nodes, options = mine.table.stored, mine.table.nodes, self._options
        try:
            return compared(
                ranks,
                stored,
                nodes,
                strict=options.strict,
                allow_empty=options.allow_empty,
                select=options.select(),
            )
        except IncompatibleError as error:
            if error.code == "incompatible.names" and self._foreign is not None:
                error.action += names_advice(self._foreign.record.kind)
            raise


def _sources(checkpoint: StoredState, cost: ReadCost) -> tuple[ReadSource, ...]:
    """The sources of the bytes that this rank needed: by tier, and by the rank that alone could read them."""
    sums: dict[tuple[Tier, int], int] = {}
    for file, nbytes in cost.needed.items():
        copy = checkpoint.nearest(file)
        sums[copy.tier, copy.holder] = sums.get((copy.tier, copy.holder), 0) + nbytes
    found = sorted(sums.items(), key=lambda each: (each[0][0].distance, each[0][1]))
    return tuple(
        ReadSource(tier.value, None if holder == EVERY_RANK else holder, nbytes) for (tier, holder), nbytes in found
    )


def _outside(target: Selection, foreign: ForeignState | None) -> ConfigurationError:
    kind = "a checkpoint's folder" if foreign is None else foreign.record.kind
    return ConfigurationError(
        f"'{target}' is {kind}, outside any history, so no run can continue from it.",
        code="config.continues",
        action="Name the checkpoint by its run, as RUN@step=700 or RUN@3.12, or leave continues=True out.",
        path=target.root,
    )
