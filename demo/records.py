"""The small files that a training writes and the launcher reads. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

_Line = TypeVar("_Line")

LOSSES = "losses.jsonl"
SAVES = "saves.jsonl"


class Started(msgspec.Struct, frozen=True):
    """A rank's process."""

    pid: int


class Loss(msgspec.Struct, frozen=True):
    """The loss of one step over the whole batch. Its text in JSON stands for exactly one float."""

    step: int
    value: float


class Save(msgspec.Struct, frozen=True):
    """A save of rank 0, and for how long it held the training up."""

    step: int
    blocked_s: float


class State(msgspec.Struct, frozen=True):
    """SHA-256 digests of a whole state by name: each tensor gathered in full, and each table of values."""

    tensors: dict[str, str]
    values: dict[str, str]

    def differences(self, other: State) -> set[str]:
        """Names that only one of two states has, or whose digests differ."""
        return {name for name, _ in self.everything().items() ^ other.everything().items()}

    def everything(self) -> dict[str, str]:
        """All digests by name."""
        return self.tensors | self.values


class Restored(msgspec.Struct, frozen=True):
    """A restore of one rank: the step, the tier, the number of bytes that it read, and the time that it took."""

    step: int
    tier: str
    nbytes: int
    seconds: float


def restored_file(rank: int) -> str:
    return f"restored.rank-{rank}.json"


def started_file(rank: int) -> str:
    return f"rank-{rank}.json"


def state_file(moment: str, step: int, rank: int) -> str:
    return f"{moment}-{step}.rank-{rank}.json"


def read_losses(folder: Path) -> dict[int, float]:
    """Loss by step, as far as the training in `folder` has come."""
    return {loss.step: loss.value for loss in _read_lines(folder / LOSSES, Loss)}


def read_saves(folder: Path) -> list[Save]:
    """The saves of the training in `folder` that have returned."""
    return _read_lines(folder / SAVES, Save)


def _read_lines(file: Path, kind: type[_Line]) -> list[_Line]:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return []
    # What follows the last newline is still being written.
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    return [msgspec.json.decode(line, type=kind) for line in lines]


def read_restored(folder: Path, *, world_size: int) -> list[Restored]:
    """The restores of all ranks of the training in `folder`."""
    files = [folder / restored_file(rank) for rank in range(world_size)]
    return [msgspec.json.decode(file.read_bytes(), type=Restored) for file in files]


def read_states(folder: Path, moment: str, step: int, *, world_size: int) -> list[State]:
    """The notes of all ranks of the training in `folder` about their state at `moment` of `step`."""
    files = [folder / state_file(moment, step, rank) for rank in range(world_size)]
    return [msgspec.json.decode(file.read_bytes(), type=State) for file in files]
