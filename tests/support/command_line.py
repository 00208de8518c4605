"""The `holdfast` command for tests: in this process, in a process of its own, at a terminal; and runs to look at."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from holdfast.cli import run
from holdfast.format.dtypes import DTYPES
from holdfast.format.records import Place
from holdfast.format.values import Node, Open
from holdfast.plan.layout import Mesh, Placed, Placement, Replicate, Shard, TensorLayout
from holdfast.plan.save import CheckpointIdentity
from holdfast.testing.memory_store import MemoryStore
from tests.support.published import EPOCHS, RUN_ID, begin, plan, publish, put

#: The character that Ctrl-C sends.
INTERRUPT = "\x03"
ENVIRONMENT = {"COLUMNS": "100", "PATH": "/usr/bin:/bin"}
if "PYTHONPATH" in os.environ:  # the tests may be those of another copy of the source than the installed one
    ENVIRONMENT["PYTHONPATH"] = os.environ["PYTHONPATH"]
_STYLE = re.compile(r"\x1b\[[0-9;]*[mAK]")
NODES: dict[str, Node] = {"": Open("dict")}


class Done(NamedTuple):
    """The exit status and the output of a command."""

    status: int | str | None
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def holdfast_command(*arguments: str | Path) -> Done:
    """Run the command in this process; no stream is a terminal, so the width that COLUMNS says counts for nothing."""
    out, err, status = io.StringIO(), io.StringIO(), None
    surroundings = patch.dict(os.environ, COLUMNS="40"), patch("sys.stdin", io.StringIO())
    with surroundings[0], surroundings[1], redirect_stdout(out), redirect_stderr(err):
        try:
            run([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
    return Done(status, out.getvalue(), err.getvalue())


def start(*arguments: str, **environment: str) -> Done:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "holdfast.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def at_terminal(*arguments: str | Path, answer: str = "", when: str = "[y/N]", columns: int = 100) -> Done:
    """Run the command at a terminal, where somebody types `answer` as soon as it shows `when`: the question, unless
    that is something else. All that it prints is in `out`."""
    keyboard, terminal = pty.openpty()
    # A session of its own, with this terminal: only so do keys send signals. A shell that started the tests in the
    # background may have had them ignore Ctrl-C, which children inherit.
    command = ["env", "--default-signal=INT", "setsid", "--ctty", sys.executable, "-m", "holdfast.cli", *arguments]
    environment = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    printed, answered = b"", not answer
    try:
        with suppress(OSError):  # a terminal that nobody holds any more says EIO
            while True:
                # A program that sets up its terminal may drop what comes meanwhile: people press Ctrl-C again.
                silent = not select.select([keyboard], [], [], 2)[0]
                if not silent:
                    printed += os.read(keyboard, 4096)
                if when.encode() in printed and (not answered or (silent and answer == INTERRUPT)):
                    os.write(keyboard, answer.encode())
                    answered = True
        return Done(process.wait(), printed.decode(), "")
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)


def screen_lines(done: Done) -> list[str]:
    """The lines that a command showed on a terminal, without styles and without the codes that erase progress bars."""
    return [_STYLE.sub("", line).rstrip() for line in done.out.splitlines()]


def damage(path: Path, at: float = 0.5) -> None:
    """Flip one bit of a file, at a part of its length."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def copy_of(run: Path, tmp_path: Path) -> Path:
    """A copy of a run, as people make one."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(run), str(copy)], check=True)
    return copy


def folder_of(run: Path, step: int) -> Path:
    """The folder of the only checkpoint of a step."""
    (folder,) = (run / "checkpoints").glob(f"step-{step:010d}-*")
    return folder


class Stored(NamedTuple):
    """A tensor to store: its dtype, what it holds, and how it is divided over ranks (default: not at all)."""

    dtype: str
    elements: npt.NDArray[Any]
    placements: tuple[Placement, ...] = (Replicate(),)
    mesh: Mesh = Mesh((1,), (0,))


def rows(ranks: int) -> tuple[tuple[Placement, ...], Mesh]:
    """Divided along the first axis."""
    return (Shard(0),), Mesh((ranks,), tuple(range(ranks)))


def publish_step(
    storage: MemoryStore,
    place: Place,
    tensors: Mapping[str, Stored],
    nodes: Mapping[str, Node] | None = None,
    diverged: Sequence[str] = (),
) -> None:
    """Store a checkpoint; its step is ``100 * epoch + number``."""
    ranks = max((len(tensor.mesh.ranks) for tensor in tensors.values()), default=1)
    layouts: list[list[TensorLayout]] = [[] for _ in range(ranks)]
    full = {}
    for name, (dtype, elements, placements, mesh) in tensors.items():
        itemsize = DTYPES[dtype].itemsize
        shape = elements.shape
        full[name] = np.ascontiguousarray(elements).view(np.uint8).reshape(*shape, itemsize)
        layout = TensorLayout(name, dtype, shape, Placed(mesh, placements))
        for rank in mesh.ranks:
            layouts[rank].append(layout)
    step = 100 * place.epoch + place.seq
    identity = CheckpointIdentity(f"{step:016x}", RUN_ID, place, step, 1.7e9, {})
    table = dict(NODES if nodes is None else nodes)
    publish(storage, plan(layouts, table, identity, diverged), full, table)


def stored_run(path: Path, tensors: Mapping[str, Stored], nodes: Mapping[str, Node] | None = None) -> Path:
    """A run with one checkpoint, step 101."""
    storage = begin(RUN_ID, *EPOCHS[:1])
    publish_step(storage, Place(1, 1), tensors, nodes)
    return put(storage.objects, path)
