"""Triggers: the observers that some policies need, because the number of a step does not tell when they are due.

A trigger runs in one process. Its answer is a wish; all ranks then agree on a step for the save.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol, SupportsFloat

from holdfast.policy.when import EveryTime, OnMetric, SavePolicy
from holdfast.policy.wish import Wish

_log = logging.getLogger(__name__)

#: After so many steps without its metric, a trigger says so.
_PATIENCE_STEPS: Final = 1000

Metrics = Mapping[str, SupportsFloat]


class Trigger(Protocol):
    """Observes a training loop."""

    def wish(self, metrics: Metrics | None, now_s: float) -> Wish | None:
        """The wish for a save soon after the step that just ended; None if there is none. `now_s` is the time by a
        monotonic clock."""

    def saved(self, now_s: float, *, memory_only: bool) -> None:
        """A save has begun, for whatever reason, or, if it has `memory_only`, was skipped."""


class TimeTrigger:
    """Observes an `EveryTime`."""

    def __init__(self, policy: EveryTime, *, now_s: float) -> None:
        self._policy = policy
        self._last_s = now_s

    def wish(self, metrics: Metrics | None, now_s: float) -> Wish | None:
        """As `Trigger.wish`."""
        interval_s, memory_only = self._policy.seconds, self._policy.memory_only
        return Wish(f"every {interval_s:g} s", memory_only) if now_s - self._last_s >= interval_s else None

    def saved(self, now_s: float, *, memory_only: bool) -> None:
        """As `Trigger.saved`."""
        if self._policy.memory_only or not memory_only:
            self._last_s = now_s


class MetricTrigger:
    """Observes an `OnMetric`. Warns once if the metric is nan, and once if it does not appear in a thousand steps."""

    def __init__(self, policy: OnMetric) -> None:
        self._policy = policy
        self._best = math.inf
        self._sign = 1.0 if policy.mode == "min" else -1.0
        self._num_absent = 0
        self._has_warned = False

    def wish(self, metrics: Metrics | None, now_s: float) -> Wish | None:
        """As `Trigger.wish`."""
        name = self._policy.name
        given = None if metrics is None else metrics.get(name)
        if given is None:
            self._miss(metrics)
            return None
        self._num_absent = -1  # it has appeared
        try:
            value = float(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metric {name!r} must be one number, not {given!r:.80}") from error
        if math.isnan(value):
            self._warn(f"metric {name!r} is nan, which is never better; check what the loop gives to step(metrics=)")
        elif not self._best - self._sign * value > self._policy.min_delta:
            return None
        else:
            self._best = self._sign * value
            return Wish(f"{name} {value:g} is the best so far")
        return None

    def saved(self, now_s: float, *, memory_only: bool) -> None:
        """As `Trigger.saved`."""

    def _miss(self, metrics: Metrics | None) -> None:
        if self._num_absent < 0:
            return
        self._num_absent += 1
        if self._num_absent == _PATIENCE_STEPS:
            others = f"; its metrics are {', '.join(map(repr, metrics))}" if metrics else ""
            self._warn(
                f"no step has had the metric {self._policy.name!r} in {_PATIENCE_STEPS:,} steps, so OnMetric saves "
                f"nothing; give it to step(metrics=){others}"
            )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s", text)


def triggers_of(policies: Iterable[SavePolicy], *, now_s: float) -> Iterator[Trigger]:
    """The triggers of those policies that the clock or a metric decides."""
    for policy in policies:
        match policy:
            case EveryTime():
                yield TimeTrigger(policy, now_s=now_s)
            case OnMetric():
                yield MetricTrigger(policy)
