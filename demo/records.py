"""The small files that a training writes and the launcher reads. Needs no torch."""

from __future__ import annotations

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


class Read(msgspec.Struct, frozen=True):
    """What a rank read from storage to load its part of a checkpoint."""

    nbytes: int


def read_file(rank: int) -> str:
    return f"read.rank-{rank}.json"


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


def read_reads(folder: Path, *, world_size: int) -> list[int]:
    """The bytes that each rank of the training in `folder` read from storage."""
    files = [folder / read_file(rank) for rank in range(world_size)]
    return [msgspec.json.decode(file.read_bytes(), type=Read).nbytes for file in files]


def read_states(folder: Path, moment: str, step: int, *, world_size: int) -> list[State]:
    """What each rank of the training in `folder` noted of its state at `moment` of `step`."""
    files = [folder / state_file(moment, step, rank) for rank in range(world_size)]
    return [msgspec.json.decode(file.read_bytes(), type=State) for file in files]
