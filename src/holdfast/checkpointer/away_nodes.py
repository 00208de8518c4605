"""Nodes that had a part in the last job and have none in this one: what their keepers still hold.

A job that goes on with fewer nodes, or with others, may have left its newest state there. The last job's table of peers
names their addresses, and its secret lies beside it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from holdfast.checkpointer.rebuild_plan import AwaySlot
from holdfast.cooperative.network import own_host
from holdfast.errors import HoldfastError
from holdfast.keeper.peer_ways import Way, require
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.peering import digest_of, noted_secret, noted_table
from holdfast.peers.peer_messages import ListedSlot, ListedSlots, ListHeld
from holdfast.peers.tcp import TcpPeers

#: Limits for the keeper of such a node: to be reached, and to answer. Most nodes that are missing are lost.
_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 5.0
#: Number of nodes that are asked at the same time.
_NUM_ASKED: Final = 64

_log = logging.getLogger(__name__)


class AwaySlots(NamedTuple):
    """The slots on nodes that have no part in the job, by checkpoint, and the secret that their keepers know."""

    secret: bytes = b""
    by_id: Mapping[str, Sequence[AwaySlot]] = {}


def away_slots(folder: NodeFolder, present: Collection[str]) -> AwaySlots:
    """Ask the nodes of the last job that are not `present`, by identity, for their slots. `folder` is that of this
    node; where it had no part in that job, none is found. Blocks for seconds if nodes do not answer."""
    secret, table = noted_secret(folder), noted_table(folder)
    if secret is None or table is None or table.secret_digest != digest_of(secret.secret):
        return AwaySlots()
    transport = TcpPeers(own_host())
    ways = [Way(transport, node.address, secret.secret) for node in table.nodes if node.identity not in present]
    found = defaultdict[str, list[AwaySlot]](list)
    if ways:
        with ThreadPoolExecutor(min(len(ways), _NUM_ASKED), thread_name_prefix="holdfast-away") as pool:
            for way, slots in zip(ways, pool.map(_held_at, ways), strict=True):
                for each in slots:
                    found[each.checkpoint_id].append(AwaySlot(way.address, each.slot))
    return AwaySlots(secret.secret, found)


def _held_at(way: Way) -> tuple[ListedSlot, ...]:
    """The slots of a node; none where its keeper cannot be reached."""
    try:
        with way.connect(_CONNECT_S) as connection:
            reply = connection.ask(ListHeld(), timeout_s=_ANSWER_S)
            require(reply, ListedSlots, way)
    except HoldfastError as error:
        _log.info("%s", error)
        return ()
    assert isinstance(reply, ListedSlots)
    return reply.slots
