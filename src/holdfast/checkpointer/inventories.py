"""The inventories of nodes: ranks tell the first one which parts of checkpoints their node has, before it chooses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from holdfast.checkpoint.catalogue import Tier as NodeTier
from holdfast.checkpointer.away_nodes import KnownPeers, known_peers
from holdfast.errors import CorruptError, HoldfastError
from holdfast.format.records import Place
from holdfast.node_disk.disk_folder import DiskPart
from holdfast.node_memory.claims import has_any_trainer, has_trainer
from holdfast.node_memory.generations import Generation, read_generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.parity_records import HeldRow
from holdfast.node_memory.peering import noted_speed
from holdfast.node_memory.slots import WHOLE, Slot, SlotState

_log = logging.getLogger(__name__)


class HeldFile(msgspec.Struct, frozen=True, array_like=True):
    """A whole data file on a node, in its `tier`. It belongs to the run `run_id`, and to the epoch that was opened with
    `incarnation` ("": not recorded). `has_trainer`: a living process fills the slots of its rank; for one on a disk,
    those of any rank."""

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
    tier: NodeTier = NodeTier.NODE_MEMORY

    @property
    def on_disk(self) -> bool:
        """Whether it lies on a disk of the node."""
        return self.tier is NodeTier.NODE_DISK


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """The whole data files and rows of parity that a rank finds on its `node` and whose manifests the node has; and
    whether any trainer is filling a slot. The node has last sent copies at `sent_bytes_per_s` (0: it has sent none).
    `protect` is the policy that the rank wants for its snapshots. `peers` is the name of the nodes of the last job, if
    the node knows them (`KnownPeers`)."""

    node: str
    held: tuple[HeldFile, ...]
    is_filling: bool
    rows: tuple[HeldRow, ...] = ()
    sent_bytes_per_s: float = 0.0
    protect: str = ""
    peers: str = ""


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The checkpoints of which rank 0's node has no part: for each id, the rank that shall send the generation. And the
    rank that shall tell the nodes of the last job, where rank 0's node does not know them."""

    senders: dict[str, int]
    peers_sender: int | None = None


class ToldKnowledge(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of what is `Unknown` to rank 0's node."""

    generations: tuple[Generation, ...] = ()
    peers: KnownPeers | None = None


def inventory(
    folder: NodeFolder, slots: Sequence[Slot], parts: Iterable[DiskPart] = (), rows: Iterable[HeldRow] = ()
) -> Inventory:
    """The inventory of this node's `slots`, of the `parts` of checkpoints on its disks, and of its `rows` of parity."""
    # First, because a slot that a trainer is just filling may be complete a moment later.
    is_filling = any(slot.state == SlotState.WRITING and not slot.is_copy and not _is_of_dead(slot) for slot in slots)
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
                        not slot.is_copy and has_trainer(folder, slot.rank),
                        NodeTier.PEER_MEMORY if slot.is_copy else NodeTier.NODE_MEMORY,
                    )
                    for part, digest in zip(contents.files, record.digests, strict=False)
                ]
    has_trainers = has_any_trainer(folder)
    for part in parts:
        held += _held_on_disk(part, has_trainers=has_trainers)
    speed = noted_speed(folder)
    sent_bytes_per_s = 0.0 if speed is None else speed.bytes_per_s
    peers = known_peers(folder).name
    return Inventory(folder.identity(), tuple(held), is_filling, tuple(rows), sent_bytes_per_s, peers=peers)


def _held_on_disk(part: DiskPart, *, has_trainers: bool) -> list[HeldFile]:
    """The whole data files of a part of a checkpoint on a disk; none where the disk fails."""
    about, id_ = part.generation, part.checkpoint_id
    try:
        is_committed = part.is_drained
        return [
            HeldFile(
                *(part.run_id, about.incarnation, id_, part.place, about.step, number, seal.nbytes, seal.digest),
                is_committed,
                has_trainers,
                NodeTier.NODE_DISK,
            )
            for number, seal in part.held_files()
        ]
    except HoldfastError as error:
        _log.warning("the disk of this node has a part of step %d that cannot be used: %s", about.step, error)
        return []


def _is_of_dead(slot: Slot) -> bool:
    """Whether the process that was filling a slot is dead. Reads the slot again."""
    return not slot.is_occupied and slot.state == SlotState.WRITING


def generation_of(folder: NodeFolder, parts: Mapping[str, DiskPart], checkpoint_id: str) -> Generation:
    """The generation of a checkpoint that this node has a file of: in memory, or by id, in the `parts` on its disks.

    Raises as `read_generation`.
    """
    part = parts.get(checkpoint_id)
    return read_generation(folder, checkpoint_id) if part is None else part.generation


def known_of(folder: NodeFolder, parts: Mapping[str, DiskPart], unknown: Unknown, *, rank: int) -> ToldKnowledge:
    """The part that `rank` has to send of what is `unknown` to rank 0's node."""
    mine = []
    for checkpoint_id, sender in unknown.senders.items():
        if sender == rank:
            with suppress(FileNotFoundError, CorruptError):
                mine.append(generation_of(folder, parts, checkpoint_id))
    return ToldKnowledge(tuple(mine), known_peers(folder) if unknown.peers_sender == rank else None)
