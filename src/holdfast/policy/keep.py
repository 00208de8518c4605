"""Policies for how much to keep: they choose, from the checkpoints of a run, those that stay. Pure; deletes nothing.

A policy names the checkpoints that it wants, and a union of policies wants whatever one of its parts wants. `decide`
adds the rules that no policy can lift: the head stays, and everything down to the newest verified checkpoint, and
everything that is held for another reason (a pin, a reader, an epoch that was opened from it).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from typing import Literal, NamedTuple, NoReturn, Protocol, SupportsFloat, runtime_checkable

from holdfast.format.records import Place
from holdfast.options import checked_number
from holdfast.policy.metric_names import meant
from holdfast.wording import count

#: The reasons of `decide` for the checkpoints that no policy can delete.
HEAD = "it is the head"
VERIFIED = "it is the newest checkpoint that was verified"
UNVERIFIED = "it is newer than the newest checkpoint that was verified"
#: The end of a policy's reason for a checkpoint in quarantine.
NOT_COUNTED = "but it is in quarantine, so the policy does not count it"
#: The reason for all of them while a policy cannot judge.
UNJUDGED = "a policy cannot judge yet"


class CheckpointFacts(NamedTuple):
    """The facts about one committed checkpoint. `created` is in unix seconds; `held` are the reasons why it stays,
    whatever a policy says. `is_quarantined`: it was found to be damaged in storage.

    `nbytes` are the bytes of data in its own folder. Of these, a deletion leaves ``kept_nbytes`` at most, in still
    files that other checkpoints refer to. ``save_nbytes`` are those that its save wrote; None: all.
    """

    place: Place
    step: int
    created: float
    nbytes: int
    metrics: Mapping[str, float]
    held: tuple[str, ...] = ()
    is_quarantined: bool = False
    kept_nbytes: int = 0
    save_nbytes: int | None = None

    @property
    def freed_nbytes(self) -> int:
        """The bytes that its deletion frees at once."""
        return self.nbytes - self.kept_nbytes

    @property
    def coming_nbytes(self) -> int:
        """The bytes that a save like its own writes."""
        return self.nbytes if self.save_nbytes is None else self.save_nbytes


class PolicyProblem(NamedTuple):
    """A trouble of a policy: a stable `key`, the cause, and the next action. While a problem `blocks`, nothing is
    deleted."""

    key: str
    message: str
    action: str
    blocks: bool


@runtime_checkable
class KeepPart(Protocol):
    """One policy, which is not a union."""

    @property
    def subject(self) -> str:
        """The subject that the policy speaks about: two parts of a union must not have the same one."""

    def wanted(self, lineage: Sequence[CheckpointFacts], *, now: float) -> dict[Place, str]:
        """The places of the checkpoints to keep, each with the reason. `lineage` is newest first."""

    def problem(self, lineage: Sequence[CheckpointFacts]) -> PolicyProblem | None:
        """The trouble that keeps the policy from judging, or that its user should know."""


class KeepPolicy:
    """A rule for which checkpoints stay. ``a | b`` is the policy that keeps what `a` or `b` keeps."""

    def __or__(self, other: object) -> KeepUnion:
        if not isinstance(other, KeepPolicy):
            return NotImplemented
        return KeepUnion((*parts_of(self), *parts_of(other)))

    def __and__(self, other: object) -> NoReturn:
        raise no_and(self, other)

    def __bool__(self) -> NoReturn:
        raise untrue(self)


@dataclass(frozen=True)
class KeepLast(KeepPolicy):
    """Keep the newest `number` checkpoints."""

    number: int

    def __post_init__(self) -> None:
        _set(self, "number", _number("KeepLast", self.number))

    @property
    def subject(self) -> str:
        """As `KeepPart.subject`."""
        return "KeepLast"

    def wanted(self, lineage: Sequence[CheckpointFacts], *, now: float) -> dict[Place, str]:
        """As `KeepPart.wanted`."""
        reason = "it is the last one" if self.number == 1 else f"it is one of the last {self.number}"
        return {facts.place: reason for facts in lineage[: self.number]}

    def problem(self, lineage: Sequence[CheckpointFacts]) -> PolicyProblem | None:
        """As `KeepPart.problem`."""
        return None


@dataclass(frozen=True)
class KeepEvery(KeepPolicy):
    """Keep the checkpoints whose step is a multiple of `steps`. That is the number of the step itself: after steps
    9,999, 10,000 and 10,001, ``KeepEvery(10_000)`` keeps the second. Step 0 is a multiple, too."""

    steps: int

    def __post_init__(self) -> None:
        _set(self, "steps", _number("KeepEvery", self.steps))

    @property
    def subject(self) -> str:
        """As `KeepPart.subject`."""
        return f"KeepEvery({self.steps})"

    def wanted(self, lineage: Sequence[CheckpointFacts], *, now: float) -> dict[Place, str]:
        """As `KeepPart.wanted`."""
        reason = f"its step is a multiple of {self.steps}"
        return {facts.place: reason for facts in lineage if facts.step % self.steps == 0}

    def problem(self, lineage: Sequence[CheckpointFacts]) -> PolicyProblem | None:
        """As `KeepPart.problem`."""
        return None


@dataclass(frozen=True)
class KeepFor(KeepPolicy):
    """Keep the checkpoints that are younger than `time`: a `datetime.timedelta`, or a number of seconds."""

    time: float | timedelta
    seconds: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        time: object = self.time
        if isinstance(time, timedelta):
            seconds = time.total_seconds()
        elif isinstance(time, bool) or not isinstance(time, SupportsFloat):
            raise TypeError(f"KeepFor takes a datetime.timedelta or a number of seconds, not {time!r}")
        else:
            seconds = float(time)
        if not 0 < seconds < math.inf:
            raise ValueError(f"KeepFor takes a positive time, not {time}: a checkpoint is never younger than that")
        _set(self, "seconds", seconds)

    @property
    def subject(self) -> str:
        """As `KeepPart.subject`."""
        return "KeepFor"

    def wanted(self, lineage: Sequence[CheckpointFacts], *, now: float) -> dict[Place, str]:
        """As `KeepPart.wanted`."""
        reason = f"it is younger than {_span(self.seconds)}"
        return {facts.place: reason for facts in lineage if now - facts.created < self.seconds}

    def problem(self, lineage: Sequence[CheckpointFacts]) -> PolicyProblem | None:
        """As `KeepPart.problem`."""
        return None


@dataclass(frozen=True)
class KeepBest(KeepPolicy):
    """Keep the `number` checkpoints with the best `metric`: the smallest, or with ``mode="max"`` the greatest.

    The metrics are those of ``save(..., metrics={...})``. A checkpoint without the metric, and one where it is nan, is
    never among the best. Of equal ones, the newer is the better. As long as no checkpoint has the metric, nothing is
    deleted, because a misspelt name must not delete the best checkpoints.
    """

    metric: str
    number: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise TypeError(f"KeepBest takes the name of a metric, not {self.metric!r}")
        if not self.metric:
            raise ValueError("KeepBest takes the name of a metric, not an empty text")
        if self.mode not in ("min", "max"):
            raise ValueError(f"the mode of KeepBest is 'min' or 'max', not {self.mode!r}")
        _set(self, "number", _number("KeepBest", self.number))

    @property
    def subject(self) -> str:
        """As `KeepPart.subject`."""
        return f"KeepBest({self.metric!r})"

    @property
    def missing(self) -> str:
        """The key of the problem that no checkpoint has the metric."""
        return f"missing {self.metric}"

    def wanted(self, lineage: Sequence[CheckpointFacts], *, now: float) -> dict[Place, str]:
        """As `KeepPart.wanted`."""
        sign = 1.0 if self.mode == "min" else -1.0
        measured = [
            (sign * value, age, facts.place)
            for age, facts in enumerate(lineage)
            if not math.isnan(value := facts.metrics.get(self.metric, math.nan))
        ]
        which = ("smallest" if self.mode == "min" else "greatest") + f" {self.metric}"
        reason = f"it has the {which}" if self.number == 1 else f"it has one of the {self.number} {which} values"
        return {place: reason for _, _, place in heapq.nsmallest(self.number, measured, key=itemgetter(0, 1))}

    def problem(self, lineage: Sequence[CheckpointFacts]) -> PolicyProblem | None:
        """As `KeepPart.problem`."""
        values = [facts.metrics[self.metric] for facts in lineage if self.metric in facts.metrics]
        num_nan = sum(map(math.isnan, values))
        if lineage and num_nan == len(values):
            found = sorted({name for facts in lineage for name in facts.metrics})
            have = f"they have {', '.join(map(repr, found[:8]))}" if found else "they have no metrics"
            what = f"has the metric {self.metric!r} ({have})" if not values else f"has {self.metric!r} other than nan"
            near = meant(self.metric, found) if not values else None
            another = "another metric" if near is None else repr(near)
            return PolicyProblem(
                self.missing,
                f"no checkpoint {what}, so {self.subject} cannot choose the best ones, and nothing is deleted",
                f"Pass metrics={{{self.metric!r}: ...}} to save, or name {another} in KeepBest.",
                blocks=True,
            )
        if num_nan:
            return PolicyProblem(
                f"nan {self.metric}",
                f"the metric {self.metric!r} is nan in some checkpoints, which are never among the best",
                "Find out why it is nan; to keep such checkpoints, pin them.",
                blocks=False,
            )
        return None


@dataclass(frozen=True)
class KeepUnion(KeepPolicy):
    """The union of several policies: it keeps a checkpoint if one of its `parts` wants it. ``|`` makes it.

    Raises `ValueError` where two parts contradict each other, as ``KeepLast(3) | KeepLast(5)``, or the best of one
    metric by two modes.
    """

    parts: tuple[KeepPart, ...]

    def __post_init__(self) -> None:
        seen: dict[str, KeepPart] = {}
        for part in self.parts:
            other = seen.setdefault(part.subject, part)
            if other is not part:
                raise ValueError(f"{other!r} and {part!r} contradict each other in one policy; leave one of them out")


class KeptCheckpoint(NamedTuple):
    """A checkpoint that stays, and all reasons for that."""

    facts: CheckpointFacts
    reasons: tuple[str, ...]


class KeepDecision(NamedTuple):
    """The decision about a lineage: what stays, what goes (the oldest first), and troubles of the policy."""

    kept: tuple[KeptCheckpoint, ...]
    deleted: tuple[CheckpointFacts, ...]
    problems: tuple[PolicyProblem, ...]


def check_keep(keep: object) -> None:
    """Raise `TypeError` unless `keep` is a policy of this module, or None."""
    if keep is not None and not isinstance(keep, KeepPolicy):
        raise TypeError(
            "keep must be KeepLast, KeepEvery, KeepBest or KeepFor, or several of them joined by |, or None to keep "
            f"everything, not {keep!r}{join_hint('keep', keep, KeepPolicy)}"
        )


def join_hint(option: str, value: object, kind: type) -> str:
    """A hint for a user who gave several policies of one `kind` to an `option` as a list; empty for any other value."""
    if isinstance(value, list | tuple | set | frozenset) and value and all(isinstance(each, kind) for each in value):
        return f"; write {option}={' | '.join(map(repr, value))}"
    return ""


def untrue(policy: object) -> TypeError:
    """The error for asking whether a policy is true, as Python's `or` and `and` do, which would drop one of two."""
    return TypeError(
        f"a policy is neither true nor false; join policies with |, not with the words or and and: {policy!r} | ..."
    )


def no_and(one: object, other: object) -> TypeError:
    """The error for ``one & other``."""
    return TypeError(f"policies are joined with |, not with &: {one!r} | {other!r}")


def parts_of(policy: KeepPolicy) -> tuple[KeepPart, ...]:
    """The parts of a union; a policy that is none is its only part."""
    if isinstance(policy, KeepUnion):
        return policy.parts
    assert isinstance(policy, KeepPart)
    return (policy,)


def decide(
    policy: KeepPolicy, lineage: Sequence[CheckpointFacts], *, verified: Place | None, now: float
) -> KeepDecision:
    """Choose what stays of `lineage`, the head and its ancestors, newest first.

    `verified` is the newest checkpoint of the lineage whose files were all found, in their sealed sizes; None where
    there is none: then nothing goes. `now` is in unix seconds. The policy chooses among the checkpoints that are not in
    quarantine. One in quarantine stays as long as the policy would keep it if it were sound.
    """
    parts = parts_of(policy)
    reasons: dict[Place, list[str]] = {facts.place: list(facts.held) for facts in lineage}
    for place, reason in _guarded(lineage, verified):
        reasons[place].append(reason)
    sound = [facts for facts in lineage if not facts.is_quarantined]
    shut = {facts.place for facts in lineage if facts.is_quarantined}
    for part in parts:
        for place, reason in part.wanted(sound, now=now).items():
            reasons[place].append(reason)
        for place, reason in part.wanted(lineage, now=now).items() if shut else ():
            if place in shut:
                reasons[place].append(f"{reason}, {NOT_COUNTED}")
    doomed = [facts for facts in lineage if not reasons[facts.place]]
    problems = tuple(problem for part in parts if (problem := part.problem(lineage)) is not None)
    if any(problem.blocks for problem in problems):
        for facts in doomed:
            reasons[facts.place].append(UNJUDGED)
        # Without a checkpoint to delete, it does not matter yet that a policy cannot judge.
        problems = tuple(problem for problem in problems if doomed or not problem.blocks)
        doomed = []
    kept = [KeptCheckpoint(facts, tuple(reasons[facts.place])) for facts in lineage if reasons[facts.place]]
    # The oldest goes first: if the deletion ends half way, what is left is the newer part.
    return KeepDecision(tuple(kept), tuple(reversed(doomed)), problems)


def _guarded(lineage: Sequence[CheckpointFacts], verified: Place | None) -> Iterable[tuple[Place, str]]:
    """The places that no policy can delete, each with the reason: the head, and all down to the `verified` one."""
    if lineage:
        yield lineage[0].place, HEAD
    for facts in lineage:
        if facts.place == verified:
            yield facts.place, VERIFIED
            return
        yield facts.place, UNVERIFIED


def _span(seconds: float) -> str:
    """A time as text, in the largest unit of which it is a whole number."""
    for unit_s, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds % unit_s == 0:
            return count(int(seconds // unit_s), unit)
    return f"{seconds:g} seconds"


def _number(policy: str, number: object) -> int:
    return checked_number(f"the number of {policy}", number, least=1, reason="a policy keeps at least one checkpoint")


def _set(policy: object, name: str, value: object) -> None:
    """Set a field of a frozen policy while it is made."""
    object.__setattr__(policy, name, value)
