"""`load`: resolve, match names, read, put values in place. The mirror image of `save`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import msgspec
from torch.distributed import ProcessGroup

from holdfast.control.channel import Channel, Deadline
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.errors import CorruptError, HoldfastError, StorageError
from holdfast.format.names import own_part
from holdfast.format.records import Place
from holdfast.loading.filling import Filling
from holdfast.loading.together import Together
from holdfast.phases import Stopwatch, attempt, collector_paused
from holdfast.reports import LoadReport
from holdfast.run.checkpoint import Checkpoint
from holdfast.run.fallback import Skipped, is_damage, resolve_sound
from holdfast.run.history import Located, is_folder, resolve
from holdfast.run.paths import Target, parse, storage_at
from holdfast.run.session import JOB
from holdfast.state.bind import Binding, bind
from holdfast.state.differences import Stored, difference
from holdfast.transfer.timed import TimedStorage

_log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    into: Mapping[str, object],
    *,
    strict: bool = True,
    fallback: bool = False,
    verify: bool = True,
    group: ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Fill `into` from a checkpoint, whatever layout it was saved from, and return when everything is in place.

    Blocking and collective over `group` (default: the job); one plain process is fine too. `path` is a run (its head),
    ``RUN@step=700``, ``RUN@3.12``, or a checkpoint folder. Tensors are filled in place and keep their identity, entries
    of dicts and lists are replaced in place, tuples are rebuilt (``report.state`` is the whole tree). Optimizer state
    is built from the checkpoint in its saved dtype. With ``strict`` every name must be on both sides; without, what
    both have is loaded and the report lists the rest. ``verify=False`` skips the digests of tensor data.

    With ``fallback`` a checkpoint that turns out to be damaged or incomplete is passed over, on all ranks together, and
    the next older one on its lineage is loaded instead; each is logged as a warning, and ``report.skipped`` says why.
    The next save continues from what was loaded, as after a rollback. Without, the error says which older one to load.

    Names, dtypes and shapes are compared before anything is changed. An error after that leaves `into` partly filled,
    on every rank: load again, from this or another checkpoint, before using it.

    Raises:
        NotFoundError: nothing is there; says what is near.
        IncompatibleError: names, dtypes or shapes differ; lists them.
        CorruptError: stored bytes are damaged; names the file and the tensors. With ``fallback``: of all checkpoints.
        StorageError, DeadlineError: as in `save`.
    """
    target = parse(path)
    channel = default_channel("load", group)
    rank = group_ranks(group)[channel.rank]
    deadline = Deadline(timeout_s)
    with TimedStorage(storage_at(target.root), timeout_s=deadline.for_storage_s) as storage:
        loading = _Loading(channel, deadline, storage, rank, strict=strict, fallback=fallback, verify=verify)
        return loading.run(target, into)


class _Resolved(msgspec.Struct, frozen=True, array_like=True):
    """Which checkpoint all ranks load: its place in the run (None for a folder outside any history) and its id, the
    newest epoch of the run before it was looked up, and what was passed over."""

    place: Place | None
    checkpoint_id: str
    epoch: int | None
    skipped: tuple[Skipped, ...]


class _Names(msgspec.Struct, frozen=True, array_like=True):
    """Names on one side only, as one rank sees them."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Loading:
    """One load on one rank."""

    def __init__(
        self,
        channel: Channel,
        deadline: Deadline,
        storage: TimedStorage,
        rank: int,
        *,
        strict: bool,
        fallback: bool,
        verify: bool,
    ) -> None:
        self._channel = channel
        self._storage = storage
        self._rank = rank
        self._deadline = deadline
        self._strict = strict
        self._fallback = fallback
        self._verify = verify
        self._watch = Stopwatch()

    def run(self, target: Target, into: Mapping[str, object]) -> LoadReport:
        """Load and report. With `fallback`, go on with the next older checkpoint as long as one proves damaged.

        All ranks raise the same error for the same phase, so all of them go on together or none does.
        """
        skipped: tuple[Skipped, ...] = ()
        while True:
            found: list[Located] = []
            with self._watch.phase("resolve"):
                resolved = self._resolve(target, skipped, found)
            try:
                return self._load(target, resolved, found, into)
            except HoldfastError as error:
                if resolved.place is None or not is_damage(error):
                    raise
                skipped = (*resolved.skipped, Skipped(resolved.place, error.message))
                if not self._fallback:
                    error.action = self._advice(target, skipped, error.action)
                    raise
                self._warn(skipped[-1:])

    def _load(
        self, target: Target, resolved: _Resolved, found: list[Located], into: Mapping[str, object]
    ) -> LoadReport:
        bound: list[tuple[Checkpoint, Binding, dict[str, Stored]]] = []

        @collector_paused()
        def match() -> bytes:
            checkpoint = Checkpoint(found[0] if found else self._follow(target, resolved))
            stored = _stored(checkpoint)
            aliases = checkpoint.manifest.body.aliases
            rank, world_size = self._channel.rank, self._channel.world_size
            binding = bind(into, stored, aliases, checkpoint.nodes, strict=False, rank=rank, world_size=world_size)
            bound.append((checkpoint, binding, stored))
            return msgspec.msgpack.encode(_Names(tuple(binding.missing), tuple(binding.unexpected)))

        with self._watch.phase("match"):
            names = self._channel.exchange(
                "match", attempt(match), lambda payloads: self._compare(payloads, bound[0]), self._deadline
            )
        checkpoint, binding, _ = bound[0]
        together = Together(checkpoint, self._storage, self._channel, self._deadline)
        filling = Filling(checkpoint, binding, self._rank)
        with self._watch.phase("read"):
            read_nbytes = together.read(filling.plan, verify=self._verify)
        with self._watch.phase("finish"):
            state: list[object] = []
            self._channel.collect("finish", attempt(lambda: _finish(binding, state)), self._deadline)
        located = checkpoint.located
        if located.run is not None and located.commit is not None:
            assert resolved.epoch is not None, "a run with a commit has an epoch"
            JOB.note_loaded(located.storage.uri, located.run.run_id, located.commit.place, seen=resolved.epoch)
        difference_ = msgspec.msgpack.decode(names, type=_Names)
        return LoadReport(
            step=located.seal.step,
            place=str(located.seal.place),
            path=checkpoint.folder,
            state=state[0],
            loaded=tuple(binding.loaded),
            missing=difference_.missing,
            unexpected=difference_.unexpected,
            resharded=filling.resharded,
            diverged=checkpoint.manifest.body.diverged,
            read_nbytes=read_nbytes,
            needed_nbytes=filling.needed_nbytes,
            seconds=self._watch.seconds,
            skipped=tuple((str(one.place), one.reason) for one in resolved.skipped),
        )

    def _resolve(self, target: Target, skipped: tuple[Skipped, ...], found: list[Located]) -> _Resolved:
        """Which checkpoint rank 0 found (added to `found` there): a run's head may move while ranks look."""

        def find(_: list[bytes]) -> bytes:
            located, passed = self._find(target, skipped)
            found.append(located)
            place = None if located.commit is None else located.commit.place
            self._warn(passed[len(skipped) :])
            return msgspec.msgpack.encode(_Resolved(place, located.seal.checkpoint_id, located.epoch, passed))

        try:
            answer = self._channel.exchange("resolve", b"", find, self._deadline)
        except CorruptError as error:
            if not self._fallback:
                error.action = self._advice(target, (), error.action)
            raise
        return msgspec.msgpack.decode(answer, type=_Resolved)

    def _find(self, target: Target, skipped: tuple[Skipped, ...]) -> tuple[Located, tuple[Skipped, ...]]:
        if self._fallback and not is_folder(self._storage):
            return resolve_sound(target, self._storage, skipped)
        return resolve(target, self._storage), ()

    def _advice(self, target: Target, skipped: tuple[Skipped, ...], action: str) -> str:
        """What to do about a damaged checkpoint: which older one loads, as rank 0 finds."""

        def look(_: list[bytes]) -> bytes:
            seal = resolve_sound(target, self._storage, skipped)[0].seal
            name = Target(target.root, place=seal.place)
            return f"Load '{name}' (step {seal.step}), or with fallback=True, or restore what is damaged.".encode()

        try:
            return self._channel.exchange("advice", b"", look, self._deadline).decode()
        except HoldfastError:
            # There is none, or it cannot be found out; what went wrong before matters more.
            return action

    def _warn(self, skipped: Sequence[Skipped]) -> None:
        if self._channel.rank == 0:
            for one in skipped:
                _log.warning("checkpoint %s is damaged, going back to an older one: %s", one.place, one.reason)

    def _follow(self, target: Target, resolved: _Resolved) -> Located:
        """The checkpoint that rank 0 found, as this rank sees it."""
        located = resolve(Target(target.root, place=resolved.place), self._storage)
        if located.seal.checkpoint_id != resolved.checkpoint_id:
            raise StorageError(
                f"rank {self._channel.rank} finds another checkpoint at '{target}' than rank 0.",
                code="storage.not_shared",
                action="Give all ranks one path on a file system that all nodes share.",
                path=target.root,
                rank=self._channel.rank,
            )
        return located

    def _compare(self, payloads: Sequence[bytes], mine: tuple[Checkpoint, Binding, dict[str, Stored]]) -> bytes:
        """Names that some rank misses, and names that no rank expects. Raises `IncompatibleError` when strict."""
        ranks = [msgspec.msgpack.decode(payload, type=_Names) for payload in payloads]
        missing = sorted(set().union(*(rank.missing for rank in ranks)))
        shared = set(ranks[0].unexpected).intersection(*(rank.unexpected for rank in ranks[1:]))
        # Of what belongs to one rank alone, only that rank can say that it expects it.
        own = {name for rank in ranks for name in rank.unexpected if own_part(name) is not None}
        unexpected = sorted(shared | own)
        if self._strict and (missing or unexpected):
            raise difference(missing, unexpected, mine[2], mine[0].nodes)
        return msgspec.msgpack.encode(_Names(tuple(missing), tuple(unexpected)))


def _stored(checkpoint: Checkpoint) -> dict[str, Stored]:
    body = checkpoint.manifest.body
    known = {
        kind: Stored(body.dtype_table[kind[0]], body.shape_table[kind[1]])
        for kind in set(zip(body.dtypes, body.shapes, strict=True))
    }
    return dict(zip(body.names, map(known.__getitem__, zip(body.dtypes, body.shapes, strict=True)), strict=True))


def _finish(binding: Binding, state: list[object]) -> bytes:
    state.append(binding.finish())
    return b""
