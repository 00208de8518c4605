"""The restore that a callback makes at the start of a training, whose user has no state to load into."""

from __future__ import annotations

from holdfast.checkpointer import Checkpointer
from holdfast.checkpointer.restore_report import RestoreReport
from holdfast.errors import IncompatibleError


def restore_in_callback(checkpointer: Checkpointer, *, at: str | None) -> RestoreReport:
    """As `Checkpointer.restore`. The error for a checkpoint that does not fit says what works with a callback."""
    try:
        return checkpointer.restore(at=at)
    except IncompatibleError as error:
        error.action += (
            ' A callback makes its state by itself: call holdfast.load before the training, with into={"model": model} '
            'and select="model", and give the callback a new run.'
        )
        raise
