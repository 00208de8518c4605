"""torchmetrics: metrics, collections and trackers, with the metrics inside them.

Wrappers of metrics and sums of metrics hold other metrics, so the state of a metric contains those of all metrics below
it, by name. torchmetrics itself writes only persistent states, and only those of one metric at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Attributes that torchmetrics' own classes change in `update` or `compute`, beside the states that they declare.
_COUNTERS = {"Running": ("_num_vals_seen",), "MinMaxMetric": ("min_val", "max_val")}


def read_metric(metric: Any) -> dict[str, Any]:
    """The whole state of a metric: its own, its persistent buffers, and those of all metrics inside it."""
    state = _read_part(metric)
    inner = {name: _read_part(part) for name, part in _inner(metric)}
    return state | {"inner": inner} if inner else state


def write_metric(metric: Any, state: Any) -> None:
    """Put back a state that `read_metric` returned."""
    _write_part(metric, state)
    stored, inner = state.get("inner", {}), dict(_inner(metric))
    _require_same("metrics inside it", stored, inner)
    for name, part in inner.items():
        _write_part(part, stored[name])


def read_own(metric: Any) -> dict[str, Any]:
    """A metric's own state, without its buffers and the metrics inside it: its part in a module's state."""
    state = {"update_count": metric.update_count, "state": metric.metric_state}
    names = [name for kind in type(metric).__mro__ for name in _COUNTERS.get(kind.__name__, ())]
    return state | {"counters": {name: getattr(metric, name) for name in names}} if names else state


def write_own(metric: Any, state: Any) -> None:
    """Put back a state that `read_own` returned."""
    declared = metric._defaults  # noqa: SLF001 - what `add_state` declared
    _require_same("states", state["state"], declared)
    for name, default in declared.items():
        value = state["state"][name]
        if isinstance(default, torch.Tensor) and default.ndim and getattr(value, "shape", None) != default.shape:
            raise ValueError(f"its state {name!r} does not have the shape of its default, {tuple(default.shape)}")
    metric.reset()  # drops the cached result
    metric._update_count = state["update_count"]  # noqa: SLF001 - torchmetrics has no other way to say it
    for name, value in (state["state"] | state.get("counters", {})).items():
        setattr(metric, name, _on(metric.device, value))


def read_collection(collection: Any) -> dict[str, Any]:
    """The whole state of a collection of metrics."""
    return {name: read_metric(metric) for name, metric in _members(collection)}


def write_collection(collection: Any, state: Any) -> None:
    """Put back a state that `read_collection` returned."""
    members = dict(_members(collection))
    _require_same("members", state, members)
    for name, metric in members.items():
        write_metric(metric, state[name])


def read_tracker(tracker: Any) -> list[dict[str, Any]]:
    """The state of each step of a tracker."""
    _, *steps = tracker  # the first one is the template of each step
    return [read_collection(step) if hasattr(step, "compute_groups") else read_metric(step) for step in steps]


def write_tracker(tracker: Any, state: Any) -> None:
    """Put back a state that `read_tracker` returned; the tracker then has as many steps as were saved."""
    for name, _ in [*tracker.named_children()][1:]:
        delattr(tracker, name)
    for stored in state:
        tracker.increment()
        step = tracker[-1]
        (write_collection if hasattr(step, "compute_groups") else write_metric)(step, stored)


def share_states(collection: Any) -> None:
    """Update the state of all members of a collection: within a group, only the first one is up to date."""
    _members(collection)


def is_persistent(metric: Any) -> bool:
    """Whether a metric inside a module belongs to the module's state."""
    return any(metric._persistent.values())  # noqa: SLF001 - nothing else tells


def _require_same(what: str, stored: Mapping[str, object], live: Mapping[str, object]) -> None:
    """Refuse the state of a metric of another class, or with other options: torchmetrics would take over a part."""
    if stored.keys() != live.keys():
        here, there = (", ".join(sorted(names)) or "none" for names in (live, stored))
        raise ValueError(f"its {what} are {here} here, and {there} in the checkpoint")


def _read_part(metric: Any) -> dict[str, Any]:
    state = read_own(metric)
    transient = metric._non_persistent_buffers_set  # noqa: SLF001
    buffers = {name: buffer for name, buffer in metric.named_buffers(recurse=False) if name not in transient}
    return state | {"buffers": buffers} if buffers else state


def _write_part(metric: Any, state: Any) -> None:
    write_own(metric, state)
    for name, value in state.get("buffers", {}).items():
        setattr(metric, name, _on(metric.device, value))


def _inner(metric: Any) -> Iterator[tuple[str, Any]]:
    """The metrics inside a metric, with their names. First makes collections share their states."""
    parts = list(metric.named_modules())[1:]
    for _, part in parts:
        if hasattr(part, "compute_groups"):
            share_states(part)
    return ((name, part) for name, part in parts if hasattr(part, "metric_state") and hasattr(part, "_update_count"))


def _members(collection: Any) -> Any:
    return collection.items(keep_base=True, copy_state=False)


def _on(device: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_on(device, part) for part in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
