"""Holders of copies where no cells fit: every node has `n` holders and holds for `n` nodes.

This is a maximum flow from owners to holders, by augmenting paths. It finds holders wherever there are any.
"""

from __future__ import annotations

import numpy as np

from holdfast.protection.neighbourhood import Numbers, Relation


def spread(allowed: Relation, n: int) -> list[list[int]] | None:
    """For each node `n` holders, of those that are `allowed` in its row, so that each node holds for `n` nodes. None if
    there is no such choice."""
    if allowed.sum(axis=0).min() < n or allowed.sum(axis=1).min() < n:
        return None
    flow = _Flow(allowed, n)
    if not all(flow.add(owner) for owner in range(len(allowed)) for _ in range(n)):
        return None
    return [np.flatnonzero(row).tolist() for row in flow.held]


class _Flow:
    """A choice of holders, which grows by one copy at a time. `held` has a row for each owner."""

    def __init__(self, allowed: Relation, n: int) -> None:
        self._allowed = allowed
        self._room = np.full(len(allowed), n)
        self.held = np.zeros_like(allowed)

    def add(self, first: int) -> bool:
        """Find one more holder for the owner `first`: one with room, or one whose owner moves to another holder, and so
        on. Returns False if there is none."""
        giver = np.full(len(self._allowed), -1)  # the owner that a holder would take on
        source = {first: -1}  # the holder that an owner would leave
        queue = [first]
        for owner in queue:
            new = self._allowed[owner] & ~self.held[owner] & (giver < 0)
            giver[new] = owner
            free = np.flatnonzero(new & (self._room > 0))
            if free.size:
                # Away from the owner, so that neighbours do not keep each other's copies.
                self._shift(int(free[np.searchsorted(free, owner + len(giver) // 2) % free.size]), giver, source)
                return True
            for holder in np.flatnonzero(new).tolist():
                for other in np.flatnonzero(self.held[:, holder]).tolist():
                    if other not in source:
                        source[other] = holder
                        queue.append(other)
        return False

    def _shift(self, holder: int, giver: Numbers, source: dict[int, int]) -> None:
        """Give `holder` its new owner, and the holder that this owner leaves its new one, back to the first owner."""
        self._room[holder] -= 1
        while holder >= 0:
            owner = int(giver[holder])
            self.held[owner, holder] = True
            holder = source[owner]
            if holder >= 0:
                self.held[owner, holder] = False
