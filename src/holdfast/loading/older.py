"""The advice where a checkpoint is damaged: how the caller gets the next older one that loads, in his own call."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.run.paths import Selection

#: Makes the advice of the path of the older checkpoint, which selects its place, and of its step.
OlderAdvice = Callable[[Selection, int], str]


def load_older(name: Selection, step: int) -> str:
    """The advice of `holdfast.load`."""
    return f"Load '{name}' (step {step}), load with fallback=True, or restore the damaged files."


def restore_older(name: Selection, step: int) -> str:
    """The advice of `Checkpointer.restore`, which `Checkpointer.steps` may have called."""
    return (
        f"Call restore(at='{name.place}') (step {step}) or restore(fallback=True) before the first step, or restore "
        "the damaged files."
    )


def begin_with_older(name: Selection, step: int) -> str:
    """The advice of `Checkpointer.restore` in a run that begins with a checkpoint of another one."""
    return (
        f"Pass initial='{name}' (step {step}), call restore(fallback=True) before the first step, or restore the "
        "damaged files."
    )
