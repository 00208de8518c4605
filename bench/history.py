"""``python -m bench history``: the cost of commands, loads and saves in runs of 10, 1,000 and 10,000 checkpoints."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch

import holdfast
from bench.benchmark import Bar, Benchmark, Options, judged
from bench.environment import in_words
from bench.markdown import table
from bench.runner import command, in_turns, scratch, timed
from bench.schema import Part, Result, Scenario, measured
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
OURS = "holdfast"


def measure_history(length: int, options: Options) -> Part:
    """Grow a run and use it: a load of the head and the save after it, finding the oldest step, two commands (of ``ls``
    processor seconds too: wall-clock seconds of a process depend on what else runs)."""
    rounds, steps = options.rounds or 5, itertools.count(length + 1)
    state: dict[str, object] = {"w": torch.zeros(1024)}
    with scratch(options.folder) as folder:
        root = folder / "run"
        grow(root, state, length)
        os.sync()  # else the first fsync of a save has to wait for all that was written
        holdfast.load(root, state)

        def use() -> dict[str, float]:
            listed = command("ls", root)
            return {
                **timed(lambda: holdfast.load(root, state), "load_s"),
                **timed(lambda: holdfast.save(root, state, next(steps)), "save_s"),
                **timed(lambda: find_oldest(root), "find_s"),
                "ls_s": listed["seconds"],
                "ls_cpu_s": listed["cpu_s"],
                "doctor_s": command("doctor", root)["seconds"],
            }

        samples = in_turns(range(1, rounds + 1), {OURS: use})
    scenario = Scenario(name=str(length), rounds=rounds, facts={"num_checkpoints": length})
    return measured(scenario, samples, options.folder)


def grow(root: Path, state: dict[str, object], length: int) -> None:
    """A run of `length` checkpoints: one that is saved, and copies of it that differ in their place and step. They are
    written without ``fsync``, which would take minutes."""
    holdfast.save(root, state, 1)
    run = Run.open(open_store(Location(str(root))))
    first = run.locate(run.commit(Place(1, 1)))
    assert first.commit is not None
    original = read_manifest(run, first.commit.checkpoint).manifest
    (name,) = (file.name for file in first.seal.files)
    data = (root / first.key(name)).read_bytes()
    layout = Files(original).layout(0)
    table = container.parse_table(data[TABLE_OFFSET : TABLE_OFFSET + 2 * table_nbytes(layout.data_nbytes)])
    for number in range(2, length + 1):
        checkpoint_id, place = secrets.token_hex(8), Place(1, number)
        folder, about = records.folder_name(number, checkpoint_id), {"checkpoint_id": checkpoint_id, "step": number}
        body = msgspec.structs.replace(original.body, place=(place.epoch, place.seq), **about)
        encoded = original.with_body(body).encode()
        sealed = FileSeal(manifest.NAME, len(encoded), records.digest(encoded))
        seal = records.encode(msgspec.structs.replace(first.seal, place=place, manifest=sealed, **about))
        digest = SealDigest(len(seal), records.digest(seal))
        commit = msgspec.structs.replace(first.commit, place=place, checkpoint=folder, seal=digest, **about)
        (root / records.CHECKPOINTS / folder).mkdir()
        header = container.header(manifest.decode(encoded, path=folder), layout, table)
        files = {name: header + data[layout.data_start :], manifest.NAME: encoded, records.SEAL_NAME: seal}
        for file, content in files.items():
            (root / records.checkpoint_key(folder, file)).write_bytes(content)
        (root / records.commit_key(place)).write_bytes(records.encode(commit))


def find_oldest(root: Path) -> None:
    """Find the oldest step by its number."""
    assert Run.open(open_store(Location(str(root)))).find(step=1).place == Place(1, 1)


def bars(result: Result) -> Iterator[Bar]:
    """The bar of the longest history."""
    if longest := result.find(str(LENGTHS[-1])):
        cpu_s = median(longest.series(OURS, "ls_cpu_s"))
        yield judged(f"ls of {LENGTHS[-1]:,} checkpoints", cpu_s, LS_BAR_S, " s")


def render_history(result: Result) -> str:
    """The figures as Markdown."""

    def cell(key: str, digits: int, scale: float = 1.0) -> Callable[[str], str]:
        return lambda name: f"{scale * median(result.part(name).series(OURS, key)):.{digits}f}"

    ls_s, ls_cpu_s = cell("ls_s", 2), cell("ls_cpu_s", 2)
    lines = table(
        "checkpoints",
        {part.scenario.name: f"{part.scenario.facts['num_checkpoints']:,}" for part in result.parts},
        [
            ("load of the head, ms", cell("load_s", 0, 1000)),
            ("save, ms", cell("save_s", 0, 1000)),
            ("find a step, ms", cell("find_s", 0, 1000)),
            ("`ls`, s (of CPU)", lambda name: f"{ls_s(name)} ({ls_cpu_s(name)})"),
            ("`doctor`, s", cell("doctor_s", 2)),
        ],
    )
    last = result.parts[-1]
    how = f"A state of 4 KiB, one process, medians of {last.scenario.rounds}. `python -m bench history`; "
    return "\n\n".join([lines, f"{how}{in_words(last.environment)}."])


PARTS = {str(length): partial(measure_history, length) for length in LENGTHS}
HISTORY = Benchmark("history", PARTS, render_history, bars)
