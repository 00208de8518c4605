"""Which node each file of a checkpoint is read from.

A file in the memory of the node that wrote it is read there. The others are read from copies in the memory of peers, or
from disks of nodes, and all nodes read at once: so the slowest of them sets the time, and the plan keeps it low.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

from holdfast.checkpoint.catalogue import Tier


class LostFile(NamedTuple):
    """A file of `nbytes` bytes, with the nodes that hold it, and the nearest tier in which each does. The plan prefers
    the first of nodes that are alike."""

    nbytes: int
    holders: Mapping[str, Tier]


class FileSource(NamedTuple):
    """The node that a file is read on, and the tier there."""

    node: str
    tier: Tier


class Rates(NamedTuple):
    """The bytes per second that a node sends from its memory to others, and that it reads from its disk."""

    network: float
    disk: float

    def seconds(self, nbytes: int, tier: Tier) -> float:
        """The time in which a node brings a file from this tier to another node. What it needs itself, it has."""
        if tier in {Tier.LIVE_MEMORY, Tier.NODE_MEMORY}:
            return 0.0
        return nbytes / (self.network if tier is Tier.PEER_MEMORY else self.disk)


#: Rates of a node with 100 Gbit/s and one NVMe disk, where nobody has measured any. Only their ratio counts then.
ORDINARY_RATES: Final = Rates(network=12.5e9, disk=2.5e9)


def plan_sources(
    files: Sequence[LostFile], rates: Rates = ORDINARY_RATES, *, measured: Mapping[str, float] | None = None
) -> list[FileSource | None]:
    """For each file its source; None for one that no node holds. `measured` has the bytes per second that nodes have
    sent to others; a node that is not in it sends like the median of them, or by `rates` if none has been measured.

    The files with fewest holders come first, the largest of them before others, and each goes to the node that would
    have it read soonest. Then files leave the busiest node while this makes the whole end sooner.
    """
    network = median(measured.values()) if measured else rates.network
    plan = _SourcePlan(files, Rates(network, rates.disk), measured or {})
    for number in sorted(range(len(files)), key=lambda file: (len(files[file].holders), -files[file].nbytes)):
        plan.place(number)
    while plan.relieve():
        pass
    return plan.sources


class _SourcePlan:
    """The sources of files, and how long each node is busy with them."""

    def __init__(self, files: Sequence[LostFile], rates: Rates, measured: Mapping[str, float]) -> None:
        self._files = files
        self._rates = rates
        self._rates_of = {node: Rates(network, rates.disk) for node, network in measured.items()}
        self._busy_s: dict[str, float] = {}
        self._moved: dict[str, list[int]] = {}  # by node, the files that it sends to others
        self.sources: list[FileSource | None] = [None] * len(files)

    def place(self, number: int) -> None:
        """Give a file the holder that has it read soonest."""
        soonest = self._soonest(number, self._files[number].holders)
        if soonest is not None:
            self._take(number, soonest)

    def relieve(self) -> bool:
        """Move a file from the busiest node to another holder that ends sooner; False if there is none."""
        busiest = max(self._busy_s, key=self._busy_s.__getitem__, default="")
        for number in self._moved.get(busiest, []):
            holders = self._files[number].holders
            other = self._soonest(number, [node for node in holders if node != busiest])
            if other is not None and self._end_s(number, other) < self._busy_s[busiest]:
                self._moved[busiest].remove(number)
                self._busy_s[busiest] = sum(self._seconds(each, busiest) for each in self._moved[busiest])
                self._take(number, other)
                return True
        return False

    def _take(self, number: int, node: str) -> None:
        self.sources[number] = FileSource(node, self._files[number].holders[node])
        if self._seconds(number, node):
            self._busy_s[node] = self._end_s(number, node)
            self._moved.setdefault(node, []).append(number)

    def _soonest(self, number: int, nodes: Iterable[str]) -> str | None:
        holders = self._files[number].holders
        return min(nodes, key=lambda node: (self._end_s(number, node), holders[node].distance), default=None)

    def _end_s(self, number: int, node: str) -> float:
        """The time at which the node ends with this file, after those that it has; 0 for a file in its own memory."""
        seconds = self._seconds(number, node)
        return self._busy_s.get(node, 0.0) + seconds if seconds else 0.0

    def _seconds(self, number: int, node: str) -> float:
        file = self._files[number]
        return self._rates_of.get(node, self._rates).seconds(file.nbytes, file.holders[node])
