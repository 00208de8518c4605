"""The contenders: one way each to save and load the same state.

All are collective over the world; `save` returns when this rank's part is durable.
"""

from __future__ import annotations

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
from bench.raw import RawFile, RawImage
from bench.results import RAW, Traits, raw_name
from bench.state import Memory, State, as_bytes, local, walk

#: Threads per rank with which the raw limit runs in every round.
RAW_THREADS = (1, 2, 4)


class Contender(Protocol):
    """Something that saves `memory` to an empty folder and loads it back in place."""

    memory: Memory

    def save(self, folder: Path) -> None:
        """Save durably into the empty `folder`."""

    def load(self, folder: Path) -> None:
        """Load what `save` left in `folder`."""


class Raw:
    """The raw limit with a fixed number of threads per rank."""

    def __init__(self, image: RawImage, *, threads: int, direct: bool) -> None:
        self.memory: Memory = image
        self._file = RawFile(image, threads=threads, direct=direct)

    def save(self, folder: Path) -> None:
        """Write this rank's file."""
        self._file.write(_rank_file(folder))

    def load(self, folder: Path) -> None:
        """Read this rank's file."""
        self._file.read(_rank_file(folder))


class TorchSave:
    """`torch.save` and `torch.load` of one file per rank."""

    def __init__(self, state: State) -> None:
        self.memory: Memory = state
        self._state = state

    def save(self, folder: Path) -> None:
        """Write this rank's tensors and values, then fsync the file."""
        with _rank_file(folder).open("wb") as file:
            torch.save(self._state.tensors() | self._state.values(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        """Read this rank's file and copy it into the state."""
        loaded = torch.load(_rank_file(folder), map_location="cpu", weights_only=True)
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

    def save(self, folder: Path) -> None:
        """Save the state as step 0 of a new run."""
        holdfast.save(str(folder), self._state.tree, 0)

    def load(self, folder: Path) -> None:
        """Load the run's head into the state."""
        holdfast.load(str(folder), into=self._state.tree)


_BUILDERS: dict[str, Callable[[State], Contender]] = {"torch.save": TorchSave, "dcp": Dcp, "holdfast": Holdfast}

#: Every contender, in the order of the table.
NAMES = (RAW, *_BUILDERS)


def entrants(names: tuple[str, ...]) -> tuple[str, ...]:
    """What takes a turn in each round: the raw limit once per number of threads, then the others of `names`.

    SetupError for a name that is not known.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SetupError(f"There is no contender {', '.join(unknown)}. Choose from {', '.join(NAMES)}.")
    others = tuple(name for name in _BUILDERS if name in names)
    return (*(raw_name(threads) for threads in RAW_THREADS), *others)


def build(names: tuple[str, ...], state: State, *, direct: bool) -> dict[str, Contender]:
    """The entrants for `names`, all on the same state."""
    image = RawImage([as_bytes(tensor) for tensor in state.tensors().values()])
    raws: dict[str, Contender] = {
        raw_name(threads): Raw(image, threads=threads, direct=direct) for threads in RAW_THREADS
    }
    return {name: raws[name] if name in raws else _BUILDERS[name](state) for name in entrants(names)}


def traits(name: str, *, direct: bool) -> Traits:
    """What the figures of contender `name` include."""
    return {
        RAW: Traits(
            name=RAW,
            description="pwritev/preadv loops, one file per rank",
            durable="fdatasync",
            verified="no",
            io="direct" if direct else "buffered: the filesystem refused O_DIRECT",
        ),
        "torch.save": Traits(
            name="torch.save",
            description="torch.save/torch.load, one file per rank",
            durable="fsync of each file",
            verified="no",
            io="buffered",
        ),
        "dcp": Traits(
            name="dcp",
            description="torch.distributed.checkpoint.save/load, defaults",
            durable="fsync of each file",
            verified="no",
            io="buffered",
        ),
        "holdfast": Traits(
            name="holdfast",
            description="holdfast.save/load, defaults",
            durable="fsync of files and folders, sealed and committed",
            verified="digest of every block read",
            io="direct where the filesystem takes it",
        ),
    }[name]


def _rank_file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}"
