"""The content of a `TrainerState` and of the callbacks of transformers, as entries of a state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerState

from holdfast.frameworks.random_generators import GeneratorStates, RandomGenerators
from holdfast.state.per_rank import PerRank


class TrainerRecords:
    """The fields of `state` that say what has happened so far, and the random generators at the beginning of the epoch.

    A rank has its own, because times and measurements differ between ranks. The first rank alone saves the log.
    """

    def __init__(self, state: TrainerState) -> None:
        self._state = state
        self.epoch_random: GeneratorStates = RandomGenerators().read()

    def state_dict(self) -> dict[str, object]:
        """The fields, as plain values."""
        state = self._state
        best = state.best_metric
        return {
            "best_metric": None if best is None else float(best),
            "best_global_step": state.best_global_step,
            "total_flos": float(state.total_flos),
            "num_input_tokens_seen": int(state.num_input_tokens_seen),
            "log_history": json.dumps(state.log_history if state.is_world_process_zero else [], default=float),
            "epoch_random": self.epoch_random,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring the fields into the `TrainerState`."""
        self.epoch_random = state["epoch_random"]
        self._state.log_history = json.loads(state["log_history"])
        for name in ("best_metric", "best_global_step", "total_flos", "num_input_tokens_seen"):
            setattr(self._state, name, state[name])


class CallbackRecords:
    """The attributes of a callback that it exports, such as the counter of an `EarlyStoppingCallback`. What its maker
    chose, its arguments, stays as it is."""

    def __init__(self, callback: ExportableState) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, Any]:
        """The attributes."""
        return {"attributes": self._callback.state()["attributes"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes."""
        for name, value in state["attributes"].items():
            setattr(self._callback, name, value)


def with_records(extra: Mapping[str, object]) -> dict[str, object]:
    """The entries `extra`, with those callbacks that export a state as objects that can be saved."""
    return {
        name: PerRank(CallbackRecords(item), on_resize="first") if isinstance(item, ExportableState) else item
        for name, item in extra.items()
    }
