"""A rank's way to have the keeper of its node rebuild a slot that was lost with another node."""

from __future__ import annotations

from typing import Final

from holdfast.keeper.peer_ways import Way, put_generation
from holdfast.peers.peer_errors import not_taken
from holdfast.peers.peer_messages import (
    CopyWanted,
    Declined,
    OfferCopy,
    PeerReply,
    RebuildCopy,
)

#: The least time for a keeper to carry out a request.
_LEAST_S: Final = 1.0


def rebuild_copy(way: Way, offer: OfferCopy, generation: bytes, request: RebuildCopy, *, timeout_s: float) -> PeerReply:
    """Have the keeper at `way` rebuild the slot that `offer` describes, of a checkpoint with this encoded `generation`.
    The token of the `request` is set here. Returns `CopyKept` when it is whole and verified, or as `RebuildCopy` says;
    `Declined` where the keeper does not take it now.

    Raises:
        StorageError: the keeper does not answer in time; code ``storage.memory``, its node has no memory for the copy.
    """
    timeout_s = max(timeout_s, _LEAST_S)
    with way.connect(timeout_s) as connection:
        reply = connection.ask(offer, timeout_s=timeout_s)
        if isinstance(reply, Declined) and reply.is_full:
            raise not_taken(way.address, reply.reason)
        if not isinstance(reply, CopyWanted):
            return reply
        if reply.needs_generation:
            put_generation(way, connection, offer.contents.checkpoint_id, generation, timeout_s=timeout_s)
        token, group = reply.token, request.group
        wanted = RebuildCopy(token, group, request.lost, request.addresses, request.own)
        return connection.ask(wanted, timeout_s=timeout_s)
