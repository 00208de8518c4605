"""What ranks tell each other when they save into memory."""

from __future__ import annotations

import msgspec

from holdfast.format.records import Place
from holdfast.saving.messages import Compare, Questions


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells first: its state as in a save, and the plan that it knows ("": none).

    `sealed` is the newest checkpoint of which its part is in memory, whole; `full`: it has no slot for another one now.
    `given_up` are ids of checkpoints whose copy failed here since the last save.
    """

    described: bytes
    plan_id: str
    sealed: Place | None
    full: bool
    given_up: tuple[str, ...]


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """Which checkpoint is to be staged, by which plan. `manifest` is one of the plan, for ranks that do not know it;
    empty where all do.

    What comes before `needed` is not needed any more: all ranks have that in memory, whole. `given_up` are checkpoints
    that can never be whole.
    """

    folder: str
    checkpoint_id: str
    run_id: str
    place: Place
    step: int
    created: float
    metrics: dict[str, float]
    diverged: tuple[str, ...]
    plan_id: str
    manifest: bytes
    needed: Place | None
    given_up: tuple[str, ...]


class Skipped(msgspec.Struct, frozen=True, tag="skipped"):
    """Nothing is saved: the ranks in `full` have no slot yet."""

    full: tuple[int, ...]
    given_up: tuple[str, ...]


Answer = Questions | Compare | Agreed | Skipped
