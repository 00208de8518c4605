"""Nodes that share parity, each with a folder and a keeper in this process, and checkpoints that are staged there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import Files
from holdfast.format.records import Place
from holdfast.geometry import FlatRange
from holdfast.keeper.daemon import Keeper
from holdfast.keeper.peer_ways import Way
from holdfast.keeper.rebuild_client import rebuild_copy
from holdfast.node_memory.generations import Generation, encode_generation, protected_ids, write_generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.parity_records import ParityGroup, record_of
from holdfast.node_memory.peering import (
    PacingRules,
    ParityTable,
    PeerNode,
    PeerSecret,
    PeerTable,
    digest_of,
    note_secret,
    note_table,
    noted_port,
)
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState, parity_names
from holdfast.peers.peer_messages import OfferCopy, PeerReply, RebuildCopy
from holdfast.peers.tcp import TcpPeers
from holdfast.plan.layout import Pieces, TensorLayout
from holdfast.plan.save import CheckpointIdentity, ManifestTemplate, plan_save
from holdfast.run.history import Run
from holdfast.store.posix import PosixStore
from holdfast.store.retry_budget import RetryBudget
from tests.support.nursery import until
from tests.support.worlds import World, data_sections

SECRET = b"s" * 32
#: Pauses of a keeper between its tries to reach a peer, for tests that wait for the next one.
RETRIES = RetryBudget(total_s=math.inf, first_s=0.1, longest_s=0.3)


class Snapshot:
    """A checkpoint of all ranks, staged in slots. `ranks[file]` is the rank that has a file, `data[file]` what is in
    it, without its header."""

    def __init__(self, nodes: ParityNodes, seq: int) -> None:
        self.id = f"00112233445566{seq:02x}"
        self.place = Place(1, seq)
        cuts = [0, *itertools.accumulate(size for sizes in nodes.sizes for size in sizes)]
        full = {"w": np.random.default_rng(seq).integers(0, 256, (cuts[-1], 1), np.uint8)}
        world = World(
            [
                [TensorLayout("w", "uint8", (cuts[-1],), Pieces.ranges(*([FlatRange(a, b)] if a < b else [])))]
                for a, b in itertools.pairwise(cuts)
            ],
            full,
        )
        identity = CheckpointIdentity(self.id, nodes.run.run_id, self.place, seq, 123.5, {})
        manifest = ManifestTemplate.of(plan_save(*world.sent()), [], ()).encode(identity, ())
        folder = records.folder_name(seq, self.id)
        self.generation = Generation(nodes.run.storage.location.url, folder, self.id, self.place, seq, manifest)
        decoded = fmt.decode(manifest, path="manifest")
        self.ranks = decoded.writers.tolist()
        self.files = Files(decoded)
        self.data = [bytes(section) for section in data_sections(world, self.files)]
        self.slots: list[Slot] = []

    def stage(self, nodes: ParityNodes, only: Collection[int] | None = None) -> Snapshot:
        """Stage the parts of the ranks on all nodes, or on some `only`."""
        for file, rank in enumerate(self.ranks):
            node = nodes.node_of(rank)
            if only is not None and node not in only:
                continue
            layout, folder = self.files.layout(file), nodes.folders[node]
            slot = nodes.stack.enter_context(Slot.create(folder, rank=rank, nbytes=layout.nbytes))
            contents = Contents(
                nodes.run.run_id, self.id, self.place, self.place.seq, file, layout.data_start, layout.nbytes
            )
            assert slot.take()
            slot.advance(SlotRecord(SlotState.WRITING, contents))
            slot.data[layout.data_start : layout.nbytes] = np.frombuffer(self.data[file], np.uint8)
            slot.advance(SlotRecord(SlotState.STAGED, contents))
            self.slots.append(slot)
            write_generation(folder, self.generation)
        return self


class ParityNodes:
    """Nodes with ranks whose parts of a checkpoint have so many bytes: ``sizes[node][place]``."""

    def __init__(self, path: Path, stack: ExitStack, sizes: Sequence[Sequence[int]], losses: int) -> None:
        self.sizes = sizes
        self.losses = losses
        self.stack = stack
        self.path = path
        self.run = Run.create(PosixStore(str(path / "run")))
        self.run.open_epoch(after=0, opened_from=None, why="start", world_size=2, incarnation="0" * 32)
        self.folders: list[NodeFolder] = []
        self.keepers: list[Keeper] = []
        for _ in sizes:
            self.add()

    def add(self) -> int:
        """Add a node. Returns its number."""
        node_dir = self.path / f"node{len(self.folders)}"
        node_dir.mkdir()
        folder = self.stack.enter_context(NodeFolder("run", node_dir=node_dir))
        self.folders.append(folder)
        self.keepers.append(Keeper(folder))
        number = len(self.folders) - 1
        self.stack.callback(self._close, number)
        return number

    def _close(self, number: int) -> None:
        self.keepers[number].close()  # the last one of that node

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        ends = [0, *itertools.accumulate(map(len, self.sizes))]
        return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))

    def meet(self, pacing: PacingRules = PacingRules()) -> None:  # noqa: B008 - it is frozen
        """Have the keepers know each other."""
        for folder, keeper in zip(self.folders, self.keepers, strict=True):
            note_secret(folder, PeerSecret(SECRET, "127.0.0.1"))
            keeper.look()
        members = range(len(self.sizes))
        nodes = tuple(PeerNode(self.folders[number].identity(), self.address(number)) for number in members)
        parity = ParityTable(self.losses, (tuple(members),), self.ranks)
        for number in members:
            table = PeerTable(digest_of(SECRET), number, nodes, ((),) * len(nodes), parity, pacing)
            note_table(self.folders[number], table)

    def address(self, number: int) -> str:
        """The address where the keeper of a node listens."""
        port = noted_port(self.folders[number])
        assert port is not None
        return f"127.0.0.1:{port.port}"

    def look(self, *without: int) -> bool:
        """Have the keepers look, all but some."""
        for number, keeper in enumerate(self.keepers):
            if number not in without:
                keeper.look()
        return True

    def restart(self, number: int) -> None:
        """End the keeper of a node, and start another one."""
        self.keepers[number].close()
        self.keepers[number] = Keeper(self.folders[number])

    def protect(self, snapshot: Snapshot, *, timeout_s: float = 20) -> None:
        """Have the keepers look until the snapshot is protected."""
        until(lambda: self.look() and self.are_marked(snapshot), timeout_s=timeout_s)

    def are_marked(self, snapshot: Snapshot) -> bool:
        """Whether each node has the mark of protection."""
        return all(snapshot.id in protected_ids(folder) for folder in self.folders)

    def lose(self, *numbers: int) -> None:
        """Nodes are gone: their keepers, and all in their memory."""
        for number in numbers:
            self.keepers[number].close()
            folder = self.folders[number]
            for name in folder.names():
                folder.remove(name)

    def rebuild(
        self, snapshot: Snapshot, file: int, lost: Collection[int], receiver: int, group: ParityGroup
    ) -> PeerReply:
        """Ask the keeper of a node, as a rank does, to rebuild the slot with a file."""
        owner = group.nodes[self.node_of(snapshot.ranks[file])]
        slot = next(slot for slot in owner.slots if slot.files[0].file == file)
        (part,) = slot.files
        contents = Contents(
            self.run.run_id, snapshot.id, snapshot.place, snapshot.place.seq, file, part.data_start, part.nbytes
        )
        addresses = tuple("" if number in lost else self.address(number) for number in range(len(group.nodes)))
        request = RebuildCopy(0, group, tuple(lost), addresses, receiver if receiver < len(group.nodes) else None)
        way = Way(TcpPeers("127.0.0.1"), self.address(receiver), SECRET)
        offer = OfferCopy(contents, slot.digests, slot.rank)
        return rebuild_copy(way, offer, encode_generation(snapshot.generation), request, timeout_s=60)

    def group_of(self, snapshot: Snapshot, number: int) -> ParityGroup:
        """The group of the nodes, by the records of a node."""
        for name in parity_names(self.folders[number]):
            with Slot(self.folders[number], name) as slot:
                if slot.record.contents is not None and slot.record.contents.checkpoint_id == snapshot.id:
                    return record_of(slot).group
        raise AssertionError(f"node {number} has no parity of {snapshot.id}")

    def add_stranger(self) -> int:
        """Add a node that knows the secret, and shares no parity. Returns its number."""
        number = self.add()
        note_secret(self.folders[number], PeerSecret(SECRET, "127.0.0.1"))
        self.keepers[number].look()
        return number
