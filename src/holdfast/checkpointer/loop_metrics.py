"""The metrics that a loop gives after its steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import SupportsFloat

from holdfast.saving import check_metric, checked_metrics

_log = logging.getLogger(__name__)


class LoopMetrics:
    """Checks the metrics of each step of one loop. What is no metric is an error in the first step, and later left out
    with a warning: an error would end the job, and lose all steps since the last save."""

    def __init__(self) -> None:
        self._has_begun = False
        #: The metrics that a warning has named.
        self._told: set[object] = set()

    def sound(self, metrics: Mapping[str, SupportsFloat] | None) -> Mapping[str, SupportsFloat]:
        """Those of `metrics` that can be recorded. Reads no numbers. Raises `TypeError` or `ValueError` in the first
        step."""
        is_first, self._has_begun = not self._has_begun, True
        try:
            return checked_metrics(metrics)
        except (TypeError, ValueError) as error:
            if is_first:
                raise
            given = metrics if isinstance(metrics, Mapping) else {}
            found = dict(filter(self._is_sound, given.items()))
            if len(found) < len(given):
                return self.sound(found)
            self._warn(None, error)
            return {}

    def _is_sound(self, metric: tuple[str, SupportsFloat]) -> bool:
        try:
            check_metric(*metric)
        except (TypeError, ValueError) as error:
            self._warn(metric[0], error)
            return False
        return True

    def _warn(self, name: object, error: Exception) -> None:
        if name not in self._told:
            self._told.add(name)
            _log.warning("a metric of a step is left out, as are later ones like it: %s", error)
