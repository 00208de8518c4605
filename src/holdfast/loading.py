"""`load`: resolve, match names, read, put values in place. The mirror image of `save`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec
from torch.distributed import ProcessGroup

from holdfast.control.channel import Channel, Deadline
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.errors import StorageError
from holdfast.format.names import own_part
from holdfast.format.records import Place
from holdfast.phases import Stopwatch, attempt, collector_paused
from holdfast.plan.load import Want, resharded
from holdfast.reports import LoadReport
from holdfast.run.checkpoint import Checkpoint
from holdfast.run.history import Located, resolve
from holdfast.run.paths import Target, parse
from holdfast.run.session import JOB
from holdfast.state.bind import Binding, bind
from holdfast.state.differences import Stored, difference
from holdfast.state.memory import LocalPieces
from holdfast.state.targets import MemoryTargets


def load(
    path: str | os.PathLike[str],
    into: Mapping[str, object],
    *,
    strict: bool = True,
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

    Names, dtypes and shapes are compared before anything is changed. An error after that leaves `into` partly filled,
    on every rank: load again, from this or another checkpoint, before using it.

    Raises:
        NotFoundError: nothing is there; says what is near.
        IncompatibleError: names, dtypes or shapes differ; lists them.
        CorruptError: stored bytes are damaged; names the file and the tensors.
        StorageError, DeadlineError: as in `save`.
    """
    channel = default_channel("load", group)
    rank = group_ranks(group)[channel.rank]
    return _Loading(channel, Deadline(timeout_s), rank, strict=strict, verify=verify).run(parse(path), into)


class _Resolved(msgspec.Struct, frozen=True, array_like=True):
    """Which checkpoint all ranks load: its place in the run (None for a folder outside any history) and its id."""

    place: Place | None
    checkpoint_id: str


class _Names(msgspec.Struct, frozen=True, array_like=True):
    """Names on one side only, as one rank sees them."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Loading:
    """One load on one rank."""

    def __init__(self, channel: Channel, deadline: Deadline, rank: int, *, strict: bool, verify: bool) -> None:
        self._channel = channel
        self._rank = rank
        self._deadline = deadline
        self._strict = strict
        self._verify = verify
        self._watch = Stopwatch()

    def run(self, target: Target, into: Mapping[str, object]) -> LoadReport:
        found: list[Located] = []
        with self._watch.phase("resolve"):
            resolved = self._resolve(target, found)
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
        filled = _Filling(checkpoint, binding, self._rank, verify=self._verify)
        with self._watch.phase("read"):
            done = attempt(filled.run)
            self._channel.collect("read", done, self._deadline)
        with self._watch.phase("finish"):
            state: list[object] = []
            self._channel.collect("finish", attempt(lambda: _finish(binding, state)), self._deadline)
        located = checkpoint.located
        if located.run is not None and located.commit is not None:
            JOB.note_loaded(located.storage.uri, located.run.run_id, located.commit.place)
        difference_ = msgspec.msgpack.decode(names, type=_Names)
        return LoadReport(
            step=located.seal.step,
            place=str(located.seal.place),
            path=checkpoint.folder,
            state=state[0],
            loaded=tuple(binding.loaded),
            missing=difference_.missing,
            unexpected=difference_.unexpected,
            resharded=filled.resharded,
            diverged=checkpoint.manifest.body.diverged,
            read_nbytes=filled.read_nbytes,
            needed_nbytes=filled.needed_nbytes,
            seconds=self._watch.seconds,
        )

    def _resolve(self, target: Target, found: list[Located]) -> _Resolved:
        """Which checkpoint rank 0 found (added to `found` there): a run's head may move while ranks look."""

        def find(_: list[bytes]) -> bytes:
            found.append(resolve(target))
            commit, seal = found[0].commit, found[0].seal
            return msgspec.msgpack.encode(_Resolved(None if commit is None else commit.place, seal.checkpoint_id))

        return msgspec.msgpack.decode(self._channel.exchange("resolve", b"", find, self._deadline), type=_Resolved)

    def _follow(self, target: Target, resolved: _Resolved) -> Located:
        """The checkpoint that rank 0 found, as this rank sees it."""
        located = resolve(Target(target.root, place=resolved.place))
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


class _Filling:
    """Reads all that one rank's targets need."""

    def __init__(self, checkpoint: Checkpoint, binding: Binding, rank: int, *, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._binding = binding
        self._rank = rank
        self._verify = verify
        self.resharded: tuple[str, ...] = ()
        self.read_nbytes = 0
        self.needed_nbytes = 0

    def run(self) -> bytes:
        """Fill all targets."""
        checkpoint, targets = self._checkpoint, MemoryTargets()
        wants = self._wants(targets)
        num_files = max(checkpoint.manifest.body.num_files, 1)
        stats = checkpoint.read(wants, targets, verify=self._verify, first_file=self._rank % num_files)
        names = checkpoint.manifest.body.names
        self.resharded = tuple(sorted({names[want.tensor] for want in resharded(checkpoint.files, wants)}))
        self.read_nbytes = stats.bytes_read
        self.needed_nbytes = targets.nbytes
        return b""

    def _wants(self, targets: MemoryTargets) -> list[Want]:
        """What is to be read; the memory of each goes to `targets`."""
        wants = []
        pieces, numbers = LocalPieces(self._rank), self._checkpoint.numbers
        for target in self._binding.targets:
            number = numbers[target.source]
            for box, view in pieces.of(target.local.layout, target.local.memory):
                wants.append(Want(number, box))
                targets.add(view)
        return wants
