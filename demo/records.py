"""The small files that a training writes and the launcher reads. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

LOSSES = "losses.jsonl"


class Started(msgspec.Struct, frozen=True):
    """A rank's process."""

    pid: int


class Loss(msgspec.Struct, frozen=True):
    """The loss of one step over the whole batch. Its text in JSON stands for exactly one float."""

    step: int
    value: float


def started_file(rank: int) -> str:
    return f"rank-{rank}.json"


def state_file(moment: str, step: int, rank: int) -> str:
    return f"{moment}-{step}.rank-{rank}.json"


def read_losses(folder: Path) -> dict[int, float]:
    """Loss by step, as far as the training in `folder` has come."""
    try:
        text = (folder / LOSSES).read_bytes()
    except FileNotFoundError:
        return {}
    # What follows the last newline is still being written.
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    return {loss.step: loss.value for loss in (msgspec.json.decode(line, type=Loss) for line in lines)}


def read_state(folder: Path, moment: str, step: int, *, rank: int) -> Mapping[str, str]:
    """The digests that `rank` took of its state at `moment` of `step`, by name."""
    return msgspec.json.decode((folder / state_file(moment, step, rank)).read_bytes(), type=dict[str, str])
