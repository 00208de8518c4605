"""A rank's way to have the keeper of its node rebuild a slot that was lost with another node."""

from __future__ import annotations

from typing import Final

import numpy as np

from holdfast.keeper.peer_ways import Way, require
from holdfast.peers.peer_messages import (
    CopyWanted,
    Noted,
    OfferCopy,
    PeerReply,
    PutGeneration,
    RebuildCopy,
)

#: The least time for a keeper to carry out a request.
_LEAST_S: Final = 1.0


def rebuild_copy(way: Way, offer: OfferCopy, generation: bytes, request: RebuildCopy, *, timeout_s: float) -> PeerReply:
    """Have the keeper at `way` rebuild the slot that `offer` describes, of a checkpoint with this encoded `generation`.
    The token of the `request` is set here. Returns `CopyKept` when it is whole and verified, or as `RebuildCopy` says.

    Raises:
        StorageError: the keeper does not answer in time, or has no memory for the copy.
    """
    timeout_s = max(timeout_s, _LEAST_S)
    with way.connect(timeout_s) as connection:
        reply = connection.ask(offer, timeout_s=timeout_s)
        if not isinstance(reply, CopyWanted):
            return reply
        if reply.needs_generation:
            put = PutGeneration(offer.contents.checkpoint_id, len(generation))
            data = np.frombuffer(generation, np.uint8)
            require(connection.put(put, data, timeout_s=timeout_s), Noted, way)
        token, group = reply.token, request.group
        wanted = RebuildCopy(token, group, request.lost, request.addresses, request.own)
        return connection.ask(wanted, timeout_s=timeout_s)
