"""What rank 0 does between the exchanges of a save: plan or reuse a plan, publish the manifest, seal, commit."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import xxhash

from holdfast.errors import StateError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format import values as value_codec
from holdfast.format.records import Commit, FileSeal, Seal, SealDigest
from holdfast.format.values import Node
from holdfast.plan.save import Identity, RankMessage, RankValues, SavePlan, encode_plan, plan_save
from holdfast.run.checkpoint import pack_values
from holdfast.run.history import Run
from holdfast.run.session import JOB
from holdfast.saving.compare import diverged, divergence, unite
from holdfast.saving.local import NUM_TURNS, Local
from holdfast.saving.messages import Answer, Described, Details, Planned, Questions, Written
from holdfast.storage.base import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One call of `save`."""

    storage: Storage
    step: int
    metrics: dict[str, float]
    takeover: bool
    created: float
    strict: bool


Layouts = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class PlanMemory:
    """The last plan for a run: the layouts that it was made for, and the values that have room in it."""

    plan_id: str
    layouts: Layouts
    plan: SavePlan
    value_paths: tuple[tuple[bytes, bytes], ...]
    values: tuple[RankValues, ...]
    num_saves: int = 0

    def has_room(self, messages: Sequence[Described], ranks: Sequence[int]) -> bool:
        """Whether all ranks' values have the same paths as then, and fit into what was reserved for them."""
        if tuple((message.value_paths, message.own_paths) for message in messages) != self.value_paths:
            return False
        room = {block.rank: block.capacity for block in self.values}
        needs = [message.own_nbytes for message in messages]
        needs[0] += messages[0].values_nbytes
        return all(need <= room.get(rank, 0) for rank, need in zip(ranks, needs, strict=True))


class Coordinator:
    """Rank 0's side of one save; on other ranks it only stands by."""

    def __init__(self, request: Request, ranks: Sequence[int], memory: PlanMemory | None) -> None:
        self._request = request
        self._ranks = ranks
        self._storage = request.storage
        self._messages: list[Described] = []
        self._run: Run | None = None
        self._manifest = b""
        self._planned: Planned | None = None
        #: The plan that was used, to be remembered for the next save.
        self.memory = memory
        #: The shared values of all ranks together, as rank 0 writes them; None for its own.
        self.values: dict[str, Node] | None = None

    def ask(self, payloads: Sequence[bytes]) -> bytes:
        """The answer to what all ranks described: the plan of the last save where it fits, else `Questions`."""
        self._messages = [msgspec.msgpack.decode(payload, type=Described) for payload in payloads]
        memory = self.memory
        by_layout: dict[bytes, list[int]] = {}
        by_values: dict[bytes, int] = {}
        for number, message in enumerate(self._messages):
            by_layout.setdefault(message.layout, []).append(number)
            by_values.setdefault(message.values, number)
        planned = memory is not None and memory.layouts == self._layouts()
        questions = Questions(
            bodies=() if planned else tuple(members[0] for members in by_layout.values()),
            values=tuple(by_values.values()) if len(by_values) > 1 else (),
            compare=self._must_compare(list(by_layout.values()), planned=planned),
        )
        asks = questions.bodies or questions.values or questions.compare
        answer: Answer = questions
        if memory is not None and not asks and memory.has_room(self._messages, self._ranks):
            answer = self._publish(memory)
        return msgspec.msgpack.encode(answer)

    def _must_compare(self, groups: Sequence[Sequence[int]], *, planned: bool) -> bool:
        """Whether the digests of single tensors are needed. Ranks of one layout compare one digest of all; ranks of
        different layouts, which may share some tensors, compare when a plan is made and once per turn."""
        if any(len({self._messages[number].compared for number in group}) > 1 for group in groups):
            return True
        if planned:
            assert self.memory is not None
            return len(groups) > 1 and self.memory.num_saves % NUM_TURNS == 0
        # Where only a share was compared so far, all must be now.
        return len(groups) > 1 or self.memory is not None

    def plan(self, questions: Questions, mine: Local, payloads: Sequence[bytes]) -> bytes:
        """Plan with the ranks' details (anew where layouts changed), and publish the manifest."""
        answers = [msgspec.msgpack.decode(payload, type=Details) for payload in payloads]
        self.values = mine.flat.nodes
        found = diverged([answer.compared for answer in answers])
        if found:
            self._complain(found)
        if questions.values:
            self.values = unite({n: value_codec.decode(answers[n].values) for n in questions.values})
        memory = self.memory
        if memory is None or questions.bodies:
            bodies = {self._messages[number].layout: answers[number].body for number in questions.bodies}
            messages = [
                RankMessage(message.layout, answer.columns)
                for message, answer in zip(self._messages, answers, strict=True)
            ]
            plan = plan_save(messages, bodies, ranks=self._ranks)
        else:
            plan = memory.plan
        values = self._values(answers)
        if memory is None or memory.plan is not plan or not _covers(memory.values, values):
            paths = tuple((message.value_paths, message.own_paths) for message in self._messages)
            memory = PlanMemory(secrets.token_hex(8), self._layouts(), plan, paths, values)
        return msgspec.msgpack.encode(self._publish(memory))

    def _layouts(self) -> Layouts:
        return tuple((message.layout, message.columns) for message in self._messages)

    def _complain(self, found: Mapping[str, Sequence[Sequence[int]]]) -> None:
        text = divergence(found)
        action = "Make the copies equal, shard it as a DTensor, or save it as holdfast.PerRank(tensor)."
        if self.memory is None or self._request.strict:
            raise StateError(text, code="state.diverged", action=action, tensor=next(iter(found)))
        _log.warning("step %d: %s One holder's copy is saved. %s", self._request.step, text, action)

    def _values(self, answers: Sequence[Details]) -> tuple[RankValues, ...]:
        """What each rank's file must have room for."""
        assert self.values is not None
        blocks = []
        for number, (rank, answer) in enumerate(zip(self._ranks, answers, strict=True)):
            paths, nbytes = answer.own_paths, self._messages[number].own_nbytes
            if number == 0:
                paths = (*self.values, *paths)
                nbytes += len(pack_values(self.values))
            if paths:
                blocks.append(RankValues(rank, nbytes, tuple(sorted(paths))))
        return tuple(blocks)

    def _publish(self, memory: PlanMemory) -> Planned:
        """Take the next place of the run and publish the manifest of the checkpoint there."""
        # Only a state that can be saved gets here: opening an epoch after a rollback moves the head.
        self._run = Run.create(self._storage)
        place = JOB.begin(self._run, takeover=self._request.takeover, world_size=len(self._messages))
        identity = Identity(
            checkpoint_id=secrets.token_hex(8),
            run_id=self._run.run_id,
            place=place,
            step=self._request.step,
            created=self._request.created,
            metrics=self._request.metrics,
        )
        self.memory = replace(memory, num_saves=memory.num_saves + 1)
        self._manifest = encode_plan(memory.plan, identity=identity, values=memory.values)
        folder = records.folder_name(identity.step, identity.checkpoint_id)
        self._storage.create(records.checkpoint_key(folder, fmt.NAME), self._manifest)
        digest = xxhash.xxh3_128_hexdigest(self._manifest)
        self._planned = Planned(folder, identity.checkpoint_id, place, len(self._manifest), digest, memory.plan_id)
        return self._planned

    def commit(self, payloads: Sequence[bytes]) -> bytes:
        """Seal and commit: all data files are durable."""
        assert self._planned is not None
        assert self._run is not None
        body = fmt.decode(self._manifest, path=self._planned.folder).body
        written = {w.index: w for w in (msgspec.msgpack.decode(payload, type=Written) for payload in payloads)}
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


def _covers(reserved: Sequence[RankValues], needed: Sequence[RankValues]) -> bool:
    """Whether all values have room where they had it, under the same paths."""
    return len(reserved) == len(needed) and all(
        (old.rank, old.paths) == (new.rank, new.paths) and new.nbytes <= old.capacity
        for old, new in zip(reserved, needed, strict=True)
    )
