"""`save`: describe, plan, write, commit. Three exchanges of small messages; storage alone decides.

1. *describe*: every rank sends digests of its layout, its values and its undeclared replicas.
2. *plan*: one rank per distinct layout sends it; rank 0 plans, takes the next place and publishes the manifest.
3. *commit*: every rank derives its share from the manifest, as read back from storage, and writes its data file; rank 0
   seals and commits.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import msgspec
import numpy as np
import xxhash

from holdfast.control.channel import Channel, Deadline
from holdfast.control.torch_store import default_channel
from holdfast.errors import StateError, StorageError
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format import values as value_codec
from holdfast.format.container import Files
from holdfast.format.manifest import DecodedManifest
from holdfast.format.records import Commit, FileSeal, Place, Seal, SealDigest
from holdfast.format.values import Node
from holdfast.phases import Stopwatch, attempt
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import Whole
from holdfast.plan.save import Identity, RankMessage, encode_plan, plan_save
from holdfast.reports import SaveReport
from holdfast.run.checkpoint import pack_values
from holdfast.run.history import Run
from holdfast.run.paths import parse, storage_at
from holdfast.run.session import JOB
from holdfast.state.flatten import FlatState, flatten
from holdfast.state.memory import digest_of, source_of
from holdfast.storage.base import Bytes, Storage
from holdfast.transfer.buffers import pipeline_pool
from holdfast.transfer.writer import Source, write_file


def save(
    run: str | os.PathLike[str],
    state: Mapping[str, object],
    step: int,
    *,
    metrics: Mapping[str, SupportsFloat] | None = None,
    takeover: bool = False,
    timeout_s: float = 600.0,
) -> SaveReport:
    """Save `state` into `run` and return when the checkpoint is committed and durable.

    Blocking and collective: every rank of the job calls it with the same `run` and `step`; one plain process is fine
    too. `run` is created where nothing is. A run that has a history must have been loaded from by this job, unless
    ``takeover=True``. `metrics` are recorded with the commit. Extra memory is two buffers of 8 MiB.

    On any error every rank raises, no part of the checkpoint becomes visible, and the head stays what it was; after a
    load of an older checkpoint the head is the one that was loaded as soon as a save begins to write.

    Raises:
        StateError: something in `state` cannot be saved truthfully, or ranks disagree about it.
        ConfigurationError: `run` is not a run, or holds a history that was not loaded.
        StorageError: the store failed; names the path.
        DeadlineError: ranks named in the message did not answer within `timeout_s`.
        FencedError: another job opened a newer epoch of the run.
    """
    if type(step) is not int or step < 0:
        raise ValueError(f"step is a whole number from 0 on, not {step!r}")
    numbers = _numbers(metrics or {})
    storage = storage_at(_run_root(run))
    channel = default_channel(f"save of step {step}")
    request = _Request(storage, step, numbers, takeover, time.time())
    return _Saving(channel, Deadline(timeout_s), request).run(state)


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    for name, value in metrics.items():
        if type(name) is not str or not isinstance(value, SupportsFloat):
            raise TypeError(f"a metric is a number under a string, not {name!r}: {value!r}")
    return {name: float(value) for name, value in metrics.items()}


def _run_root(run: str | os.PathLike[str]) -> str:
    target = parse(run)
    if target.step is not None or target.place is not None:
        raise ValueError(f"save takes a run, not one checkpoint of it: {os.fspath(run)!r}")
    return target.root


@dataclass(frozen=True)
class _Request:
    storage: Storage
    step: int
    metrics: dict[str, float]
    takeover: bool
    created: float


class _Described(msgspec.Struct, frozen=True, array_like=True):
    """A rank's state in brief. `compared` digests all tensors that are held by several ranks without being declared
    replicated, `values` the table of values."""

    layout: bytes
    columns: bytes
    compared: bytes
    values: bytes


class _Questions(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 wants to know: the body from each rank in `bodies`, and whether details must be compared."""

    bodies: tuple[int, ...]
    details: bool


class _Details(msgspec.Struct, frozen=True, array_like=True):
    """Answers to `_Questions`: a body, and digests per compared tensor with the encoded values."""

    body: bytes
    compared: dict[str, bytes]
    values: bytes


class _Planned(msgspec.Struct, frozen=True, array_like=True):
    """Where the manifest is, and its digest."""

    folder: str
    place: Place
    nbytes: int
    digest: str


class _Written(msgspec.Struct, frozen=True, array_like=True):
    """A rank's data file: its index (-1: the rank has none), size, and digest of its digest table."""

    index: int
    nbytes: int
    digest: str


class _Saving:
    """One save on one rank."""

    def __init__(self, channel: Channel, deadline: Deadline, request: _Request) -> None:
        self._channel = channel
        self._deadline = deadline
        self._request = request
        self._storage = request.storage
        self._watch = Stopwatch()

    def run(self, state: Mapping[str, object]) -> SaveReport:
        local: list[_Local] = []
        with self._watch.phase("describe"):
            described = attempt(lambda: _describe(state, local, alone=self._channel.world_size == 1))
            messages: list[_Described] = []

            def ask(payloads: list[bytes]) -> bytes:
                messages.extend(msgspec.msgpack.decode(payload, type=_Described) for payload in payloads)
                return msgspec.msgpack.encode(_questions(messages))

            asked = self._channel.exchange("describe", described, ask, self._deadline)
            questions = msgspec.msgpack.decode(asked, type=_Questions)
        mine = local[0]
        with self._watch.phase("plan"):
            details = attempt(lambda: msgspec.msgpack.encode(mine.answer(questions, self._channel.rank)))
            coordinator = _Coordinator(self._request, mine)
            answer = self._channel.exchange(
                "plan", details, lambda payloads: coordinator.plan(messages, questions, payloads), self._deadline
            )
            planned = msgspec.msgpack.decode(answer, type=_Planned)
        with self._watch.phase("write"):
            share = _Share(self._storage, planned, mine, self._channel.rank)
            written = attempt(lambda: msgspec.msgpack.encode(share.write(coordinator.values)))
        with self._watch.phase("commit"):
            committed = self._channel.exchange("commit", written, coordinator.commit, self._deadline)
        commit = msgspec.msgpack.decode(committed, type=Commit)
        return SaveReport(
            step=commit.step,
            place=str(commit.place),
            path=self._storage.path(f"checkpoints/{commit.checkpoint}"),
            nbytes=commit.nbytes,
            written_nbytes=share.written_nbytes,
            num_tensors=len(share.manifest.body.names),
            seconds=self._watch.seconds,
        )


@dataclass(frozen=True)
class _Local:
    """This rank's state and layout."""

    flat: FlatState
    layout: RankLayout
    values: bytes

    def answer(self, questions: _Questions, rank: int) -> _Details:
        body = self.layout.body if rank in questions.bodies else b""
        if not questions.details:
            return _Details(body, {}, b"")
        return _Details(body, _compared_digests(self.flat), self.values)


def _describe(state: Mapping[str, object], local: list[_Local], *, alone: bool) -> bytes:
    flat = flatten(state)
    layout = RankLayout.of([tensor.layout for tensor in flat.tensors.values()], flat.aliases)
    mine = _Local(flat, layout, value_codec.encode(flat.nodes))
    local.append(mine)
    compared = b"" if alone else xxhash.xxh3_128_digest(b"".join(_compared_digests(flat).values()))
    values = xxhash.xxh3_128_digest(mine.values)
    return msgspec.msgpack.encode(_Described(layout.digest, layout.columns, compared, values))


def _compared_digests(flat: FlatState) -> dict[str, bytes]:
    """Digests of the tensors that other ranks may hold too, though nobody declared them replicated."""
    digests = {}
    for name, tensor in flat.tensors.items():
        spec = tensor.layout.spec
        if isinstance(spec, Whole) and spec.replicas == "compare":
            digests[name] = digest_of(tensor.memory[0])
    return digests


def _questions(messages: Sequence[_Described]) -> _Questions:
    first: dict[bytes, int] = {}
    for rank, message in enumerate(messages):
        first.setdefault(message.layout, rank)
    alike = len({(message.layout, message.compared, message.values) for message in messages}) == 1
    return _Questions(tuple(first.values()), details=not alike)


class _Coordinator:
    """What rank 0 does between the exchanges; on other ranks it only stands by."""

    def __init__(self, request: _Request, mine: _Local) -> None:
        self._request = request
        self._storage = request.storage
        #: The values of all ranks together, as rank 0 writes them.
        self.values = mine.flat.nodes
        self._run: Run | None = None
        self._manifest = b""
        self._planned: _Planned | None = None

    def plan(self, messages: Sequence[_Described], questions: _Questions, payloads: Sequence[bytes]) -> bytes:
        """Plan, take the next place of the run, and publish the manifest."""
        answers = [msgspec.msgpack.decode(payload, type=_Details) for payload in payloads]
        if questions.details:
            _check_compared([answer.compared for answer in answers])
            self.values = _unite([value_codec.decode(answer.values) for answer in answers])
        bodies = {messages[rank].layout: answers[rank].body for rank in questions.bodies}
        plan = plan_save([RankMessage(message.layout, message.columns) for message in messages], bodies)
        # Only a state that can be saved opens an epoch: after a rollback that moves the head.
        self._run = Run.create(self._storage)
        place = JOB.begin(self._run, takeover=self._request.takeover, world_size=len(messages))
        identity = Identity(
            checkpoint_id=secrets.token_hex(8),
            run_id=self._run.run_id,
            place=place,
            step=self._request.step,
            created=self._request.created,
            metrics=self._request.metrics,
        )
        self._manifest = encode_plan(
            plan,
            identity=identity,
            values_nbytes=len(pack_values(self.values)),
            value_paths=tuple(sorted(self.values)),
        )
        folder = records.folder_name(identity.step, identity.checkpoint_id)
        self._storage.create(records.checkpoint_key(folder, fmt.NAME), self._manifest)
        self._planned = _Planned(folder, place, len(self._manifest), xxhash.xxh3_128_hexdigest(self._manifest))
        return msgspec.msgpack.encode(self._planned)

    def commit(self, payloads: Sequence[bytes]) -> bytes:
        """Seal and commit: all data files are durable."""
        assert self._planned is not None
        assert self._run is not None
        body = fmt.decode(self._manifest, path=self._planned.folder).body
        written = {w.index: w for w in (msgspec.msgpack.decode(payload, type=_Written) for payload in payloads)}
        files = tuple(
            FileSeal(fmt.file_name(index), written[index].nbytes, written[index].digest)
            for index in range(body.num_files)
        )
        seal = Seal(
            checkpoint_id=body.checkpoint_id,
            place=self._planned.place,
            step=body.step,
            manifest=FileSeal(fmt.NAME, self._planned.nbytes, self._planned.digest),
            files=files,
        )
        sealed = records.encode(seal)
        self._run.check_fence(self._planned.place.epoch)
        self._storage.create(records.checkpoint_key(self._planned.folder, records.SEAL_NAME), sealed)
        commit = Commit(
            place=self._planned.place,
            step=body.step,
            checkpoint=self._planned.folder,
            checkpoint_id=body.checkpoint_id,
            seal=SealDigest(len(sealed), records.digest(sealed)),
            nbytes=sum(file.nbytes for file in files),
            created=body.created,
            metrics={name: records.to_metric(value) for name, value in body.metrics.items()},
        )
        self._run.publish(commit)
        return msgspec.msgpack.encode(commit)


def _check_compared(digests: Sequence[Mapping[str, bytes]]) -> None:
    """Plain tensors that several ranks hold under one name must be equal to be stored once."""
    holders: dict[str, dict[bytes, list[int]]] = {}
    for rank, named in enumerate(digests):
        for name, digest in named.items():
            holders.setdefault(name, {}).setdefault(digest, []).append(rank)
    differing = sorted(name for name, groups in holders.items() if len(groups) > 1)
    if differing:
        groups = sorted(holders[differing[0]].values())
        more = f" (and {len(differing) - 1} more tensors)" if len(differing) > 1 else ""
        raise StateError(
            f"Tensor {differing[0]!r} is a plain tensor on several ranks, and its copies differ between ranks "
            f"{' and '.join(_ranks(group) for group in groups[:2])}{more}.",
            code="state.diverged",
            action="Make the copies equal, shard it as a DTensor, or give each rank's tensor a name of its own.",
            tensor=differing[0],
        )


def _unite(tables: Sequence[Mapping[str, Node]]) -> dict[str, Node]:
    """The values of all ranks in one table; a path that several ranks hold must have one value."""
    united: dict[str, Node] = {}
    origin: dict[str, int] = {}
    for rank, table in enumerate(tables):
        for path, node in table.items():
            if path not in united:
                united[path], origin[path] = node, rank
            elif value_codec.encode({path: united[path]}) != value_codec.encode({path: node}):  # 1 == True == 1.0
                raise StateError(
                    f"Value {path!r} differs between rank {origin[path]} and rank {rank}.",
                    code="state.diverged",
                    action="Make it equal on all ranks, or give each rank's value a name of its own.",
                    path=path,
                )
    return united


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}{', ...' if len(ranks) > 8 else ''}]"


@dataclass(frozen=True)
class _BytesSource:
    """Bytes as a source."""

    data: Bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read_into(self, start: int, out: Bytes) -> None:
        out[:] = self.data[start : start + len(out)]


class _Share:
    """What one rank writes, derived from the manifest as any reader would."""

    def __init__(self, storage: Storage, planned: _Planned, mine: _Local, rank: int) -> None:
        self._storage = storage
        self._planned = planned
        self._mine = mine
        self._rank = rank
        self.manifest: DecodedManifest
        self.written_nbytes = 0

    def write(self, values: Mapping[str, Node]) -> _Written:
        """Write this rank's data file, durable when it returns."""
        self.manifest = self._read_manifest()
        writers = self.manifest.sequence(self.manifest.body.writers)
        index = int(np.searchsorted(writers, self._rank))
        if index == len(writers) or writers[index] != self._rank:
            return _Written(-1, 0, "")
        layout = Files(self.manifest).layout(index)
        tensors = list(self._mine.flat.tensors.values())
        by_name = dict(zip(self._mine.flat.tensors, tensors, strict=True))
        sources: list[Source] = []
        for entry in layout.entries:
            tensor = by_name[self.manifest.body.names[entry.tensor]]
            sources.append(source_of(tensor.layout, tensor.memory, self._rank, entry.part))
        if layout.values is not None:
            packed = pack_values(dict(values), capacity=layout.values.capacity)
            sources.append(_BytesSource(np.frombuffer(packed, np.uint8)))
        nbytes = layout.data_start + layout.data_nbytes
        writer = self._storage.writer(records.checkpoint_key(self._planned.folder, fmt.file_name(index)), nbytes=nbytes)
        with pipeline_pool() as pool:
            table = write_file(
                writer,
                sources,
                data_start=layout.data_start,
                header=lambda table: container.header(self.manifest, layout, table),
                pool=pool,
            )
        self.written_nbytes = nbytes
        return _Written(index, nbytes, xxhash.xxh3_128_hexdigest(table))

    def _read_manifest(self) -> DecodedManifest:
        key = records.checkpoint_key(self._planned.folder, fmt.NAME)
        path = self._storage.path(key)
        if self._storage.nbytes(key) is None:
            raise StorageError(
                f"rank {self._rank} does not see '{path}', which rank 0 has just written.",
                code="storage.not_shared",
                action="Give all ranks one path on a file system that all nodes share.",
                path=path,
                rank=self._rank,
            )
        data = self._storage.read(key)
        if xxhash.xxh3_128_hexdigest(data) != self._planned.digest:
            raise StorageError(
                f"rank {self._rank} reads other bytes from '{path}' than rank 0 wrote.",
                code="storage.inconsistent",
                action="Check that the file system shows all nodes the same files.",
                path=path,
                rank=self._rank,
            )
        return fmt.decode(data, path=path)
