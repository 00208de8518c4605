"""The contenders: what the figures of each one include, and the way in which it saves and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from bench import peers, ways
from bench.schema import RAW, Contender, chosen
from bench.ways import Way

#: Holdfast's own names in `SAVING`, and in `BACKGROUND` and `BESIDE`, where the live objects are saved.
LATER = "holdfast-later"
OURS, OURS_SYNC = "holdfast", "holdfast-sync"
THREAD, PROCESS = "dcp-async-thread", "dcp-async-process"

_SYNCED, _SEALED = "fsync of each file", "fsync of files and folders, sealed and committed"
_SNAPSHOTS = "ShardedTensors in place of DTensors, all else replicated"
_DCP = "torch.distributed.checkpoint.async_save, its stager kept and copying in the background"


class Entry(NamedTuple):
    """A contender, its way, and the package that it needs and not every environment has."""

    about: Contender
    way: type[Way]
    package: str = ""


def _entry(name: str, description: str, way: type[Way], *, package: str = "", **about: str) -> dict[str, Entry]:
    return {name: Entry(Contender(name, description, **about), way, package)}


_OURS = {"durable": _SEALED, "io": "direct where the filesystem takes it"}
_OURS_LOADED = _OURS | {"verified": "digest of every block read"}
_FILES = "one file per rank, or one for all ranks where all hold the same"
_SLICES = "files of whole tensors, one per saving rank; a loading rank takes slices from all (safe_open)"
_IN_BACKGROUND = "CheckpointManager with its saver for the background, DefaultResharder for every item"

#: Those that save and load while training waits, in the order of the tables.
SAVING: dict[str, Entry] = {
    **_entry(RAW, "pwritev/preadv loops, one file per rank", ways.Raw, durable="fdatasync", io="direct"),
    **_entry("torch.save", f"torch.save/torch.load, {_FILES}", ways.TorchSave, durable=_SYNCED),
    **_entry("dcp", "torch.distributed.checkpoint.save/load, defaults", ways.Dcp, durable=_SYNCED),
    **_entry(
        "torch_checkpointing",
        "CheckpointManager, synchronous, DefaultResharder for every item",
        peers.TorchCheckpointing,
        package="torch_checkpointing",
    ),
    **_entry(
        "torchsnapshot",
        f"Snapshot.take/restore, defaults, {_SNAPSHOTS}",
        peers.TorchSnapshot,
        package="torchsnapshot",
    ),
    **_entry("safetensors", _SLICES, peers.Safetensors, package="safetensors", io="mapped"),
    **_entry("holdfast", "holdfast.save/load, defaults, each save into a new run", ways.Holdfast, **_OURS_LOADED),
    **_entry(LATER, "holdfast.save/load, defaults, all saves into one run", ways.HoldfastLater, **_OURS_LOADED),
}
#: Those that save a live training state, with or without a wait for the device.
BACKGROUND: dict[str, Entry] = {
    **{name: SAVING[name] for name in (RAW, "torch.save", "dcp")},
    **_entry(THREAD, f"{_DCP}, written by a thread", peers.DcpThread, durable=_SYNCED),
    **_entry(PROCESS, f"{_DCP} into shared memory, written by a process", peers.DcpProcess, durable=_SYNCED),
    **_entry(
        "torchsnapshot-async",
        f"Snapshot.async_take, defaults, {_SNAPSHOTS}",
        peers.TorchSnapshotAsync,
        package="torchsnapshot",
    ),
    **_entry("torch_checkpointing-async", _IN_BACKGROUND, peers.TorchCheckpointingAsync, package="torch_checkpointing"),
    **_entry(OURS_SYNC, "holdfast.save, defaults, all saves into one run", ways.HoldfastLive, **_OURS),
    **_entry(OURS, "holdfast.Checkpointer, defaults, all saves into one run", ways.HoldfastBackground, **_OURS),
}
#: Those of them that are measured beside a loop of Python, and beside a training loop.
BESIDE_PYTHON = {name: BACKGROUND[name] for name in (OURS, THREAD, PROCESS)}
BESIDE_TRAINING = {RAW: SAVING[RAW]._replace(way=ways.RawBeside)} | BESIDE_PYTHON


def select(
    names: Sequence[str] | None, known: Mapping[str, Entry], usual: Sequence[str] | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Those of `names`, or the `usual` ones, beside the raw limit, that can take part here, in the order of the tables,
    and why the others cannot. SetupError for a name that is not known."""
    found = chosen(usual if names is None else names, known, kind="contender")
    found = tuple(name for name in known if name in found or name == RAW)
    absent = {name: reason for name in found if (reason := why_absent(known[name].package))}
    return tuple(name for name in found if name not in absent), absent


def why_absent(package: str) -> str:
    """Why a contender cannot take part that needs `package`; nothing where it can."""
    return "it is not installed; `make bench` installs it" if package and find_spec(package) is None else ""
