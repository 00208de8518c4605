"""The plan of a restore that rebuilds files from parity: which slots were lost, and which nodes get them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.node_memory.parity_records import GroupNode, ParityGroup, ParityRecord, SlotDigests


class RebuiltSlot(msgspec.Struct, frozen=True, array_like=True):
    """A lost slot, and the rank of the present job that has the keeper of its node rebuild it."""

    slot: SlotDigests
    executor: int


class LostSlots(msgspec.Struct, frozen=True, array_like=True):
    """The `slots` to rebuild of a group of nodes, of which those with the numbers `lost` are lost."""

    group: ParityGroup
    lost: tuple[int, ...]
    slots: tuple[RebuiltSlot, ...]


class AwaySlot(msgspec.Struct, frozen=True, array_like=True):
    """A sealed slot on a node that has no part in the present job, or a copy there of another node's."""

    node: str
    slot: SlotDigests


class FetchedSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot that another node sends to the node of the rank `executor`, which asks for it."""

    away: AwaySlot
    executor: int


class Rebuild(msgspec.Struct, frozen=True, array_like=True):
    """The slots that keepers rebuild, or get from nodes that have no part in the job, before the ranks restore a
    checkpoint of the run `run_id`. `generation` is the encoded one, and `secret` the secret that the keepers of the
    `nodes` that take part prove to each other meanwhile: other keepers of the job may stand still."""

    run_id: str
    generation: bytes
    secret: bytes
    nodes: tuple[str, ...]
    lost: tuple[LostSlots, ...] = ()
    fetched: tuple[FetchedSlot, ...] = ()
    #: The addresses of the keepers of nodes that have no part in the job, by identity.
    away: dict[str, str] = {}


class NodeShare(NamedTuple):
    """The parts of a checkpoint that a node has: the digests of the files in its own slots, by number, and its rows of
    parity. `ranks` are those of the present job on it that can have copies made there: none where it has no room."""

    ranks: Sequence[int]
    own: Mapping[int, str]
    rows: Sequence[ParityRecord]


class AwayShare(NamedTuple):
    """The parts of a checkpoint that a node has which has no part in the present job: its own slots, its copies of
    others, and its rows of parity."""

    node: str
    own: Sequence[SlotDigests]
    copies: Sequence[SlotDigests]
    rows: Sequence[ParityRecord]

    def adding(self) -> NodeShare:
        """The share that the node adds to sums of parity."""
        return NodeShare((), GroupNode(self.node, tuple(self.own)).files, self.rows)


class FoundElsewhere(NamedTuple):
    """The plan for files that no node of the job has: slots that are `lost` and rebuilt, and slots that are
    `fetched`."""

    lost: tuple[LostSlots, ...] = ()
    fetched: tuple[FetchedSlot, ...] = ()


def plan_rebuild(missing: Collection[int], nodes: Mapping[str, NodeShare]) -> tuple[LostSlots, ...] | None:
    """The plan by which the `missing` files of a checkpoint are rebuilt from what the `nodes`, by identity, have of it.
    None if some of them cannot be.

    A node that lacks any of its slots or rows counts as lost. New nodes, which have nothing of the checkpoint, get what
    was lost, each what its own ranks need if it can be; without new nodes, all share it.
    """
    found: list[LostSlots] = []
    left, receivers = set(missing), _Receivers(nodes)
    for group in {record.group: None for share in nodes.values() for record in share.rows}:
        wanted = [(number, slot) for number, slot in _slots(group) if left & _files(slot)]
        lost = tuple(number for number in range(len(group.nodes)) if not _is_here(group, number, nodes))
        numbers = {number for number, _ in wanted}
        if wanted and numbers <= set(lost) and len(lost) <= group.losses and receivers.are_there:
            slots = tuple(RebuiltSlot(slot, receivers.take(slot)) for _, slot in wanted)
            found.append(LostSlots(group, lost, slots))
            left -= {file for _, slot in wanted for file in _files(slot)}
    return None if left else tuple(found)


def plan_with_away(
    missing: Collection[int], away: Sequence[AwayShare], nodes: Mapping[str, NodeShare]
) -> FoundElsewhere | None:
    """The plan by which the `nodes` of the job get the `missing` files of a checkpoint with the help of those that are
    `away` from it: these send what they hold, and have a part in the rebuilding of the rest. None where that does not
    give all files. New nodes get what their own ranks need first, as in `plan_rebuild`."""
    fetched: list[FetchedSlot] = []
    left, receivers = set(missing), _Receivers(nodes)
    for node, slot in ((share.node, slot) for share in away for slot in (*share.own, *share.copies)):
        if left & _files(slot) and receivers.are_there:
            fetched.append(FetchedSlot(AwaySlot(node, slot), receivers.take(slot)))
            left -= _files(slot)
    lost = plan_rebuild(left, {**nodes, **{share.node: share.adding() for share in away}})
    return None if lost is None else FoundElsewhere(lost, tuple(fetched))


def taking_part(lost: Sequence[LostSlots], fetched: Sequence[FetchedSlot], node_of: Sequence[str]) -> tuple[str, ...]:
    """The identities of the nodes of the job whose keepers rebuild what is `lost`, or get what is `fetched`: those that
    give their part, and those that receive. `node_of` has the node of each rank of the job."""
    giving = {node.identity for each in lost for number, node in enumerate(each.group.nodes) if number not in each.lost}
    executors = [slot.executor for each in lost for slot in each.slots] + [each.executor for each in fetched]
    return tuple(sorted(giving & {*node_of} | {node_of[rank] for rank in executors}))


class _Receivers:
    """The nodes that get lost slots, with the bytes that each of them gets."""

    def __init__(self, nodes: Mapping[str, NodeShare]) -> None:
        able = {identity: share for identity, share in nodes.items() if share.ranks}
        new = {identity: share for identity, share in able.items() if not share.own and not share.rows}
        self._nodes = new or able
        self._is_new = bool(new)
        self._nbytes = dict.fromkeys(self._nodes, 0)
        self._num_taken = dict.fromkeys(self._nodes, 0)

    @property
    def are_there(self) -> bool:
        """Whether any node can take a slot."""
        return bool(self._nodes)

    def take(self, slot: SlotDigests) -> int:
        """The rank that has `slot` rebuilt."""
        own = [each for each, share in self._nodes.items() if slot.rank in share.ranks] if self._is_new else []
        node = own[0] if own else min(self._nbytes, key=self._nbytes.__getitem__)
        self._nbytes[node] += sum(part.nbytes for part in slot.files)
        ranks = self._nodes[node].ranks
        self._num_taken[node] += 1
        return ranks[self._num_taken[node] % len(ranks)]


def _slots(group: ParityGroup) -> Iterator[tuple[int, SlotDigests]]:
    """All slots of a group, with the number of their node."""
    for number, node in enumerate(group.nodes):
        for slot in node.slots:
            yield number, slot


def _files(slot: SlotDigests) -> set[int]:
    return {part.file for part in slot.files}


def _is_here(group: ParityGroup, number: int, nodes: Mapping[str, NodeShare]) -> bool:
    """Whether a node of a group has all its slots and rows."""
    node = group.nodes[number]
    share = nodes.get(node.identity)
    if share is None:
        return False
    rows = {record.row for record in share.rows if record.group == group}
    return node.files.items() <= share.own.items() and len(rows) >= group.losses
