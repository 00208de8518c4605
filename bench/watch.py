"""``python -m bench.watch``: a separate process that watches the memory of a rank and of all processes it started.

From inside, looking would take the interpreter's time from the save that is watched.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from bench.processes import held, keepers, tree

_LOOK_S = 0.02
#: A look goes through all pages of a process. So much longer than a look takes, nothing is looked at: that the watch
#: takes a small part of a core only.
_PAUSE = 4


class Watch:
    """Watches this process and its children from construction to `stop`.

    With `node_dir`, the keepers below it count too, for this rank an even part of them, and not what is mapped of files
    in memory: those are the slots.
    """

    def __init__(self, *, node_dir: Path | None = None, world: int = 1) -> None:
        arguments = [str(os.getpid()), *([str(node_dir), str(world)] if node_dir else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.watch", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        # It says one word when it knows what was held before.
        _output(self._process).readline()

    def stop(self) -> int:
        """The most bytes that were held beyond what was held at first."""
        said, _ = self._process.communicate()
        return int(said)


def main(arguments: list[str]) -> None:
    """Watch until the end of the standard input, then write the peak."""
    root, *keeping = arguments
    peak = before = _held_nbytes(int(root), keeping)
    print("watching", flush=True)
    taken_s = 0.0
    while not select.select([sys.stdin], [], [], max(_LOOK_S, _PAUSE * taken_s))[0]:
        start_s = time.perf_counter()
        peak = max(peak, _held_nbytes(int(root), keeping))
        taken_s = time.perf_counter() - start_s
    peak = max(peak, _held_nbytes(int(root), keeping))
    with suppress(BrokenPipeError):  # the rank has died
        os.write(sys.stdout.fileno(), b"%d\n" % (peak - before))


def _held_nbytes(root: int, keeping: list[str]) -> int:
    own = held(tree(root, without=(os.getpid(),)))
    if not keeping:
        return own.nbytes
    node_dir, world = keeping
    kept = held(keepers(Path(node_dir)))
    return own.nbytes - own.shared_nbytes + (kept.nbytes - kept.shared_nbytes) // int(world)


def _output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
