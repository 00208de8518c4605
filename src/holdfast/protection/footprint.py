"""The cost of protection for a node: memory, traffic of a save, traffic of a rebuild."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.protection.policies import Copies, Parity


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The bytes that a policy costs, for nodes with snapshots of one size.

    `memory_nbytes` are those in the memory of a node: of all generations, with the copies or parity of others.
    `sent_nbytes` are what a node sends for a save, and receives as many. `rebuilt_nbytes` cross the network when one
    lost node is rebuilt, and `link_nbytes` of them the most used link.
    """

    memory_nbytes: int
    sent_nbytes: int
    rebuilt_nbytes: int
    link_nbytes: int


def footprint(policy: Copies | Parity | None, *, num_nodes: int, nbytes: int, generations: int) -> Footprint:
    """The footprint of a policy (None: no protection) that keeps `generations` snapshots of `nbytes` bytes per node.

    A node that was lost gets its snapshot from one copy. From parity, each byte of it passes all nodes of the group
    that hold a part of the sum, one after another, so every link carries the snapshot at most once.
    """
    if policy is None:
        return Footprint(memory_nbytes=generations * nbytes, sent_nbytes=0, rebuilt_nbytes=0, link_nbytes=0)
    if isinstance(policy, Copies):
        held, sent, rebuilt = policy.n * nbytes, policy.n * nbytes, nbytes
    else:
        size = num_nodes // (num_nodes // policy.group_size(num_nodes))
        held = -(-policy.losses * nbytes // (size - policy.losses))
        sent, rebuilt = policy.losses * nbytes, (size - policy.losses) * nbytes
    return Footprint(
        memory_nbytes=generations * (nbytes + held), sent_nbytes=sent, rebuilt_nbytes=rebuilt, link_nbytes=nbytes
    )
