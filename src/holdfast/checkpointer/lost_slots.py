"""Ranks have keepers rebuild what was lost of a checkpoint with its nodes, or fetch it from nodes that have no part in
the job, before they load it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.checkpointer.peer_meeting import ReachedKeeper, reached
from holdfast.checkpointer.rebuild_plan import AwaySlot, LostSlots, Rebuild, RebuiltSlot
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.cooperative.network import own_host
from holdfast.errors import CorruptError, HoldfastError
from holdfast.format.records import Place, Seal
from holdfast.keeper.client import ensure_keeper
from holdfast.keeper.peer_ways import Way, require
from holdfast.keeper.rebuild_client import rebuild_copy
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.parity_records import SlotDigests
from holdfast.node_memory.slots import Contents
from holdfast.peers.peer_messages import (
    CopyKept,
    Damaged,
    Declined,
    NodesFailed,
    NotTaken,
    OfferCopy,
    RebuildCopy,
    RequestRefused,
    SendCopies,
)
from holdfast.peers.tcp import TcpPeers
from holdfast.phases import attempt
from holdfast.store.base import Location
from holdfast.store.urls import text_of
from holdfast.wording import count

#: Part of the time that is left which a keeper gets to rebuild a slot, so that the ranks can go on without it.
_SHARE: Final = 0.6
#: Limit for another node to send a slot, in all and per byte: it may stand still.
_SEND_S: Final = 60.0
_SEND_S_PER_NBYTES: Final = 100 / (1 << 30)
#: Number of tries to rebuild a checkpoint: each may find that another node does not answer, or has damage, of two that
#: may be lost; and only one that does not answer twice counts as lost.
_NUM_REBUILDS: Final = 5
#: Number of those that may fail without a known cause. One that passes, as the start of a keeper, is over at the next.
_NUM_UNEXPLAINED: Final = 2


class RebuildOutcome(NamedTuple):
    """The result of a rebuild of a checkpoint, the same on all ranks: the identities of the nodes that `failed`, of
    those that are `silent`, that is, may answer at the next try, and of those that are `full`, and take no more copies;
    and why it was not rebuilt, "" if it was."""

    place: Place
    checkpoint_id: str
    failed: frozenset[str]
    silent: frozenset[str]
    full: frozenset[str]
    trouble: str

    @property
    def is_unexplained(self) -> bool:
        """Whether it failed, and no node is known to be the cause: a keeper that has just been started may not have
        known its slots yet, or a connection to the one before it broke."""
        return bool(self.trouble) and not (self.failed | self.silent | self.full)

    def error(self, folder: NodeFolder) -> CorruptError:
        """The error of a checkpoint that cannot be rebuilt."""
        return CorruptError(
            f"what was lost of checkpoint {self.place} with a node cannot be rebuilt: "
            f"{self.trouble or 'it was rebuilt, and is not there'}",
            code="corrupt.slot",
            action="No action needed: holdfast uses an older checkpoint, or storage.",
            path=str(folder.path),
            tier="peer memory",
        )


def are_hopeless(tries: Sequence[RebuildOutcome]) -> bool:
    """Whether a checkpoint is to be given up after these tries to rebuild it."""
    return len(tries) > _NUM_REBUILDS or sum(each.is_unexplained for each in tries) > _NUM_UNEXPLAINED


class _KeeperAddresses(msgspec.Struct, frozen=True, array_like=True):
    """The address of the keeper of each node that takes part, by identity; "" where it does not listen."""

    addresses: dict[str, str]


class _RebuildReport(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of the slots that one rank, or all ranks, had rebuilt: nodes that `failed`, or are `silent` or
    `full`, and any `trouble`."""

    failed: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    trouble: str = ""


def rebuild_lost(
    run: Location, folder: NodeFolder, seal: Seal, rebuild: Rebuild, channel: Channel, deadline: Deadline
) -> RebuildOutcome:
    """Have the keepers of the nodes rebuild or fetch what a checkpoint lacks, as copies. Collective."""

    def listen() -> ReachedKeeper:
        if folder.identity() not in rebuild.nodes:
            return ReachedKeeper(folder.identity(), "")
        try:
            ensure_keeper(folder, text_of(run))
            return reached(folder, rebuild.secret)
        except HoldfastError:  # then this node does not take part
            return ReachedKeeper(folder.identity(), "")

    def told(found: Sequence[ReachedKeeper]) -> _KeeperAddresses:
        return _KeeperAddresses({each.identity: each.address for each in found if each.identity in rebuild.nodes})

    def mine() -> _RebuildReport:
        silent = tuple(identity for identity, address in known.addresses.items() if not address)
        if silent:
            return _RebuildReport(silent=silent, trouble=f"{count(len(silent), 'keeper')} did not listen")
        way = Way(TcpPeers(own_host()), known.addresses.get(folder.identity(), ""), rebuild.secret)
        work = _RankWork(way, folder.identity(), seal, rebuild, known.addresses | rebuild.away, deadline)
        reports = [
            work.rebuilt(lost, slot) for lost in rebuild.lost for slot in lost.slots if slot.executor == channel.rank
        ]
        reports += [work.fetched(slot.away) for slot in rebuild.fetched if slot.executor == channel.rank]
        return _merged(reports)

    known = channel.exchange("keepers", attempt(listen), told, deadline, takes=ReachedKeeper, gives=_KeeperAddresses)
    report = channel.exchange("rebuilt", attempt(mine), _merged, deadline, takes=_RebuildReport, gives=_RebuildReport)
    failed, silent, full = frozenset(report.failed), frozenset(report.silent), frozenset(report.full)
    return RebuildOutcome(seal.place, seal.checkpoint_id, failed, silent, full, report.trouble)


class _RankWork(NamedTuple):
    """The slots of the checkpoint of `seal` that a rank has its keeper rebuild, with keepers at these `addresses`."""

    way: Way
    own: str
    seal: Seal
    rebuild: Rebuild
    addresses: dict[str, str]
    deadline: Deadline

    def rebuilt(self, lost: LostSlots, slot: RebuiltSlot) -> _RebuildReport:
        """Have one slot rebuilt."""
        identities = [node.identity for node in lost.group.nodes]
        request = RebuildCopy(
            0,
            lost.group,
            lost.lost,
            tuple("" if at in lost.lost else self.addresses.get(each, "") for at, each in enumerate(identities)),
            identities.index(self.own) if self.own in identities else None,
        )
        offer = OfferCopy(self._contents(slot.slot), slot.slot.digests, slot.slot.rank)
        try:
            timeout_s = _SHARE * self.deadline.remaining_s()
            reply = rebuild_copy(self.way, offer, self.rebuild.generation, request, timeout_s=timeout_s)
        except HoldfastError as error:
            is_full, mine = error.code == "storage.memory", (self.own,)
            return _RebuildReport(silent=() if is_full else mine, full=mine if is_full else (), trouble=error.message)
        match reply:
            case CopyKept():
                return _RebuildReport()
            case NodesFailed():
                silent = [identities[number] for number in reply.silent]
                # Nobody starts the keeper of a node again that has no part in the job.
                away = [each for each in silent if each in self.rebuild.away]
                failed = (*(identities[number] for number in reply.numbers), *away)
                silent = [each for each in silent if each not in away]
                return _RebuildReport(failed, tuple(silent), trouble=reply.reason)
            case Damaged() | Declined() | RequestRefused():
                return _RebuildReport(trouble=reply.reason)
            case _:
                return _RebuildReport(trouble=repr(reply))

    def fetched(self, away: AwaySlot) -> _RebuildReport:
        """Have one slot sent by the node that has it."""
        files = tuple(part.file for part in away.slot.files)
        request = SendCopies(self.seal.checkpoint_id, files, self.addresses[self.own])
        way = Way(self.way.transport, self.addresses[away.node], self.rebuild.secret)
        left_s = _SHARE * self.deadline.remaining_s()
        patience_s = _SEND_S + _SEND_S_PER_NBYTES * sum(part.nbytes for part in away.slot.files)
        try:
            with way.connect() as connection:
                reply = connection.ask(request, timeout_s=min(patience_s, left_s))
                if isinstance(reply, NotTaken):
                    return _RebuildReport(full=(self.own,), trouble=reply.reason)
                require(reply, CopyKept, way)
        except HoldfastError as error:  # another node may have a copy
            return _RebuildReport((away.node,), trouble=error.message)
        return _RebuildReport()

    def _contents(self, slot: SlotDigests) -> Contents:
        first, *more = slot.files
        return Contents(
            self.rebuild.run_id,
            self.seal.checkpoint_id,
            self.seal.place,
            self.seal.step,
            first.file,
            first.data_start,
            first.nbytes,
            second=more[0] if more else None,
        )


def _merged(reports: Sequence[_RebuildReport]) -> _RebuildReport:
    failed = sorted({identity for report in reports for identity in report.failed})
    silent = sorted({identity for report in reports for identity in report.silent})
    full = sorted({identity for report in reports for identity in report.full})
    trouble = next((report.trouble for report in reports if report.trouble), "")
    return _RebuildReport(tuple(failed), tuple(silent), tuple(full), trouble)
