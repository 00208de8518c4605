"""The ranks of a channel, as its messages call them, and the errors that stand for ranks that will not come."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import DeadlineError, HoldfastError


def ranges(ranks: Sequence[int]) -> str:
    """Sorted `ranks` as text for a message, runs of three and more as ``64-127``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


class ChannelMembers:
    """The ranks of one job. Another kind of group overrides the words in which errors name its members.

    `given_up` has the error of each member that is known not to answer any more. Any thread may add to it; the ranks
    that wait for such a member then fail at once, with its error.
    """

    def __init__(self) -> None:
        self.given_up: dict[int, Exception] = {}

    def names(self, ranks: Sequence[int]) -> str:
        """The words for the sorted `ranks` in a message."""
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"

    def advice(self, absent: Sequence[int]) -> str:
        """The next action where `absent` ranks did not come in time."""
        return (
            f"Read the log of {self.names(absent)} for the cause. Every rank must make this call; if ranks are only "
            "slow, raise timeout_s."
        )

    def ended(self, rank: int) -> HoldfastError:
        """The error that is contributed for a rank whose process has ended."""
        return DeadlineError(
            f"the process of {self.names([rank])} has ended.",
            code="timeout.rank_ended",
            action=f"Read the log of {self.names([rank])} for the cause, then restart the job.",
            rank=rank,
            absent=(rank,),
        )
