"""The contenders: one way each to save and load the same state, and what their figures include."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from bench.peers import Safetensors, TorchCheckpointing, TorchSnapshot
from bench.raw import RAW_WAYS, RawFile, RawImage, RawWay
from bench.schema import RAW, Contender, chosen, raw_name
from bench.state import State, local, walk
from bench.way import Way

#: Holdfast again, with all its saves in one run: after the warm-up each of them is a later save.
LATER = "holdfast-later"
SYNCED, SEALED = "fsync of each file", "fsync of files and folders, sealed and committed"
DIRECT = "direct where the filesystem takes it"
_VERIFIED = "digest of every block read"
NOT_INSTALLED = "it is not installed; `make bench` installs it"

_CONTENDERS = (
    Contender(RAW, "pwritev/preadv loops, one file per rank", "fdatasync", "no", "direct"),
    Contender(
        "torch.save", "torch.save/torch.load, one file per rank, or one for all ranks where all hold the same", SYNCED
    ),
    Contender("dcp", "torch.distributed.checkpoint.save/load, defaults", SYNCED),
    Contender("torch_checkpointing", "CheckpointManager, synchronous, DefaultResharder for every item"),
    Contender(
        "torchsnapshot", "Snapshot.take/restore, defaults, ShardedTensors in place of DTensors, all else replicated"
    ),
    Contender(
        "safetensors",
        "files of whole tensors, one per saving rank; a loading rank takes slices from all (safe_open)",
        io="mapped",
    ),
    Contender("holdfast", "holdfast.save/load, defaults, each save into a new run", SEALED, _VERIFIED, DIRECT),
    Contender(LATER, "holdfast.save/load, defaults, all saves into one run", SEALED, _VERIFIED, DIRECT),
)


class Raw(Way):
    """The raw limit, in one way."""

    def __init__(self, state: State, image: RawImage, way: RawWay, *, direct: bool) -> None:
        super().__init__(state)
        self.memory = image
        self._file = RawFile(image, way, direct=direct)

    def save(self, folder: Path) -> None:
        """Write this rank's file."""
        self._file.write(_rank_file(folder, dist.get_rank()))

    def load(self, folder: Path) -> None:
        """Read this rank's file."""
        self._file.read(_rank_file(folder, dist.get_rank()))


class TorchSave(Way):
    """`torch.save` and `torch.load` of one file per rank; of one file for all where all hold the same."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._rank = dist.get_rank() if state.is_sharded() else 0

    def save(self, folder: Path) -> None:
        """Write this rank's tensors and values, then fsync the file."""
        if self._rank != dist.get_rank():
            return
        with _rank_file(folder, self._rank).open("wb") as file:
            torch.save(self.state.tensors() | self.state.values(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        """Read the file and copy it into the state."""
        loaded = torch.load(_rank_file(folder, self._rank), map_location="cpu", weights_only=True)
        for parent, key, path, leaf in list(walk(self.state.tree)):
            if isinstance(leaf, torch.Tensor):
                local(leaf).copy_(loaded[path])
            else:
                parent[key] = loaded[path]


class Dcp(Way):
    """`torch.distributed.checkpoint` with its defaults."""

    def save(self, folder: Path) -> None:
        """Save the state as it is."""
        dcp_save(self.state.tree, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load into the state."""
        dcp_load(self.state.tree, checkpoint_id=folder)


class Holdfast(Way):
    """`holdfast.save` and `holdfast.load` with their defaults."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._steps = itertools.count()

    def save(self, folder: Path) -> None:
        """Save the state as the next step of the run in `folder`: a new one in an empty folder."""
        holdfast.save(str(folder), self.state.tree, next(self._steps))

    def load(self, folder: Path) -> None:
        """Load the run's head into the state."""
        holdfast.load(str(folder), into=self.state.tree)


_BUILDERS: dict[str, Callable[[State], Way]] = {
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


def entrants(names: tuple[str, ...]) -> tuple[str, ...]:
    """The entrants that take turns: the raw limit of `names` once in each way, then the others.

    SetupError for a name that is not known.
    """
    known = chosen(names, NAMES, kind="contender")
    return (*(raw_name(way) for way in RAW_WAYS if RAW in known), *(name for name in known if name != RAW))


def build(names: tuple[str, ...], state: State, *, direct: bool) -> dict[str, Way]:
    """The entrants for `names`, all on the same state."""
    built: dict[str, Way] = {}
    if RAW in names:
        image = RawImage(state.share(dist.get_rank(), dist.get_world_size()))
        built |= {raw_name(name): Raw(state, image, way, direct=direct) for name, way in RAW_WAYS.items()}
    return {name: built[name] if name in built else _BUILDERS[name](state) for name in entrants(names)}


def described(names: tuple[str, ...], *own: Contender, direct: bool) -> tuple[Contender, ...]:
    """For each contender, the work that its figures include; a text in `own` replaces the usual one."""
    found = {each.name: each for each in (*_CONTENDERS, *own)}
    if not direct:
        found[RAW] = msgspec.structs.replace(found[RAW], io="buffered: the filesystem refused O_DIRECT")
    return tuple(found[name] for name in names)


def not_installed(name: str, package: str | None) -> dict[str, str]:
    """By its name, why a contender cannot take part that needs `package`; nothing where it can."""
    return {name: NOT_INSTALLED} if package is not None and find_spec(package) is None else {}


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
