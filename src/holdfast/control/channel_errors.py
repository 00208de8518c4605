"""The errors that end an operation of several ranks, and the words in which they name ranks and operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from holdfast.control.channel_members import ChannelMembers
from holdfast.errors import ConfigurationError, DeadlineError, HoldfastError

#: Number of absent ranks whose last operation an error names.
_MAX_TOLD: Final = 64


def what(phase: str, label: str) -> str:
    """A phase of the operation `label`, in an error text."""
    return f"'{phase}' of {label}"


def is_ahead(step: int | None, of: int | None) -> bool:
    """Whether an operation is of a later step than another one; False where either has no step."""
    return step is not None and of is not None and step > of


def with_local_traceback(error: HoldfastError, outcome: Exception, *, rank: int, is_alone: bool) -> HoldfastError:
    """The error to raise on a rank that failed with `outcome`, when all ranks raise `error`. The traceback of `outcome`
    helps more than the news that some rank failed: so this returns `outcome` itself where `error` reports it, else
    `error` with `outcome` as its only cause."""
    if isinstance(outcome, HoldfastError):
        if is_alone:
            return outcome  # "1 of 1 ranks failed" tells nothing new
        if error.rank == rank and error.message.endswith(outcome.message):
            outcome.message, outcome.rank = error.message, error.rank
            return outcome
        outcome.__cause__ = None
    error.__cause__ = outcome
    return error


def out_of_step(rank: int, found: str, expected: str, members: ChannelMembers) -> ConfigurationError:
    """The error about a rank that is in another phase, or another operation, than rank 0."""
    return ConfigurationError(
        f"{members.names([rank])} is in {found} while rank 0 is in {expected}.",
        code="config.call_order",
        action="Make the same holdfast calls in the same order, with the same step, on every rank.",
        rank=rank,
    )


def late(
    absent: Sequence[int], expected: str, timeout_s: float, strayed: str, members: ChannelMembers
) -> DeadlineError:
    """The error about ranks that did not come in time; `strayed` is what `told_of` says of them."""
    return DeadlineError(
        f"{members.names(absent)} did not reach {expected} within {timeout_s:g} s{strayed}.",
        code="timeout.ranks",
        action=members.advice(absent),
        rank=absent[0] if len(absent) == 1 else None,
        absent=tuple(absent),
    )


def told_of(
    absent: Sequence[int], whereabouts: Callable[[int], str | None], members: ChannelMembers, *, label: str
) -> str:
    """For an error text: the last operations of the first `_MAX_TOLD` absent ranks, where they differ from `label`."""
    strayed: dict[str | None, list[int]] = {}
    for rank in absent[:_MAX_TOLD]:
        place = whereabouts(rank)
        if place != label:
            strayed.setdefault(place, []).append(rank)
    told = ", ".join(
        f"{members.names(ranks)} {'made no call yet' if place is None else f'was last in {place}'}"
        for place, ranks in strayed.items()
    )
    return f" ({told})" if told else ""
