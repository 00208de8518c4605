"""The contenders: one way each to save and load the same state.

All are collective over the world; `save` returns when this rank's part is durable.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from bench.errors import SetupError
from bench.peers import Safetensors, TorchCheckpointing, TorchSnapshot
from bench.raw import RAW_WAYS, RawFile, RawImage, RawWay
from bench.results import RAW, raw_name
from bench.state import Memory, State, local, walk

#: Holdfast again, with all its saves in one run: after the warm-up each of them is a later save.
LATER = "holdfast-later"


class Contender(Protocol):
    """Something that saves `memory` to a folder and loads it back in place."""

    memory: Memory

    def save(self, folder: Path) -> None:
        """Save durably into `folder`: an empty one, or the one of all its saves (see `folder_of`)."""

    def load(self, folder: Path) -> None:
        """Load what `save` left in `folder`."""


class Raw:
    """The raw limit, in one way."""

    def __init__(self, image: RawImage, way: RawWay, *, direct: bool) -> None:
        self.memory: Memory = image
        self._file = RawFile(image, way, direct=direct)

    def save(self, folder: Path) -> None:
        """Write this rank's file."""
        self._file.write(_rank_file(folder, dist.get_rank()))

    def load(self, folder: Path) -> None:
        """Read this rank's file."""
        self._file.read(_rank_file(folder, dist.get_rank()))


class TorchSave:
    """`torch.save` and `torch.load` of one file per rank; of one file for all where all hold the same."""

    def __init__(self, state: State) -> None:
        self.memory: Memory = state
        self._state = state
        self._rank = dist.get_rank() if state.is_sharded() else 0

    def save(self, folder: Path) -> None:
        """Write this rank's tensors and values, then fsync the file."""
        if self._rank != dist.get_rank():
            return
        with _rank_file(folder, self._rank).open("wb") as file:
            torch.save(self._state.tensors() | self._state.values(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        """Read the file and copy it into the state."""
        loaded = torch.load(_rank_file(folder, self._rank), map_location="cpu", weights_only=True)
        for parent, key, path, leaf in list(walk(self._state.tree)):
            if isinstance(leaf, torch.Tensor):
                local(leaf).copy_(loaded[path])
            else:
                parent[key] = loaded[path]


class Dcp:
    """`torch.distributed.checkpoint` with its defaults."""

    def __init__(self, state: State) -> None:
        self.memory: Memory = state
        self._state = state

    def save(self, folder: Path) -> None:
        """Save the state as it is."""
        dcp_save(self._state.tree, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load into the state."""
        dcp_load(self._state.tree, checkpoint_id=folder)


class Holdfast:
    """`holdfast.save` and `holdfast.load` with their defaults."""

    def __init__(self, state: State) -> None:
        self.memory: Memory = state
        self._state = state
        self._steps = itertools.count()

    def save(self, folder: Path) -> None:
        """Save the state as the next step of the run in `folder`: a new one in an empty folder."""
        holdfast.save(str(folder), self._state.tree, next(self._steps))

    def load(self, folder: Path) -> None:
        """Load the run's head into the state."""
        holdfast.load(str(folder), into=self._state.tree)


_BUILDERS: dict[str, Callable[[State], Contender]] = {
    "torch.save": TorchSave,
    "dcp": Dcp,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": TorchSnapshot,
    "safetensors": Safetensors,
    "holdfast": Holdfast,
    LATER: Holdfast,
}

#: Every contender, in the order of the tables.
NAMES = (RAW, *_BUILDERS)
#: Those of `bench io` and of `bench load` unless they are asked for others, and those of `bench small`.
IO_NAMES = (RAW, "torch.save", "dcp", "holdfast")
LOAD_NAMES = tuple(name for name in NAMES if name != LATER)
SMALL_NAMES = ("dcp", "holdfast", LATER)


def entrants(names: tuple[str, ...]) -> tuple[str, ...]:
    """What takes turns: the raw limit of `names` once in each way, then the others.

    SetupError for a name that is not known.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SetupError(f"There is no contender {', '.join(unknown)}. Choose from {', '.join(NAMES)}.")
    raws = tuple(raw_name(way) for way in RAW_WAYS if RAW in names)
    return (*raws, *(name for name in _BUILDERS if name in names))


def folder_of(name: str, number: int, root: Path) -> Path:
    """Where `name` saves in round `number`: a new folder below `round_folder`, or one and the same run below `root`."""
    return root / name if name == LATER else round_folder(number, root) / name


def kept_folder(name: str, root: Path) -> Path:
    """Where `name` saves what outlives the rounds, below `root`."""
    return root / name


def round_folder(number: int, root: Path) -> Path:
    """The folder below `root` of what round `number` leaves behind."""
    return root / f"round-{number}"


def build(names: tuple[str, ...], state: State, *, direct: bool) -> dict[str, Contender]:
    """The entrants for `names`, all on the same state."""
    built: dict[str, Contender] = {}
    if RAW in names:
        image = RawImage(state.share(dist.get_rank(), dist.get_world_size()))
        built |= {raw_name(name): Raw(image, way, direct=direct) for name, way in RAW_WAYS.items()}
    return {name: built[name] if name in built else _BUILDERS[name](state) for name in entrants(names)}


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
