"""The contenders: who saves and loads what, in the order of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TypeAlias

from bench import peers, ways
from bench.benchmark import chosen
from bench.schema import RAW
from bench.ways import Way

Registry: TypeAlias = Mapping[str, type[Way]]


def _registry(*kinds: type[Way]) -> Registry:
    return {kind.name: kind for kind in kinds}


_TORCH = (ways.Raw, ways.TorchSave, ways.Dcp)
_TORCH_ASYNC = (peers.DcpThread, peers.DcpProcess)
_PEERS = (peers.TorchCheckpointing, peers.TorchSnapshot, peers.Safetensors)
_PEERS_ASYNC = (peers.TorchSnapshotAsync, peers.TorchCheckpointingAsync)
#: Those that save and load while training waits.
SAVING = _registry(*_TORCH, *_PEERS, ways.Holdfast, ways.HoldfastLater)
#: Those that save a live training state, with or without a wait for the device.
BACKGROUND = _registry(*_TORCH, *_TORCH_ASYNC, *_PEERS_ASYNC, ways.HoldfastLive, ways.HoldfastBackground)
#: Those of them that are measured beside a loop of Python, and beside a training loop.
BESIDE_PYTHON = _registry(ways.HoldfastBackground, *_TORCH_ASYNC)
BESIDE_TRAINING = _registry(ways.Raw, *BESIDE_PYTHON.values())
#: Names in `SAVING`, and in `BACKGROUND` and the registries beside loops.
LATER = ways.HoldfastLater.name
OURS, OURS_SYNC, THREAD = ways.HoldfastBackground.name, ways.HoldfastLive.name, peers.DcpThread.name


def select(
    names: Sequence[str] | None, known: Registry, usual: Sequence[str] | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The raw limit and those of `names`, or the `usual` ones, that can take part, in the order of the tables; and why
    the others cannot. BenchError for an unknown name."""
    found = {RAW, *chosen(usual if names is None else names, known, kind="contender")}
    absent = {name: reason for name in known if name in found and (reason := why_absent(known[name].package))}
    return tuple(name for name in known if name in found and name not in absent), absent


def why_absent(package: str) -> str:
    """Why a contender cannot take part that needs `package`; nothing where it can."""
    return "it is not installed; `make bench` installs it" if package and find_spec(package) is None else ""
