"""What rank 0 does between the exchanges of a save: plan or reuse a plan, publish the manifest, seal, commit."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import xxhash

from holdfast.agreement.local import NUM_TURNS, Local
from holdfast.agreement.messages import Compare, Described, Details, Digests, Planned, Questions, Written
from holdfast.agreement.replicas import describe, diverged, unite
from holdfast.checkpoint.reading import pack_values
from holdfast.decoding import decode_msgpack
from holdfast.errors import CorruptError, NotFoundError, StateError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format import values as value_codec
from holdfast.format.patterns import check_matched
from holdfast.format.records import FileSeal, Place
from holdfast.format.values import Node
from holdfast.plan.save import Draft, Identity, RankMessage, RankValues, SavePlan, plan_save
from holdfast.run.complete import Stored, seal_and_commit
from holdfast.run.history import Run
from holdfast.run.session import JOB, NEVER_LOADED, Sources
from holdfast.store.timed import TimedStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One call of `save`; `sources` says what the state was loaded from."""

    storage: TimedStore
    step: int
    metrics: dict[str, float]
    takeover: bool
    created: float
    strict: bool
    sources: Sources = NEVER_LOADED


Layouts = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class PlanMemory:
    """The last plan for a run: the layouts that it was made for, and the values that have room in it."""

    plan_id: str
    layouts: Layouts
    plan: SavePlan
    draft: Draft
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
        #: Numbers of the ranks of each distinct table of values.
        self._by_values: list[list[int]] = []
        self._compare = Compare(())
        #: What the manifest is to be made of once that is compared.
        self._next: PlanMemory | None = None
        self._run: Run | None = None
        self._manifest = b""
        self._planned: Planned | None = None
        #: The plan that was used, to be remembered for the next save.
        self.memory = memory
        #: The shared values of all ranks together, as rank 0 writes them; None for its own.
        self.values: dict[str, Node] | None = None

    def ask(self, payloads: Sequence[bytes]) -> bytes:
        """The answer to what all ranks described: `Questions` where a plan is to be made, else what `_go_on` says."""
        self._messages = [decode_msgpack(payload, Described) for payload in payloads]
        check_matched("select", [message.unmatched for message in self._messages], where="the state")
        by_layout: dict[bytes, int] = {}
        by_values: dict[bytes, list[int]] = {}
        for number, message in enumerate(self._messages):
            by_layout.setdefault(message.layout, number)
            by_values.setdefault(message.values, []).append(number)
        self._by_values = list(by_values.values())
        memory = self.memory
        planned = memory is not None and memory.layouts == self._layouts()
        questions = Questions(
            bodies=() if planned else tuple(by_layout.values()),
            values=tuple(numbers[0] for numbers in self._by_values) if len(by_values) > 1 else (),
        )
        asks = questions.bodies or questions.values
        if memory is None or asks or not memory.has_room(self._messages, self._ranks):
            return msgspec.msgpack.encode(questions)
        return self._go_on(memory)

    def plan(self, questions: Questions, mine: Local, payloads: Sequence[bytes]) -> bytes:
        """Plan with the ranks' `Details` (anew where layouts changed), and go on."""
        answers = [decode_msgpack(payload, Details) for payload in payloads]
        self.values = mine.flat.nodes
        if questions.values:
            ranks = [[self._ranks[number] for number in numbers] for numbers in self._by_values]
            tables = [value_codec.decode(answers[number].values) for number in questions.values]
            self.values = unite(list(zip(ranks, tables, strict=True)))
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
            draft = Draft.of(plan, values)
            memory = PlanMemory(secrets.token_hex(8), self._layouts(), plan, draft, paths, values)
        return self._go_on(memory)

    def compare(self, payloads: Sequence[bytes]) -> bytes:
        """Judge the ranks' `Digests`, and publish the manifest."""
        assert self._next is not None
        answers = [decode_msgpack(payload, Digests) for payload in payloads]
        found = diverged(self._compare.names, dict(zip(self._ranks, answers, strict=True)))
        if found:
            text = describe(found)
            action = "Make the copies equal, shard it as a DTensor, or save it as holdfast.PerRank(tensor)."
            if self.memory is None or self._request.strict:
                raise StateError(text, code="state.diverged", action=action, tensor=found[0].name)
            _log.warning("step %d: %s One holder's copy is saved. %s", self._request.step, text, action)
        return self.publish(self._next, tuple(one.name for one in found))

    def _go_on(self, memory: PlanMemory) -> bytes:
        """Save by the plan in `memory`: ask for what must be compared first, else publish the manifest."""
        self._compare = Compare(self._suspects(memory))
        if not self._compare.names:
            return self.publish(memory, ())
        self._next = memory
        return msgspec.msgpack.encode(self._compare)

    def _suspects(self, memory: PlanMemory) -> tuple[str, ...]:
        """Tensors whose copies have to be compared one by one.

        Ranks of one layout without pieces have compared one digest of all, or of a share, already. What they hold in
        common with others, and everything where that digest covers less than it should, is compared when a plan is
        made, and once per turn later; where digests differ, everything is, to find out what does.
        """
        alike = np.zeros(max(self._ranks) + 1, np.int64)
        first: dict[bytes, int] = {}
        differs = False
        for number, (rank, message) in enumerate(zip(self._ranks, self._messages, strict=True)):
            peer = first.setdefault(message.layout, number)
            alike[rank] = number if message.columns else peer
            differs |= message.compared != self._messages[peer].compared
        fresh = self.memory is None or self.memory.plan is not memory.plan
        if differs or (fresh and any(message.turn is not None for message in self._messages)):
            return memory.plan.undeclared(np.arange(len(alike)))
        return memory.plan.undeclared(alike) if fresh or memory.num_saves % NUM_TURNS == 0 else ()

    def _layouts(self) -> Layouts:
        return tuple((message.layout, message.columns) for message in self._messages)

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

    def publish(self, memory: PlanMemory, diverged: tuple[str, ...]) -> bytes:
        """Take the next place of the run and publish the manifest of the checkpoint there: `Planned`, encoded."""
        identity = self._begin()
        place = identity.place
        self.memory = replace(memory, num_saves=memory.num_saves + 1)
        self._manifest = memory.draft.encode(identity, diverged)
        folder = records.folder_name(identity.step, identity.checkpoint_id)
        self._storage.create(records.checkpoint_key(folder, fmt.NAME), self._manifest)
        digest = xxhash.xxh3_128_hexdigest(self._manifest)
        self._planned = Planned(
            folder, identity.checkpoint_id, place, len(self._manifest), digest, memory.plan_id, diverged
        )
        return msgspec.msgpack.encode(self._planned)

    def _begin(self) -> Identity:
        """Take the next place of the run. Only for a state that can be saved: opening an epoch after a rollback moves
        the head."""
        self._run = Run.create(self._storage)
        place = JOB.begin(
            self._run,
            takeover=self._request.takeover,
            world_size=len(self._messages),
            sources=self._request.sources,
        )
        before = JOB.note_step(self._run, self._request.step)
        _check_step(self._run, place, self._request.step, before)
        return Identity(
            checkpoint_id=secrets.token_hex(8),
            run_id=self._run.run_id,
            place=place,
            step=self._request.step,
            created=self._request.created,
            metrics=self._request.metrics,
        )

    def commit(self, payloads: Sequence[bytes]) -> bytes:
        """Seal and commit: all data files are durable."""
        assert self._planned is not None
        assert self._run is not None
        manifest = fmt.decode(self._manifest, path=self._planned.folder)
        written = {w.index: w for w in (decode_msgpack(payload, Written) for payload in payloads)}
        files = tuple(
            FileSeal(fmt.file_name(index), written[index].nbytes, written[index].digest)
            for index in range(manifest.body.num_files)
        )
        self._run.check_fence(self._planned.place.epoch)
        stored = Stored(self._planned.folder, self._manifest, manifest)
        return msgspec.msgpack.encode(seal_and_commit(self._run, stored, files))


def _check_step(run: Run, place: Place, step: int, before: int | None) -> None:
    """Warn where a save has a lower step than the one `before` it in its epoch, and where the first save of an epoch
    has no greater step than the checkpoint that the epoch goes on from: the loop repeats a step, or counts in another
    way than `step` does. Reads two small records, once per epoch."""
    if before is not None and step < before:
        _log.warning(
            "step %d is saved after step %d: `step` is the number of the step that was finished last, and it rises "
            "until a checkpoint is loaded",
            step,
            before,
        )
    if place.seq > 1:
        return
    with suppress(CorruptError, NotFoundError):  # whatever is wrong with the history, this is only a hint
        epoch = run.epoch(place.epoch)
        if epoch.opened_from is None or epoch.why == "takeover":
            return
        before = run.commit(epoch.opened_from).step
        if step <= before:
            _log.warning(
                "step %d is saved after step %d was loaded: `step` is the number of the step that was finished last, "
                "so a loop goes on at report.next_step, which was %d",
                step,
                before,
                before + 1,
            )


def _covers(reserved: Sequence[RankValues], needed: Sequence[RankValues]) -> bool:
    """Whether all values have room where they had it, under the same paths."""
    return len(reserved) == len(needed) and all(
        (old.rank, old.paths) == (new.rank, new.paths) and new.nbytes <= old.capacity
        for old, new in zip(reserved, needed, strict=True)
    )
