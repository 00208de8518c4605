"""Nodes that had a part in the last job and have none in this one: what their keepers still hold.

A job that goes on with fewer nodes, or with others, may have left its newest state there. The last job's table of peers
names their addresses, and its secret lies beside it. Any node of that job has them: the first one may be new.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from holdfast.checkpointer.rebuild_plan import AwayShare
from holdfast.cooperative.network import own_host
from holdfast.errors import HoldfastError
from holdfast.format.container import FileLayout, Files
from holdfast.keeper.peer_ways import Way, require
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.parity_records import SlotDigests
from holdfast.node_memory.peering import PeerNode, digest_of, noted_secret, noted_table
from holdfast.peers.peer_messages import ListedSlots, ListHeld
from holdfast.peers.tcp import TcpPeers

#: Limits for the keeper of such a node: to be reached, and to answer. Most nodes that are missing are lost.
_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 5.0
#: Number of nodes that are asked at the same time.
_NUM_ASKED: Final = 64

_log = logging.getLogger(__name__)


class KnownPeers(msgspec.Struct, frozen=True, array_like=True):
    """The nodes of a job, as one of them knows them, and its secret."""

    secret: bytes = b""
    nodes: tuple[PeerNode, ...] = ()

    @property
    def name(self) -> str:
        """A name that the nodes of other jobs do not have; it does not tell the secret. "" where none is known."""
        return digest_of(self.secret).hex() if self.secret else ""


def known_peers(folder: NodeFolder) -> KnownPeers:
    """The nodes of the last job that the node of `folder` had a part in; none where they did not meet."""
    secret, table = noted_secret(folder), noted_table(folder)
    if secret is None or table is None or table.secret_digest != digest_of(secret.secret):
        return KnownPeers()
    return KnownPeers(secret.secret, table.nodes)


def away_shares(peers: KnownPeers, present: Collection[str]) -> Mapping[str, Sequence[AwayShare]]:
    """Ask the nodes of the last job that are not `present`, by identity, for what they hold. Returns it by checkpoint.
    Blocks for seconds if nodes do not answer."""
    transport = TcpPeers(own_host())
    away = [node for node in peers.nodes if node.identity not in present]
    ways = [Way(transport, node.address, peers.secret) for node in away]
    found = defaultdict[str, list[AwayShare]](list)
    if ways:
        with ThreadPoolExecutor(min(len(ways), _NUM_ASKED), thread_name_prefix="holdfast-away") as pool:
            for node, listed in zip(away, pool.map(_held_at, ways), strict=True):
                for checkpoint_id, share in _shares(node.identity, listed):
                    found[checkpoint_id].append(share)
    return found


def _shares(node: str, listed: ListedSlots) -> Iterator[tuple[str, AwayShare]]:
    """Sort by checkpoint what a node has listed."""
    with_slots = [each.checkpoint_id for each in (*listed.own, *listed.copies)]
    for id_ in dict.fromkeys([*with_slots, *(each.checkpoint_id for each in listed.rows)]):
        own, copies = (
            [each.slot for each in slots if each.checkpoint_id == id_] for slots in (listed.own, listed.copies)
        )
        yield id_, AwayShare(node, own, copies, [each.record for each in listed.rows if each.checkpoint_id == id_])


def fitting(share: AwayShare, layouts: Files) -> AwayShare:
    """The part of what a node says that it holds that can be of the checkpoint with these `layouts`."""
    own, copies = ([slot for slot in slots if _fits(slot, layouts)] for slots in (share.own, share.copies))
    rows = [row for row in share.rows if all(_fits(slot, layouts) for node in row.group.nodes for slot in node.slots)]
    return AwayShare(share.node, own, copies, rows)


def _fits(slot: SlotDigests, layouts: Files) -> bool:
    return len(slot.files) == len(slot.digests) and all(
        0 <= part.file < len(layouts.manifest.file_names)
        and (part.data_start, part.nbytes) == _sizes(layouts.layout(part.file))
        for part in slot.files
    )


def _sizes(layout: FileLayout) -> tuple[int, int]:
    return layout.data_start, layout.nbytes


def _held_at(way: Way) -> ListedSlots:
    """The slots and rows of a node; none where its keeper cannot be reached."""
    try:
        with way.connect(_CONNECT_S) as connection:
            reply = connection.ask(ListHeld(), timeout_s=_ANSWER_S)
            require(reply, ListedSlots, way)
    except HoldfastError as error:
        _log.info("%s", error)
        return ListedSlots(())
    assert isinstance(reply, ListedSlots)
    return reply
