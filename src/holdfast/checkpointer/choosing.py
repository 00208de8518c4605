"""The choice of the checkpoint that all ranks restore from memory and disks of nodes. Each rank reports its node's
slots, and the files on its disks, and rank 0 chooses.

A checkpoint there counts only if it is on the lineage of the run's head: it is the head, or a later checkpoint of
the newest epoch, which a keeper is about to commit. Checkpoints that a rollback left behind are never restored, nor are
those that somebody gave up or removed.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from holdfast.checkpoint.catalogue import EVERY_RANK
from holdfast.checkpoint.catalogue import Tier as NodeTier
from holdfast.checkpointer.away_nodes import KnownPeers, away_shares, fitting, known_peers
from holdfast.checkpointer.inventories import HeldFile, Inventory, ToldKnowledge, Unknown, generation_of
from holdfast.checkpointer.rebuild_plan import (
    AwayShare,
    FetchedSlot,
    FoundElsewhere,
    LostSlots,
    NodeShare,
    Rebuild,
    plan_rebuild,
    plan_with_away,
    taking_part,
)
from holdfast.checkpointer.restore_report import Tier
from holdfast.errors import CorruptError, FencedError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.records import FileSeal, Place
from holdfast.node_disk.disk_folder import DiskPart
from holdfast.node_memory.generations import Generation, encode_generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.parity_records import SlotDigests
from holdfast.recovery.source_plan import FileSource, LostFile, plan_sources
from holdfast.run.complete import StoredManifest, can_commit, check_file, encode_seal
from holdfast.run.history import Run
from holdfast.store.base import Store
from holdfast.wording import count

#: Size of the secret that keepers prove to each other while they rebuild a checkpoint.
_SECRET_NBYTES: Final = 32

#: The reason why a whole checkpoint is passed over.
_CANNOT_GO_ON: Final = "the run goes on without it: it can no longer be committed"

_log = logging.getLogger(__name__)
#: The tiers of nodes, as reports name them.
_TIERS: Final[Mapping[NodeTier, Tier]] = {
    NodeTier.NODE_MEMORY: "node memory",
    NodeTier.PEER_MEMORY: "peer memory",
    NodeTier.NODE_DISK: "node disk",
}


class DamagedCopy(NamedTuple):
    """A copy of file `name` of a checkpoint that a restore has found damaged in a tier, on the node of the rank
    `reader` (`EVERY_RANK`: on some node)."""

    checkpoint_id: str
    name: str
    tier: NodeTier
    reader: int


class BadCopy(NamedTuple):
    """A copy of file `name` of a checkpoint that no rank of `node` reads ("": of any node), because it is damaged."""

    checkpoint_id: str
    name: str
    tier: NodeTier
    node: str


class FailedNode(NamedTuple):
    """A node whose own slots and parity of a checkpoint cannot be used: this restore has found damage there, or had no
    answer."""

    checkpoint_id: str
    node: str


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


class PassedOver(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint on the nodes that is newer than the one that the ranks restore, and the reason why they do not take
    it."""

    place: Place
    reason: str


class Chosen(msgspec.Struct, frozen=True, tag="chosen"):
    """The checkpoint that all ranks restore: its seal (empty: restore from storage), the newest epoch of its run, the
    name of its folder, `owners`, and whether it is committed. `owners` are the ranks that read each file for all others
    (empty: every rank can read all files). No node has the files `in_run`: these are read from storage. Of the files
    `copied`, only copies on other nodes than their owners' are left. `has_more`: files of it lie in other tiers of
    nodes than the memory of their owners, so a damaged one may have a sound copy. `tier` is the farthest that files
    are read from, and `bad` are the copies that nobody reads. `manifest` is for nodes that hold no file of the
    checkpoint and so lack its manifest; empty if there is no such node. With `is_all`, storage has no
    checkpoint of the run yet. With `rebuild`, files of it have to be rebuilt first, and then the ranks choose again.
    `passed` are newer checkpoints on the nodes, which the ranks cannot take.

    `earlier_resumes` is the number of jobs that resumed it before, and committed no newer one.
    `given_up` are checkpoints that somebody removed from storage before they were committed, and damaged ones that the
    job goes on without. `parts` are those of which memory has only a part, because the nodes or ranks with the rest are
    gone: they are given up when the job saves, for a job that only restores may lack nodes that come back.
    `let_go` are checkpoints of another history than the one in storage."""

    seal: bytes = b""
    manifest: bytes = b""
    epoch: int = 0
    folder: str = ""
    owners: tuple[int, ...] = ()
    committed: bool = True
    is_all: bool = False
    given_up: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    let_go: tuple[str, ...] = ()
    earlier_resumes: int = 0
    in_run: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    has_more: bool = False
    tier: Tier = "node memory"
    rebuild: Rebuild | None = None
    bad: tuple[BadCopy, ...] = ()
    passed: tuple[PassedOver, ...] = ()


class _Copy(NamedTuple):
    """A copy of a data file on a node: its entry in a seal, and its tier."""

    seal: FileSeal
    tier: NodeTier


class _WholeCheckpoint(NamedTuple):
    """A checkpoint that is whole: its manifest, the seals of its files, and for each file the nodes that hold it, with
    the nearest copy there, and its source; no node and no source if the run has it, or if it is one of the `lost` ones,
    which can be rebuilt, or of the `fetched` ones."""

    stored: StoredManifest
    seals: Sequence[FileSeal]
    files: Sequence[Mapping[str, _Copy]]
    sources: Sequence[FileSource | None]
    lost: tuple[LostSlots, ...] = ()
    fetched: tuple[FetchedSlot, ...] = ()

    @property
    def tier(self) -> Tier:
        """The farthest tier that a file is read from. Files that no node has came to the run from a disk."""
        tiers = {NodeTier.NODE_DISK if source is None else source.tier for source in self.sources}
        return _TIERS[max(tiers, key=lambda tier: tier.distance)]

    @property
    def copied(self) -> tuple[int, ...]:
        """The numbers of the files of which only copies on other nodes than their owners' are left."""
        tiers = [{copy.tier for copy in holders.values()} for holders in self.files]
        return tuple(
            number
            for number, found in enumerate(tiers)
            if NodeTier.PEER_MEMORY in found and NodeTier.NODE_MEMORY not in found
        )


class Survey:
    """Rank 0's view of the memory and disks of all nodes; with `clearing`, to make room for saves. `damaged` are the
    places of the checkpoints that this restore has found damaged there: it chooses one that is older than all of them.
    Of the copies in `bad` it uses none, but others of the same file, and nothing that is of `failed` nodes
    themselves. Nothing is rebuilt on `full` nodes."""

    def __init__(
        self,
        clearing: Clearing | None = None,
        damaged: Collection[Place] = (),
        bad: Collection[DamagedCopy] = (),
        failed: Collection[FailedNode] = (),
        full: Collection[FailedNode] = (),
    ) -> None:
        self._clearing = clearing
        self._damaged = damaged
        self._found_bad = bad
        self._bad: frozenset[BadCopy] = frozenset()
        self._failed = failed
        self._full = full
        self._inventories: Sequence[Inventory] = ()
        #: The nodes of the last job, and the rank that knows of a later one than rank 0's node.
        self._peers = KnownPeers()
        self._peers_sender: int | None = None
        self._away_shares: Mapping[str, Sequence[AwayShare]] | None = None
        self._held: dict[str, list[tuple[str, HeldFile]]] = {}  # by checkpoint, with their nodes
        self._speeds: dict[str, float] = {}  # by node
        self._generations: dict[str, Generation] = {}
        self._senders: dict[str, int] = {}

    def look(self, folder: NodeFolder, parts: Mapping[str, DiskPart], inventories: Sequence[Inventory]) -> None:
        """Record the inventories of all ranks; `folder` and `parts` are those of rank 0's node."""
        self._inventories, self._held, self._peers = inventories, {}, known_peers(folder)
        self._bad = frozenset(
            BadCopy(
                each.checkpoint_id,
                each.name,
                each.tier,
                "" if each.reader == EVERY_RANK else inventories[each.reader].node,
            )
            for each in self._found_bad
        )
        self._speeds = {each.node: each.sent_bytes_per_s for each in inventories if each.sent_bytes_per_s}
        told: dict[str, tuple[HeldFile, ...]] = {}
        newest: dict[str, tuple[Place, int]] = {}  # by last job, the newest place there, and a rank that knows the job
        for rank, found in enumerate(inventories):
            if told.get(found.node) == found.held:  # most ranks of a node tell the same
                continue
            told[found.node] = found.held
            if found.peers and found.held:
                place = max(each.place for each in found.held)
                newest[found.peers] = max(newest.get(found.peers, (place, rank)), (place, rank))
            for each in found.held:
                self._held.setdefault(each.checkpoint_id, []).append((found.node, each))
            for checkpoint_id in {each.checkpoint_id for each in found.held} - self._generations.keys():
                try:
                    self._generations[checkpoint_id] = generation_of(folder, parts, checkpoint_id)
                except (FileNotFoundError, CorruptError):
                    self._senders.setdefault(checkpoint_id, rank)

        here = newest.get(self._peers.name)
        if newest and (here is None or here[0] < max(newest.values())[0]):
            self._peers_sender = max(newest.values())[1]

    def answer(self, storage: Store) -> Chosen | Unknown:
        """The answer to all ranks: the checkpoint that they restore, or what rank 0 needs first to choose."""
        if self._senders or self._peers_sender is not None:
            return Unknown(self._senders, self._peers_sender)
        return self._choose(storage)

    def answer_when_told(self, storage: Store, told: Sequence[ToldKnowledge]) -> Chosen:
        """The checkpoint that all ranks restore, now that each rank has sent its part of what was unknown
        (`known_of`)."""
        for knowledge in told:
            self._generations.update({each.checkpoint_id: each for each in knowledge.generations})
            self._peers = knowledge.peers or self._peers
        return self._choose(storage)

    def _choose(self, storage: Store) -> Chosen:
        """The newest checkpoint on the lineage of the head in `storage` that all nodes together hold."""
        try:
            run = Run.open(storage)
        except NotFoundError:
            return Chosen()
        held = [each for held in self._held.values() for _, each in held]
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
        kept = {*committed, *tended}
        damaged = [each for each in places if places[each] in self._damaged and each not in kept]
        spoilt = {*(each.checkpoint_id for each in self._bad), *(each.checkpoint_id for each in self._failed)}
        on_disk = {each.checkpoint_id for each in held if each.on_disk}
        passed: list[PassedOver] = []
        parts: list[str] = []
        for checkpoint_id in self._newest_first(places):
            place = places[checkpoint_id]
            whole = self._whole(run, checkpoint_id)
            if head is None or head < place:
                passed.append(PassedOver(place, self._lack(checkpoint_id) if whole is None else _CANNOT_GO_ON))
            if whole is None and checkpoint_id in spoilt:
                damaged += [] if checkpoint_id in kept else [checkpoint_id]
                continue
            if whole is None:
                # A trainer that lives gives up by itself what can never be whole. Disks keep what they have until the
                # run has moved on: the disks of other nodes may come back.
                if self._clearing is None and not is_filling and checkpoint_id not in {*kept, *on_disk}:
                    parts.append(checkpoint_id)
                continue
            is_head = place == head and run.commit(place).checkpoint_id == checkpoint_id
            if is_head or (place.epoch == epoch and (head is None or head < place)):
                if not is_head and not can_commit(run, place, whole.stored.folder):
                    given_up.append(checkpoint_id)
                    continue
                return Chosen(
                    encode_seal(whole.stored, whole.seals),
                    b"" if self._all_know(whole.files) else whole.stored.data,
                    epoch,
                    whole.stored.folder,
                    _owners(self._inventories, whole),
                    is_head,
                    is_all=head is None,
                    given_up=(*given_up, *damaged),
                    parts=tuple(parts),
                    let_go=let_go,
                    in_run=tuple(number for number, holders in enumerate(whole.files) if not holders),
                    copied=whole.copied,
                    has_more=self._has_parity(checkpoint_id)
                    or any(each.tier is not NodeTier.NODE_MEMORY for _, each in self._held[checkpoint_id]),
                    tier=whole.tier,
                    rebuild=self._rebuild(checkpoint_id, whole),
                    bad=tuple(sorted(self._bad, key=str)),
                    passed=tuple(each for each in passed if each.place > place),
                )
        if head is not None:  # else the damaged ones are all that there is of the run, and stay
            given_up += damaged
        return Chosen(given_up=tuple(given_up), parts=tuple(parts), let_go=let_go, passed=tuple(passed))

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

    def _whole(self, run: Run, checkpoint_id: str) -> _WholeCheckpoint | None:
        """A checkpoint that the nodes together hold whole, but for files that the run has. None if it is not whole, or
        no node has its manifest."""
        generation = self._generations.get(checkpoint_id)
        if generation is not None:
            with suppress(CorruptError):
                manifest = fmt.decode(generation.manifest, path=generation.folder)
                stored = StoredManifest(generation.folder, generation.manifest, manifest)
                files = self._files(checkpoint_id, manifest.file_names)
                sources = plan_sources([_lost_file(holders) for holders in files], measured=self._speeds)
                lost: tuple[LostSlots, ...] = ()
                fetched: tuple[FetchedSlot, ...] = ()
                seals = self._seals(run, generation.place, stored, files, sources)
                if seals is None and not run.is_removed(generation.place):
                    lost, fetched = self._elsewhere(checkpoint_id, files, Files(manifest))
                    slots = [each.slot for part in lost for each in part.slots] + [each.away.slot for each in fetched]
                    seals = _seals_with(manifest.file_names, files, slots) if slots else None
                if seals is not None and manifest.body.run_id == run.run_id:
                    return _WholeCheckpoint(stored, seals, files, sources, lost, fetched)
        return None

    def _lack(self, checkpoint_id: str) -> str:
        """The reason why a checkpoint is not whole."""
        generation = self._generations.get(checkpoint_id)
        if generation is None:
            return "no node of this job has its manifest"
        with suppress(CorruptError):
            names = fmt.decode(generation.manifest, path=generation.folder).file_names
            num_missing = sum(not holders for holders in self._files(checkpoint_id, names))
            return f"no node of this job has {num_missing} of its {count(len(names), 'file')}, or a sound copy of them"
        return "its manifest is damaged"

    def _elsewhere(self, checkpoint_id: str, files: Sequence[Mapping[str, _Copy]], layouts: Files) -> FoundElsewhere:
        """The slots to rebuild from parity, so that no file of a checkpoint is missing, and those to fetch from nodes
        that have no part in the job; none if that cannot be done. These nodes are asked only where the others do not
        have enough."""
        own: dict[str, dict[int, str]] = {}
        for number, holders in enumerate(files):
            for node, copy in holders.items():
                if copy.tier is NodeTier.NODE_MEMORY:
                    own.setdefault(node, {})[number] = copy.seal.digest
        shares: dict[str, NodeShare] = {}
        for rank, inventory in enumerate(self._inventories):
            node = inventory.node
            if FailedNode(checkpoint_id, node) in self._failed:
                continue
            rows = [each.record for each in inventory.rows if each.checkpoint_id == checkpoint_id]
            ranks = (*shares[node].ranks, rank) if node in shares else (rank,)
            is_full = FailedNode(checkpoint_id, node) in self._full
            shares[node] = NodeShare(() if is_full else ranks, own.get(node, {}), rows)
        missing = [number for number, holders in enumerate(files) if not holders]
        if lost := plan_rebuild(missing, shares):
            return FoundElsewhere(lost)
        away = [fitting(share, layouts) for share in self._away(checkpoint_id)]
        return plan_with_away(missing, away, shares) or FoundElsewhere()

    def _away(self, checkpoint_id: str) -> list[AwayShare]:
        """Ask the nodes of the last job that have no part in this one for their parts of a checkpoint. They are asked
        once for all checkpoints, and those that have failed do not count."""
        if self._away_shares is None:
            self._away_shares = away_shares(self._peers, {each.node for each in self._inventories})
        found = self._away_shares.get(checkpoint_id, ())
        return [each for each in found if FailedNode(checkpoint_id, each.node) not in self._failed]

    def _rebuild(self, checkpoint_id: str, whole: _WholeCheckpoint) -> Rebuild | None:
        """The rebuilding that must come before a checkpoint can be read; None where nothing is lost."""
        if not whole.lost and not whole.fetched:
            return None
        run_id = whole.stored.manifest.body.run_id
        generation = encode_generation(self._generations[checkpoint_id])
        # Nodes that have no part in the job know only the secret of the last one, and may be asked later.
        secret = self._peers.secret or secrets.token_bytes(_SECRET_NBYTES)
        present = {each.node for each in self._inventories}
        away = {node.identity: node.address for node in self._peers.nodes if node.identity not in present}
        nodes = taking_part(whole.lost, whole.fetched, [each.node for each in self._inventories])
        return Rebuild(run_id, generation, secret, nodes, whole.lost, whole.fetched, away)

    def _has_parity(self, checkpoint_id: str) -> bool:
        return any(each.checkpoint_id == checkpoint_id for found in self._inventories for each in found.rows)

    def _files(self, checkpoint_id: str, names: Sequence[str]) -> list[dict[str, _Copy]]:
        """For each data file, the nodes that hold it, with the nearest copy there that is not known to be bad."""
        files: list[dict[str, _Copy]] = [{} for _ in names]
        for node, each in self._held[checkpoint_id]:
            name, here = names[each.file], files[each.file].get(node)
            is_lost = each.tier is NodeTier.NODE_MEMORY and FailedNode(checkpoint_id, node) in self._failed
            is_nearer = here is None or each.tier.distance < here.tier.distance
            if is_nearer and not is_lost and not is_bad(self._bad, checkpoint_id, name, each.tier, node):
                files[each.file][node] = _Copy(FileSeal(name, each.nbytes, each.digest), each.tier)
        return files

    def _seals(
        self,
        run: Run,
        place: Place,
        stored: StoredManifest,
        files: Sequence[Mapping[str, _Copy]],
        sources: Sequence[FileSource | None],
    ) -> Sequence[FileSeal] | None:
        """The seals of the files of the checkpoint at `place`. Where disks have parts of it, the run may have the files
        that no node has: all of them, if it is committed, and some that were brought there before a disk was lost. None
        where a file is nowhere."""
        held = {number: files[number][source.node].seal for number, source in enumerate(sources) if source is not None}
        if len(held) == len(files):
            return list(held.values())
        if run.is_removed(place) or not any(
            copy.tier is NodeTier.NODE_DISK for holders in files for copy in holders.values()
        ):
            return None
        with suppress(NotFoundError):
            commit = run.commit(place)
            return run.locate(commit).seal.files if commit.checkpoint == stored.folder else None
        layouts = Files(stored.manifest)
        with suppress(NotFoundError):
            return [
                held[number] if number in held else check_file(run.storage, stored, layouts.layout(number))
                for number in range(len(files))
            ]
        return None

    def _all_know(self, files: Sequence[Mapping[str, object]]) -> bool:
        """Whether each node holds at least one of a checkpoint's `files`, and so has its manifest."""
        return {each.node for each in self._inventories} <= {node for holders in files for node in holders}


def _seals_with(
    names: Sequence[str], files: Sequence[Mapping[str, _Copy]], slots: Iterable[SlotDigests]
) -> list[FileSeal]:
    """The seals of files, of which those that no node of the job holds are in `slots`."""
    rebuilt = {
        part.file: FileSeal(names[part.file], part.nbytes, digest)
        for slot in slots
        for part, digest in zip(slot.files, slot.digests, strict=True)
    }
    return [
        min(holders.values(), key=lambda copy: copy.tier.distance).seal if holders else rebuilt[number]
        for number, holders in enumerate(files)
    ]


def is_bad(bad: Collection[BadCopy], checkpoint_id: str, name: str, tier: NodeTier, node: str) -> bool:
    """Whether a copy of a file on a node is one of the `bad` ones."""
    return bool(bad) and any(BadCopy(checkpoint_id, name, tier, each) in bad for each in (node, ""))


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


def _lost_file(holders: Mapping[str, _Copy]) -> LostFile:
    """A file in the form of the plan of sources."""
    nbytes = max((copy.seal.nbytes for copy in holders.values()), default=0)
    return LostFile(nbytes, {node: copy.tier for node, copy in holders.items()})


def _owners(inventories: Sequence[Inventory], whole: _WholeCheckpoint) -> tuple[int, ...]:
    """For each file, a rank of the node that is its source; the ranks of a node take turns. Every rank can read those
    that storage has. Empty if all nodes have all others."""
    nodes: dict[str, list[int]] = {}
    for number, inventory in enumerate(inventories):
        nodes.setdefault(inventory.node, []).append(number)
    if all(nodes.keys() <= holders.keys() for holders in whole.files if holders):
        return ()
    owners = []
    for index, source in enumerate(whole.sources):
        ranks = [EVERY_RANK] if source is None else nodes[source.node]
        owners.append(ranks[index % len(ranks)])
    return tuple(owners)
