"""The end of a loop because its machine is taken away: notices of it on this rank, and the agreement of all ranks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from holdfast.calls import NOTICE, outer
from holdfast.checkpointer.rounds import Rounds
from holdfast.checkpointer.signals import SignalNote
from holdfast.phases import LOG
from holdfast.policy.when import OnPreemption, SavePolicy

_log = logging.getLogger(__name__)

#: Part of the time until the machine is gone that is left for the end of the process: a share, and at most so long.
_END_SHARE: Final = 0.2
_END_S: Final = 3.0
#: The least time for an agreement of ranks that all answer.
_AGREEMENT_S: Final = 3.0
#: Time for earlier saves to become durable on a rank that ends its loop alone.
_LAST_S: Final = 10.0
#: The least time that a wait takes, because 0 would mean no limit.
_LEAST_S: Final = 0.1


class Notice(Protocol):
    """Something that tells this rank of a preemption."""

    #: False until the first step has ended: before, there is nothing to save, and a signal ends the process.
    is_armed: bool

    @property
    def name(self) -> str:
        """The name of the teller, for reasons."""

    @property
    def noted_s(self) -> float | None:
        """The time (of `time.monotonic`) at which it first told this rank; None if it did not."""

    @property
    def is_replaced(self) -> bool:
        """Whether other code may have made it deaf."""


class Preemption:
    """The notices of a preemption that came to this rank, and the agreement of all ranks to end the loop for it."""

    def __init__(self, policies: Iterable[SavePolicy], signals: Mapping[int, SignalNote]) -> None:
        self._notices: list[Notice] = []
        self._hooks: list[NoticeHook] = []
        self._deadline_s = math.inf
        for policy in policies:
            if isinstance(policy, OnPreemption):
                self._notices.extend(signals[signum] for signum in policy.signums)
                if policy.deadline_s is not None:
                    self._deadline_s = policy.deadline_s - min(_END_SHARE * policy.deadline_s, _END_S)
                if policy.notice is not None:
                    self._hooks.append(NoticeHook(policy.notice, poll_s=policy.poll_s))
        self._notices.extend(self._hooks)
        self._is_armed = False
        #: Whether all ranks have agreed to end the loop after the last step that ended.
        self.is_agreed = False
        #: Whether this rank ends the loop alone, because the others did not agree in time.
        self.is_given_up = False
        #: The time that this rank waits for the agreement where no deadline is shorter.
        self.patience_s = math.inf
        #: The time at which this rank first asked for it, and for how long it asks.
        self._asked_s: float | None = None
        self._limit_s = math.inf
        #: The time at which a rank was first told, as far as this rank knows: the deadline counts from it.
        self._known_s: float | None = None

    def arm(self) -> None:
        """The first step has ended: signals no longer end the process."""
        if self._is_armed:
            return
        self._is_armed = True
        for each in self._notices:
            each.is_armed = True
            if each.is_replaced:
                _log.warning(
                    "other code has set a handler of %s after this Checkpointer was made. If it does not call the "
                    "one before it, no preemption is noticed: make the Checkpointer later",
                    each.name,
                )

    @property
    def reason(self) -> str | None:
        """The reason for a save that ends the loop, if this rank has heard of a preemption."""
        told = [(each.noted_s, each.name) for each in self._notices if each.noted_s is not None]
        if not told:
            return None
        noted_s, name = min(told)
        if self._known_s is None:
            LOG.info("this rank hears of a preemption (%s); all ranks save soon, and end the loop", name)
        self._know(noted_s)
        return f"preempted by {name}"

    @property
    def is_missed(self) -> bool:
        """Whether this rank has heard of a preemption that no save has followed."""
        return not self.has_ended and self.reason is not None

    @property
    def has_ended(self) -> bool:
        """Whether the loop ends with the last step that ended."""
        return self.is_agreed or self.is_given_up

    def has_waited(self) -> bool:
        """Count the time since the first call: call it in each step in which this rank asks the others to end the loop.
        Returns whether they have not agreed in time."""
        now_s = time.monotonic()
        if self._asked_s is None:  # the step may have taken longer than any limit
            self._asked_s = now_s
            self._limit_s = min(self.patience_s, max(self._remaining_s(), _AGREEMENT_S))
        return now_s - self._asked_s >= self._limit_s

    def give_up(self) -> None:
        """This rank ends its loop alone: some others are dead or stuck, and its signals would go unheard for ever."""
        _log.warning(
            "this rank heard of a preemption %.0f s ago and asked the others to end the loop, but some do not answer: "
            "it ends its loop alone, without a save of the last steps",
            self.age_s,
        )
        self.is_given_up = True
        self._deadline_s = min(self._deadline_s, self.age_s + _LAST_S)

    @property
    def age_s(self) -> float:
        """The seconds since a rank was first told, as far as this rank knows; 0 if it knows of nothing."""
        return 0.0 if self._known_s is None else time.monotonic() - self._known_s

    def agree(self, *, age_s: float = 0.0) -> None:
        """All ranks have agreed, `age_s` seconds after one of them was told."""
        self._know(time.monotonic() - age_s)
        self.is_agreed = True

    @property
    def known_left_s(self) -> float:
        """As `left_s`, as far as this rank knows alone; others may not know of it yet."""
        return math.inf if self.reason is None else self._remaining_s()

    @property
    def left_s(self) -> float:
        """The seconds until this rank has to leave its machine, which is gone soon after: at least a tenth of a second.
        Infinite if nobody said so, and before all ranks have agreed: until then they wait for each other as ever."""
        return self._remaining_s() if self.has_ended else math.inf

    def close(self) -> None:
        """Stop asking the hook."""
        for each in self._hooks:
            each.close()

    def _remaining_s(self) -> float:
        assert self._known_s is not None
        return max(self._known_s + self._deadline_s - time.monotonic(), _LEAST_S)

    def _know(self, noted_s: float) -> None:
        self._known_s = noted_s if self._known_s is None else min(self._known_s, noted_s)


class NoticeHook:
    """Asks a function of the user for a notice, in the background, until it gives one."""

    def __init__(self, ask: Callable[[], str | None], *, poll_s: float) -> None:
        self._answer = _Answer(ask, poll_s)
        self.is_armed = True
        self._rounds = Rounds(self._answer.look, name="holdfast-notice")

    @property
    def name(self) -> str:
        """As `Notice.name`."""
        return f"a notice: {self._answer.text}"

    @property
    def noted_s(self) -> float | None:
        """As `Notice.noted_s`."""
        return self._answer.noted_s

    @property
    def is_replaced(self) -> bool:
        """As `Notice.is_replaced`."""
        return False

    def close(self) -> None:
        """Stop asking."""
        self._rounds.close()


class _Answer:
    """The `text` that the function has given, and the time of it; both are None before it gives one."""

    def __init__(self, ask: Callable[[], str | None], poll_s: float) -> None:
        self._ask = ask
        self._poll_s = poll_s
        self._has_warned = False
        self.text: str | None = None
        self.noted_s: float | None = None

    @outer(NOTICE)
    def look(self) -> float | None:
        """Ask. Returns the pause until the next question; None after an answer."""
        try:
            answer = self._ask()
            if answer:
                self.text, self.noted_s = str(answer), time.monotonic()
        except (Exception, SystemExit):  # noqa: BLE001 - whatever the user's function does, it is asked again
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the notice hook of OnPreemption failed, and is asked again", exc_info=True)
        return self._poll_s if self.text is None else None
