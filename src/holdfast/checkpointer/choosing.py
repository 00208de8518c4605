"""The choice of the checkpoint that all ranks restore from memory. Each rank reports its node's slots, and rank 0
chooses.

A checkpoint in memory counts only if it is on the lineage of the run's head: it is the head, or a later checkpoint of
the newest epoch, which a keeper is about to commit. Checkpoints that a rollback left behind are never restored, nor are
those that somebody gave up or removed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from holdfast.errors import CorruptError, FencedError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format.records import FileSeal, Place
from holdfast.node_memory.claims import has_trainer
from holdfast.node_memory.generations import Generation, read_generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import WHOLE, Slot, SlotState
from holdfast.run.complete import StoredManifest, can_commit, encode_seal
from holdfast.run.history import Run
from holdfast.store.base import Store

_log = logging.getLogger(__name__)


class HeldFile(msgspec.Struct, frozen=True, array_like=True):
    """A whole data file in the memory of a node. It belongs to the run `run_id`, and to the epoch that was opened with
    `incarnation` ("": not recorded). `has_trainer`: a living process fills the slots of its rank."""

    run_id: str
    incarnation: str
    checkpoint_id: str
    place: Place
    step: int
    file: int
    nbytes: int
    digest: str
    is_committed: bool
    has_trainer: bool


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """The whole data files that a rank finds on its `node` and whose manifests the node has; and whether any trainer is
    filling a slot."""

    node: str
    held: tuple[HeldFile, ...]
    is_filling: bool


class Clearing(NamedTuple):
    """A look at memory by a job whose saves find no room: it gives up the checkpoints that earlier jobs left and that
    can never be committed, because memory has only a part of them, or because there is a newer epoch than theirs.
    Earlier jobs left those before `first`, the first place that this job took (None: all).

    With `takes_over`, this job has restored, so its next save stops the earlier job. Then it also gives up what a
    trainer of that job is still filling: the trainer may stand still.
    """

    first: Place | None
    takes_over: bool

    def covers(self, place: Place) -> bool:
        """Whether the checkpoint at `place` is of an earlier job."""
        return self.first is None or place < self.first


class Chosen(msgspec.Struct, frozen=True, tag="chosen"):
    """The checkpoint that all ranks restore: its seal (empty: restore from storage), the newest epoch of its run, the
    name of its folder, `owners`, and whether it is committed. `owners` are the ranks that read each file for all others
    (empty: every rank can read all files). `manifest` is for nodes that hold no file of the checkpoint and so lack its
    manifest; empty if there is no such node. With `is_all`, storage has no checkpoint of the run yet.

    `earlier_resumes` is the number of jobs that resumed it before, and committed no newer one.
    `given_up` are checkpoints of which memory has only a part, because the nodes or ranks with the rest are gone, those
    that somebody removed from storage before they were committed, and damaged ones that the job goes on without.
    `let_go` are checkpoints of another history than the one in storage."""

    seal: bytes = b""
    manifest: bytes = b""
    epoch: int = 0
    folder: str = ""
    owners: tuple[int, ...] = ()
    committed: bool = True
    is_all: bool = False
    given_up: tuple[str, ...] = ()
    let_go: tuple[str, ...] = ()
    earlier_resumes: int = 0


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The checkpoints of which rank 0's node has no part: for each id, the rank that shall send the generation."""

    senders: dict[str, int]


def inventory(folder: NodeFolder, slots: Sequence[Slot]) -> Inventory:
    """The inventory of this node's `slots`."""
    # First, because a slot that a trainer is just filling may be complete a moment later.
    is_filling = any(slot.state == SlotState.WRITING and not _is_of_dead(slot) for slot in slots)
    held = []
    known: dict[str, Generation] = {}
    for slot in slots:
        record = slot.record
        contents = record.contents
        if contents is not None and record.state in WHOLE:
            with suppress(FileNotFoundError, CorruptError):
                id_ = contents.checkpoint_id
                generation = known[id_] = known.get(id_) or read_generation(folder, id_)
                held += [
                    HeldFile(
                        contents.run_id,
                        generation.incarnation,
                        id_,
                        contents.place,
                        contents.step,
                        part.file,
                        part.nbytes,
                        digest,
                        record.state == SlotState.COMMITTED,
                        has_trainer(folder, slot.rank),
                    )
                    for part, digest in zip(contents.files, record.digests, strict=False)
                ]
    return Inventory(folder.identity(), tuple(held), is_filling)


def _is_of_dead(slot: Slot) -> bool:
    """Whether the process that was filling a slot is dead. Reads the slot again."""
    return not slot.is_occupied and slot.state == SlotState.WRITING


def known_of(folder: NodeFolder, unknown: Unknown, *, rank: int) -> list[Generation]:
    """The generations that `rank` has to send, of the checkpoints that are `unknown` to rank 0's node."""
    mine = []
    for checkpoint_id, sender in unknown.senders.items():
        if sender == rank:
            with suppress(FileNotFoundError, CorruptError):
                mine.append(read_generation(folder, checkpoint_id))
    return mine


class Survey:
    """Rank 0's view of the memory of all nodes; with `clearing`, to make room for saves. `damaged` are the places of
    the checkpoints that this restore has found damaged in memory: it chooses one that is older than all of them."""

    def __init__(self, clearing: Clearing | None = None, damaged: Collection[Place] = ()) -> None:
        self._clearing = clearing
        self._damaged = damaged
        self._inventories: Sequence[Inventory] = ()
        self._generations: dict[str, Generation] = {}
        self._senders: dict[str, int] = {}

    def look(self, folder: NodeFolder, inventories: Sequence[Inventory]) -> None:
        """Record the inventories of all ranks; `folder` is the folder of rank 0's node."""
        self._inventories = inventories
        for rank, found in enumerate(inventories):
            for checkpoint_id in {each.checkpoint_id for each in found.held} - self._generations.keys():
                try:
                    self._generations[checkpoint_id] = read_generation(folder, checkpoint_id)
                except (FileNotFoundError, CorruptError):
                    self._senders.setdefault(checkpoint_id, rank)

    def answer(self, storage: Store) -> Chosen | Unknown:
        """The answer to all ranks: the checkpoint that they restore, or the generations that rank 0 needs first."""
        return Unknown(self._senders) if self._senders else self._choose(storage)

    def answer_when_told(self, storage: Store, told: Sequence[Sequence[Generation]]) -> Chosen:
        """The checkpoint that all ranks restore, now that each rank has sent its part of the unknown generations
        (`known_of`)."""
        for generations in told:
            self._generations.update({generation.checkpoint_id: generation for generation in generations})
        return self._choose(storage)

    def _choose(self, storage: Store) -> Chosen:
        """The newest checkpoint on the lineage of the head in `storage` that all nodes together hold."""
        try:
            run = Run.open(storage)
        except NotFoundError:
            return Chosen()
        held = [each for inventory in self._inventories for each in inventory.held]
        epoch, head = run.newest_epoch() or 0, run.head_place()
        foreign = _foreign(run, held)
        let_go = tuple(sorted(foreign))
        _warn_of(run, foreign.values())
        places = {each.checkpoint_id: each.place for each in held if each.checkpoint_id not in foreign}
        committed = {each.checkpoint_id for each in held if each.is_committed}
        tended = {each.checkpoint_id for each in held if each.has_trainer}
        given_up = [] if self._clearing is None else self._to_clear(run, epoch, places, committed, self._clearing)
        # If a trainer is at work, a checkpoint that is there in part may soon be whole.
        is_filling = any(inventory.is_filling for inventory in self._inventories)
        damaged = [each for each in places if places[each] in self._damaged and each not in {*committed, *tended}]
        for checkpoint_id in self._newest_first(places):
            place = places[checkpoint_id]
            whole = self._whole(run, checkpoint_id)
            if whole is None:
                # A trainer that lives gives up by itself what can never be whole.
                if self._clearing is None and not is_filling and checkpoint_id not in {*committed, *tended}:
                    given_up.append(checkpoint_id)
                continue
            is_head = place == head and run.commit(place).checkpoint_id == checkpoint_id
            if is_head or (place.epoch == epoch and (head is None or head < place)):
                stored, files = whole
                if not is_head and not can_commit(run, place, stored.folder):
                    given_up.append(checkpoint_id)
                    continue
                seal = encode_seal(stored, [next(iter(holders.values())) for holders in files])
                manifest = b"" if self._all_know(files) else stored.data
                owners = _owners(self._inventories, files)
                alone, given_up = head is None, [*given_up, *damaged]
                return Chosen(seal, manifest, epoch, stored.folder, owners, is_head, alone, tuple(given_up), let_go)
        if head is not None:  # else the damaged ones are all that there is of the run, and stay
            given_up += damaged
        return Chosen(given_up=tuple(given_up), let_go=let_go)

    def _newest_first(self, places: Mapping[str, Place]) -> list[str]:
        """The ids in `places`, without those from the oldest damaged one on."""
        older = [each for each, place in places.items() if all(place < other for other in self._damaged)]
        return sorted(older, key=places.__getitem__, reverse=True)

    def _to_clear(
        self, run: Run, epoch: int, places: Mapping[str, Place], committed: Collection[str], clearing: Clearing
    ) -> list[str]:
        """The checkpoints that `clearing` gives up, in a run whose newest epoch is `epoch`."""
        old = [each for each, place in places.items() if clearing.covers(place) and each not in committed]
        may_be_whole = not clearing.takes_over and any(inventory.is_filling for inventory in self._inventories)
        parts = [] if may_be_whole else [each for each in old if self._whole(run, each) is None]
        return sorted({*parts, *(each for each in old if places[each].epoch < epoch)})

    def _whole(self, run: Run, checkpoint_id: str) -> tuple[StoredManifest, list[dict[str, FileSeal]]] | None:
        """The manifest of a checkpoint, and for each of its files the nodes that hold it. None if the nodes together do
        not hold the whole checkpoint."""
        generation = self._generations.get(checkpoint_id)
        if generation is not None:
            with suppress(CorruptError):
                manifest = fmt.decode(generation.manifest, path=generation.folder)
                files = _files(self._inventories, checkpoint_id, manifest.file_names)
                if files is not None and manifest.body.run_id == run.run_id:
                    return StoredManifest(generation.folder, generation.manifest, manifest), files
        return None

    def _all_know(self, files: Sequence[Mapping[str, FileSeal]]) -> bool:
        """Whether each node holds at least one of a checkpoint's `files`, and so has its manifest."""
        return {each.node for each in self._inventories} <= {node for holders in files for node in holders}


def _foreign(run: Run, held: Sequence[HeldFile]) -> dict[str, HeldFile]:
    """By id, the checkpoints in memory that belong to another history than the run in storage: somebody restored the
    run from an older copy, or began it anew.

    A checkpoint is foreign if it belongs to another run, or to an epoch that storage has with another incarnation; if
    it was committed, but storage has no such commit; or if it comes after a foreign checkpoint in its epoch.
    """
    by_id = {each.checkpoint_id: each for each in sorted(held, key=lambda each: each.is_committed)}
    foreign = {each.checkpoint_id: each for each in by_id.values() if not _is_of(run, each)}
    first: dict[int, Place] = {}
    for each in foreign.values():
        first[each.place.epoch] = min(each.place, first.get(each.place.epoch, each.place))
    for each in by_id.values():
        if not each.is_committed and each.place > first.get(each.place.epoch, each.place):
            foreign[each.checkpoint_id] = each
    return foreign


def _is_of(run: Run, held: HeldFile) -> bool:
    """Whether a checkpoint in memory belongs to the history that `run` has in storage."""
    if held.run_id != run.run_id:
        return False
    try:
        if held.incarnation:
            run.check_incarnation(held.place.epoch, held.incarnation)
        return not held.is_committed or run.commit(held.place).checkpoint_id == held.checkpoint_id
    except FencedError:
        return False
    except NotFoundError:
        return run.is_removed(held.place)


def _warn_of(run: Run, foreign: Iterable[HeldFile]) -> None:
    lost = sorted((each.step, str(each.place)) for each in foreign)
    if lost:
        _log.warning(
            "steps %s (places %s) in memory belong to another history than '%s' in storage, which was restored from "
            "an older copy or begun anew: holdfast gives them up",
            ", ".join(str(step) for step, _ in lost),
            ", ".join(place for _, place in lost),
            run.storage.location.url,
        )


def _files(
    inventories: Sequence[Inventory], checkpoint_id: str, names: Sequence[str]
) -> list[dict[str, FileSeal]] | None:
    """For each data file, the nodes that hold it, with the file's entry in a seal; None if no node holds one of the
    files."""
    files: list[dict[str, FileSeal]] = [{} for _ in names]
    for inventory in inventories:
        for each in inventory.held:
            if each.checkpoint_id == checkpoint_id:
                files[each.file][inventory.node] = FileSeal(names[each.file], each.nbytes, each.digest)
    return files if all(files) else None


def _owners(inventories: Sequence[Inventory], files: Sequence[Mapping[str, FileSeal]]) -> tuple[int, ...]:
    """For each file, a rank that can read it; the ranks of a node take turns. Empty if all nodes have all files."""
    nodes: dict[str, list[int]] = {}
    for number, inventory in enumerate(inventories):
        nodes.setdefault(inventory.node, []).append(number)
    if all(nodes.keys() <= holders.keys() for holders in files):
        return ()
    owners = []
    for index, holders in enumerate(files):
        ranks = nodes[next(iter(holders))]
        owners.append(ranks[index % len(ranks)])
    return tuple(owners)
