"""The card of a node."""

from __future__ import annotations

import msgspec


class NodeCard(msgspec.Struct, frozen=True, array_like=True):
    """The description that a node gives of itself at rendezvous.

    `identity` differs from that of every other node. `ranks` are the ranks on the node. `domains` are the failure
    domains that the node lies in, the smallest first, such as its rack and then its block; all nodes name as many. A
    name holds inside the larger domains: rack ``3`` of block ``a`` is another one than rack ``3`` of block ``b``.

    `groups` has a label for each tensor, pipeline and data group of its ranks. Two nodes with the same label have ranks
    in one group.
    """

    identity: str
    host: str
    ranks: tuple[int, ...]
    domains: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
