"""The order for ``bench engine``, and the folders where its parts run."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from bench.engine_contenders import GENERATIONS
from bench.errors import SetupError
from bench.processes import node_memory
from bench.rank import HOST
from bench.state import LlamaLike

#: States are somewhat larger than asked for.
_HEADROOM = 1.15
#: States in memory at once, at most: the live one, snapshots, and what peers have of it; and all else.
_COPIES, _OTHER_NBYTES = 6, 2 << 30


class Place(NamedTuple):
    """Where a part runs: on the device, in memory, and with a store at `port` that outlives the ranks."""

    folder: Path
    node_dir: Path
    port: int


class Plan(NamedTuple):
    """What the command was asked for."""

    world: int
    rounds: int
    layers: int
    contenders: tuple[str, ...]
    work_s: float
    calm_s: float
    steps: int
    every: int
    tokens: int
    folder: Path
    memory: Path

    def recipe(self, gib: float) -> LlamaLike:
        """How a state of so many GiB is made."""
        return LlamaLike(int(gib * 2**30), "rows", self.layers)

    @contextmanager
    def place(self, recipe: LlamaLike, *, world: int, saves: int) -> Iterator[Place]:
        """New folders, and a store for `world` ranks; all of it ends with the block. SetupError where there is no room
        for `saves` at once, or for the snapshots in memory."""
        nbytes = recipe.nbytes(world)
        _require(f"in {self.folder}", saves * nbytes, free=shutil.disk_usage(self.folder).free)
        _require(f"in {self.memory}", GENERATIONS * nbytes, free=shutil.disk_usage(self.memory).free)
        _require("of memory", _COPIES * nbytes + _OTHER_NBYTES, free=_available_nbytes())
        with (
            tempfile.TemporaryDirectory(prefix="bench-", dir=self.folder) as scratch,
            node_memory(self.memory) as node_dir,
        ):
            store = dist.TCPStore(HOST, 0, world, is_master=True, wait_for_workers=False)
            yield Place(Path(scratch), node_dir, store.port)


def _require(what: str, nbytes: int, *, free: int) -> None:
    needed = int(_HEADROOM * nbytes)
    if free < needed:
        raise SetupError(
            f"{needed / 1e9:.1f} GB {what} are needed, {free / 1e9:.1f} GB are free. "
            "Ask for a smaller state, or for another folder."
        )


def _available_nbytes() -> int:
    """Memory that the kernel could give to new processes."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None, "every kernel since 3.14 says so"
    return 1024 * int(found[1])
