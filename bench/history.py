"""``python -m bench history``: the cost of commands, loads and saves in runs of 10, 1,000 and 10,000 checkpoints."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
import typer

import holdfast
from bench.environment import Environment, environment, in_words
from bench.errors import BenchError
from bench.marked import TABLES, rewrite
from bench.results import RESULTS
from holdfast.format import container, manifest, records
from holdfast.format.container import TABLE_OFFSET, Files
from holdfast.format.records import FileSeal, Place, SealDigest
from holdfast.io.digest import table_nbytes
from holdfast.run.complete import read_manifest
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store

LENGTHS = (10, 1_000, 10_000)
#: ``holdfast ls`` of the longest history.
LS_BAR_S = 1.0


class Figure(msgspec.Struct, frozen=True):
    """One length, medians: a load of the head and the save after it, finding the oldest step, two commands (processor
    seconds too: wall-clock seconds of a process depend on what else runs)."""

    num_checkpoints: int
    load_s: float
    save_s: float
    find_s: float
    ls_s: float
    ls_cpu_s: float
    doctor_s: float


class HistoryResult(msgspec.Struct, frozen=True):
    """All figures of one run."""

    environment: Environment
    rounds: int
    figures: list[Figure]


def history(
    *,
    rounds: Annotated[int, typer.Option(help="Repetitions of each measurement; medians are reported.")] = 5,
    folder: Annotated[
        Path, typer.Option("--dir", exists=True, file_okay=False, help="A folder on the device to save to.")
    ] = Path(),
    results: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
    document: Annotated[Path, typer.Option(help="The file whose table is rewritten.")] = TABLES,
) -> None:
    """Measure what depends on the length of a run's history, and check ``ls`` against its bar."""
    figures = []
    for length in LENGTHS:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            figures.append(measure(Path(root) / "run", length, rounds))
        print(describe(figures[-1]), file=sys.stderr)
    result = HistoryResult(environment(results), rounds, figures)
    results.mkdir(parents=True, exist_ok=True)
    (results / "history.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    rewrite(document, "history", render(result))
    if figures[-1].ls_cpu_s > LS_BAR_S:
        raise BenchError(f"bar missed: ls of {LENGTHS[-1]:,} checkpoints {figures[-1].ls_cpu_s:.2f} s > {LS_BAR_S} s")


def measure(root: Path, length: int, rounds: int) -> Figure:
    """Grow a run and use it."""
    state: dict[str, object] = {"w": torch.zeros(1024)}
    grow(root, state, length)
    os.sync()  # else the first fsync of a save has to wait for all that was written
    holdfast.load(root, state)
    steps = iter(range(length + 1, length + 1 + rounds))
    load_s = median(rounds, lambda: holdfast.load(root, state))
    save_s = median(rounds, lambda: holdfast.save(root, state, next(steps)))
    find_s = median(rounds, lambda: holdfast_find(root))
    ls = [command("ls", root) for _ in range(rounds)]
    doctor = [command("doctor", root) for _ in range(rounds)]
    return Figure(
        num_checkpoints=length,
        load_s=load_s,
        save_s=save_s,
        find_s=find_s,
        ls_s=float(np.median([wall for wall, _ in ls])),
        ls_cpu_s=float(np.median([cpu for _, cpu in ls])),
        doctor_s=float(np.median([wall for wall, _ in doctor])),
    )


def grow(root: Path, state: dict[str, object], length: int) -> None:
    """A run of `length` checkpoints: one that is saved, and copies of it that differ in their place and step. They are
    written without ``fsync``, which would take minutes."""
    holdfast.save(root, state, 1)
    run = Run.open(open_store(Location(str(root))))
    first = run.locate(run.commit(Place(1, 1)))
    assert first.commit is not None
    original = read_manifest(run, first.commit.checkpoint)
    (name,) = (file.name for file in first.seal.files)
    data = (root / first.key(name)).read_bytes()
    layout = Files(original.manifest).layout(0)
    table = container.parse_table(data[TABLE_OFFSET : TABLE_OFFSET + 2 * table_nbytes(layout.data_nbytes)])
    for number in range(2, length + 1):
        place, checkpoint_id = Place(1, number), secrets.token_hex(8)
        folder = records.folder_name(number, checkpoint_id)
        body = msgspec.structs.replace(
            original.manifest.body, checkpoint_id=checkpoint_id, place=(place.epoch, place.seq), step=number
        )
        encoded = original.manifest.with_body(body).encode()
        about = FileSeal(manifest.NAME, len(encoded), records.digest(encoded))
        seal = records.encode(
            msgspec.structs.replace(first.seal, checkpoint_id=checkpoint_id, place=place, step=number, manifest=about)
        )
        commit = msgspec.structs.replace(
            first.commit,
            place=place,
            step=number,
            checkpoint=folder,
            checkpoint_id=checkpoint_id,
            seal=SealDigest(len(seal), records.digest(seal)),
        )
        (root / records.CHECKPOINTS / folder).mkdir()
        header = container.header(manifest.decode(encoded, path=folder), layout, table)
        files = {name: header + data[layout.data_start :], manifest.NAME: encoded, records.SEAL_NAME: seal}
        for file, content in files.items():
            (root / records.checkpoint_key(folder, file)).write_bytes(content)
        (root / records.commit_key(place)).write_bytes(records.encode(commit))


def holdfast_find(root: Path) -> None:
    """Find the oldest step by its number."""
    assert Run.open(open_store(Location(str(root)))).find(step=1).place == Place(1, 1)


def median(rounds: int, work: Callable[[], object]) -> float:
    """Seconds of `work`, the median of so many rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def command(name: str, root: Path) -> tuple[float, float]:
    """Seconds and processor seconds of a command, its start included."""
    executable = shutil.which("holdfast") or str(Path(sys.executable).parent / "holdfast")
    before, start = os.times(), time.perf_counter()
    subprocess.run([executable, name, str(root)], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu


def render(result: HistoryResult) -> str:
    """The figures as Markdown."""
    rows = [
        f"| {row.num_checkpoints:,} | {1000 * row.load_s:.0f} | {1000 * row.save_s:.0f} | {1000 * row.find_s:.0f} "
        f"| {row.ls_s:.2f} ({row.ls_cpu_s:.2f}) | {row.doctor_s:.2f} |"
        for row in result.figures
    ]
    how = (
        f"A state of 4 KiB, one process, medians of {result.rounds}. `python -m bench history`; "
        f"{in_words(result.environment)}."
    )
    head = "| checkpoints | load of the head, ms | save, ms | find a step, ms | `ls`, s (of CPU) | `doctor`, s |"
    return "\n".join((head, "|---|---|---|---|---|---|", *rows, "", how))


def describe(figure: Figure) -> str:
    """One line per length."""
    return (
        f"{figure.num_checkpoints:>6} checkpoints: load {1000 * figure.load_s:.0f} ms, save {1000 * figure.save_s:.0f} "
        f"ms, a step found in {1000 * figure.find_s:.0f} ms, ls {figure.ls_s:.2f} s ({figure.ls_cpu_s:.2f} of CPU), "
        f"doctor {figure.doctor_s:.2f} s"
    )
