"""The failures of fleets that others have counted and published."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

DAY_S: Final = 86_400.0


class Loss(IntEnum):
    """The loss of a job in one failure. Each value includes the ones before it."""

    PROCESS = 0  # a process ends, and the memory of its node stays
    NODE = 1  # a node is gone, with its memory
    JOB = 2  # more than one node at once, or all


@dataclass(frozen=True)
class FailureData:
    """The failures of a fleet, as a number per node and day. `source` names the fleet and the counts."""

    per_node_day: float
    source: str

    def mttf_s(self, num_nodes: int) -> float:
        """The mean time to a failure of a job on so many nodes, in seconds."""
        return DAY_S / (self.per_node_day * num_nodes)


#: The share of each loss among Llama 3's 419 failures: 98 left the node's memory alone. Nobody has published how often
#: several nodes fail at once; 2 % is a guess between the 1 % and 10 % that are worth trying.
LLAMA3_SHARES: Final = (0.23, 0.75, 0.02)

PRESETS: Final = {
    "llama3": FailureData(3.79e-3, "Llama 3 405B: 419 failures of 2,048 nodes in 54 days"),
    "rsc1": FailureData(6.50e-3, "Meta's RSC-1: 6.50 per 1,000 node-days in 11 months"),
    "rsc2": FailureData(2.34e-3, "Meta's RSC-2: 2.34 per 1,000 node-days in 11 months"),
    "infinitehbd": FailureData(4.19e-3, "InfiniteHBD's trace: 584 faults of 400 nodes in 348 days"),
}


def learned_mttf_s(expected_s: float, *, num_failures: int, observed_s: float) -> float:
    """The mean time to a failure of a job that was expected to fail once in `expected_s`, and has failed `num_failures`
    times in `observed_s` seconds.

    It is the posterior mean of the rate under a Gamma prior that counts as one failure: the expectation matters little
    after a few failures, and a job that does not fail is trusted more and more.
    """
    return (expected_s + observed_s) / (1 + num_failures)
