"""`megatron_state`: a job of Megatron-core as a state that holdfast saves, and loads on any layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.frameworks.megatron_model import MegatronChunks
from holdfast.frameworks.megatron_optimizer import MegatronSlots
from holdfast.frameworks.tested_versions import require_tested
from holdfast.state.per_rank import PerRank
from holdfast.state.random_state import RandomState

__all__ = ["megatron_state"]


def megatron_state(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, object]:
    """The state of a Megatron-core job, for `save`, `load` and `Checkpointer`. Make it once; add entries of your own.

        >>> state = megatron_state(model, optimizer, opt_param_scheduler) | {"progress": progress}
        >>> step = holdfast.load(run, into=state).next_step
        >>> holdfast.save(run, state, step)

    `model` is what ``get_model`` returns: a chunk, or one chunk for each virtual pipeline stage, with or without
    wrappers for data parallelism. `optimizer` is what ``get_megatron_optimizer`` returns. Saves read them anew each
    time, copy nothing whole, and gather nothing. The names of weights are Megatron's keys, so they depend on no layout:
    a load may have any other tensor, pipeline, virtual pipeline, expert and data parallelism, and another kind of
    optimizer. A vocabulary may be padded differently: new rows are zero then.

    The entries are ``model``; ``optimizer``, with master weights, moments, groups, steps and loss scalers;
    ``scheduler``; ``random``; and ``model_parallel_random``, the generators of Megatron's tracker, which continue on
    the same number of ranks and else stay as they are. A load that leaves the optimizer out (``select="model"``) copies
    the weights into its master weights.

    `metadata` goes to ``sharded_state_dict`` and decides about the keys, such as ``{"non_homogeneous_layers": True}``
    for one tensor per layer instead of stacks of all layers. Pass the same in all jobs of a run.

    Raises `TypeError` for chunks without a ``sharded_state_dict``, and `StateError`, code ``state.megatron``, for other
    versions of Megatron-core than 0.16, and for an optimizer that holdfast does not know: precision-aware ones, those
    of Megatron-FSDP, Muon, and optimizers on the CPU.
    """
    action = "save with megatron.core.dist_checkpointing"
    require_tested("megatron.core", code="state.megatron", action=action)
    chunks = MegatronChunks([model] if isinstance(model, nn.Module) else list(model), metadata or {})
    state: dict[str, object] = {"model": chunks}
    if optimizer is not None:
        state["optimizer"] = MegatronSlots(optimizer, chunks)
    if scheduler is not None:
        state["scheduler"] = scheduler
    tracker = _TrackedGenerators()
    state["random"] = RandomState()
    state["model_parallel_random"] = PerRank(tracker, on_resize=lambda *_: tracker.state_dict())
    return state


class _TrackedGenerators:
    """The random generators that tensor-parallel ranks have beside torch's own."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Their states, by the names that Megatron gives them; none where they are not in use."""
        tracker = _tracker()
        states = {} if tracker is None else tracker.get_states()
        return {name: state for name, state in states.items() if isinstance(state, torch.Tensor)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Have them go on from `state`."""
        tracker = _tracker()
        if tracker is not None and state:
            tracker.set_states({**tracker.get_states(), **state})


def _tracker() -> Any:
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if module is None else module.get_cuda_rng_tracker()
