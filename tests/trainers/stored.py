"""The contents of stored checkpoints, to be compared."""

from __future__ import annotations

from pathlib import Path

import holdfast
from tests.support.bound import bits


def contents(run: Path) -> dict[str, object]:
    """The bits of all tensors, and all values, of the newest checkpoint."""
    view = holdfast.open(run)
    tensors = {name: bits(view[name][...]) for name in view.names()}
    return {"step": view.step, **tensors, **{name: view.value(name) for name in view.value_names()}}
