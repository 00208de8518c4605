"""Triggers: the observers that some policies need, because the number of a step does not tell when they are due.

A trigger runs in one process. Its answer is a wish; all ranks then agree on a step for the save.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol, SupportsFloat

from holdfast.policy.metric_names import MetricWatch
from holdfast.policy.when import EveryTime, OnMetric, SavePolicy
from holdfast.policy.wish import Wish

_log = logging.getLogger(__name__)

#: After so many steps without any metric, a trigger says that its own is missing.
_PATIENCE_STEPS: Final = 1000
#: After so many steps with other metrics, it says so already: most loops that give metrics after each step also give
#: those of an evaluation within a hundred, and their user still looks at the log.
_PATIENCE_GIVEN: Final = 100

Metrics = Mapping[str, SupportsFloat]


class Trigger(Protocol):
    """Observes a training loop."""

    def wish(self, metrics: Metrics | None, now_s: float) -> Wish | None:
        """The wish for a save soon after the step that just ended; None if there is none. `now_s` is the time by a
        monotonic clock."""

    def saved(self, now_s: float, *, begun_s: float, memory_only: bool) -> None:
        """A save has begun at the time `begun_s`, for whatever reason, or, if it has `memory_only`, was skipped. It
        grants wishes that came before."""


class TimeTrigger:
    """Observes an `EveryTime`."""

    def __init__(self, policy: EveryTime, *, now_s: float) -> None:
        self._policy = policy
        self._last_s = now_s

    def wish(self, metrics: Metrics | None, now_s: float) -> Wish | None:
        """As `Trigger.wish`."""
        interval_s, memory_only = self._policy.seconds, self._policy.memory_only
        return Wish(f"every {interval_s:g} s", memory_only) if now_s - self._last_s >= interval_s else None

    def saved(self, now_s: float, *, begun_s: float, memory_only: bool) -> None:
        """As `Trigger.saved`."""
        if self._policy.memory_only or not memory_only:
            self._last_s = now_s


class MetricTrigger:
    """Observes an `OnMetric`. Warns once if the metric is nan, and once if it does not appear: at once where a metric
    has nearly its name, after a hundred steps with other metrics, or after a thousand steps without any."""

    def __init__(self, policy: OnMetric) -> None:
        self._policy = policy
        self._best = math.inf
        self._sign = 1.0 if policy.mode == "min" else -1.0
        self._watch = MetricWatch(policy.name)
        #: Steps without the metric, and those of them that had others.
        self._num_absent = self._num_others = 0
        self._has_warned_of_nan = False

    def wish(self, metrics: Metrics | None, now_s: float) -> Wish | None:
        """As `Trigger.wish`."""
        name = self._policy.name
        given = None if metrics is None else metrics.get(name)
        if given is None:
            self._miss(metrics)
            return None
        self._watch.is_over = True
        try:
            value = float(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metric {name!r} must be one number, not {given!r:.80}") from error
        if math.isnan(value):
            if not self._has_warned_of_nan:
                self._has_warned_of_nan = True
                text = "metric %r is nan, which is never better; check what the loop gives to step(metrics=)"
                _log.warning(text, name)
        elif not self._best - self._sign * value > self._policy.min_delta:
            return None
        else:
            self._best = self._sign * value
            return Wish(f"{name} {value:g} is the best so far")
        return None

    def saved(self, now_s: float, *, begun_s: float, memory_only: bool) -> None:
        """As `Trigger.saved`."""

    def _miss(self, metrics: Metrics | None) -> None:
        if self._watch.is_over:
            return
        self._num_absent += 1
        self._num_others += bool(metrics)
        name, near = self._policy.name, self._watch.slip(metrics or ())
        if near is not None:
            how = f"step() gets no metric {name!r}; did you mean {near!r}?"
        elif self._num_others == _PATIENCE_GIVEN:
            others = ", ".join(map(repr, metrics or ()))
            how = f"{_PATIENCE_GIVEN} steps had other metrics than {name!r} (the last one {others})"
        elif self._num_absent == _PATIENCE_STEPS:
            how = f"no step has had the metric {name!r} in {_PATIENCE_STEPS:,} steps; give it to step(metrics=)"
        else:
            return
        self._watch.is_over = True
        _log.warning("OnMetric(%r) saves nothing so far: %s", name, how)


def triggers_of(policies: Iterable[SavePolicy], *, now_s: float) -> Iterator[Trigger]:
    """The triggers of those policies that the clock or a metric decides."""
    for policy in policies:
        match policy:
            case EveryTime():
                yield TimeTrigger(policy, now_s=now_s)
            case OnMetric():
                yield MetricTrigger(policy)
