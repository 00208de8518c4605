"""The counts of torchtitan's `Trainer`, which is its own entry ``train_state``.

Each rank counts the tokens that it has seen itself. Torchtitan adds the counts of the ranks that see different tokens.
A checkpoint has the sum, so that it goes on right on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_TOKENS: Final = "ntokens_seen"


def read_counts(trainer: Any) -> dict[str, object]:
    """The state of a trainer, with the tokens of all ranks."""
    state: dict[str, object] = dict(trainer.state_dict())
    tokens = state.get(_TOKENS)
    return state | ({_TOKENS: tokens * _num_counters(trainer)} if isinstance(tokens, int) else {})


def write_counts(trainer: Any, state: Mapping[str, object]) -> None:
    """Have a trainer go on from `state`, with an equal share of the tokens on each rank."""
    tokens = state.get(_TOKENS)
    share = {_TOKENS: tokens // _num_counters(trainer)} if isinstance(tokens, int) else {}
    trainer.load_state_dict({**state, **share})


def _num_counters(trainer: Any) -> int:
    """The number of ranks whose counts add up."""
    mesh = trainer.parallel_dims.get_optional_mesh("loss")
    return 1 if mesh is None else int(mesh.size())
