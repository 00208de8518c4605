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
_VERIFIED = "digest of every block read"
_DIRECT = "direct where the filesystem takes it"
_SNAPSHOTS = "ShardedTensors in place of DTensors, all else replicated"
_DCP = "torch.distributed.checkpoint.async_save, its stager kept and copying in the background"


class Entry(NamedTuple):
    """A contender, its way, and the package that it needs and not every environment has."""

    about: Contender
    way: type[Way]
    package: str = ""


def _by_name(*entries: Entry) -> dict[str, Entry]:
    return {entry.about.name: entry for entry in entries}


#: Those that save and load while training waits, in the order of the tables.
SAVING = _by_name(
    Entry(Contender(RAW, "pwritev/preadv loops, one file per rank", "fdatasync", "no", "direct"), ways.Raw),
    Entry(
        Contender(
            "torch.save",
            "torch.save/torch.load, one file per rank, or one for all ranks where all hold the same",
            _SYNCED,
        ),
        ways.TorchSave,
    ),
    Entry(Contender("dcp", "torch.distributed.checkpoint.save/load, defaults", _SYNCED), ways.Dcp),
    Entry(
        Contender("torch_checkpointing", "CheckpointManager, synchronous, DefaultResharder for every item"),
        peers.TorchCheckpointing,
        "torch_checkpointing",
    ),
    Entry(
        Contender("torchsnapshot", f"Snapshot.take/restore, defaults, {_SNAPSHOTS}"),
        peers.TorchSnapshot,
        "torchsnapshot",
    ),
    Entry(
        Contender(
            "safetensors",
            "files of whole tensors, one per saving rank; a loading rank takes slices from all (safe_open)",
            io="mapped",
        ),
        peers.Safetensors,
        "safetensors",
    ),
    Entry(
        Contender("holdfast", "holdfast.save/load, defaults, each save into a new run", _SEALED, _VERIFIED, _DIRECT),
        ways.Holdfast,
    ),
    Entry(
        Contender(LATER, "holdfast.save/load, defaults, all saves into one run", _SEALED, _VERIFIED, _DIRECT),
        ways.HoldfastLater,
    ),
)
#: Those that save a live training state, with or without a wait for the device.
BACKGROUND = _by_name(
    SAVING[RAW],
    SAVING["torch.save"],
    SAVING["dcp"],
    Entry(Contender(THREAD, f"{_DCP}, written by a thread", _SYNCED), peers.DcpThread),
    Entry(Contender(PROCESS, f"{_DCP} into shared memory, written by a process", _SYNCED), peers.DcpProcess),
    Entry(
        Contender("torchsnapshot-async", f"Snapshot.async_take, defaults, {_SNAPSHOTS}"),
        peers.TorchSnapshotAsync,
        "torchsnapshot",
    ),
    Entry(
        Contender(
            "torch_checkpointing-async",
            "CheckpointManager with its saver for the background, DefaultResharder for every item",
        ),
        peers.TorchCheckpointingAsync,
        "torch_checkpointing",
    ),
    Entry(
        Contender(OURS_SYNC, "holdfast.save, defaults, all saves into one run", _SEALED, io=_DIRECT), ways.HoldfastLive
    ),
    Entry(
        Contender(OURS, "holdfast.Checkpointer, defaults, all saves into one run", _SEALED, io=_DIRECT),
        ways.HoldfastBackground,
    ),
)
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
