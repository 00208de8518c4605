"""``python -m bench history``: the cost of commands, loads and saves in runs of 10, 1,000 and 10,000 checkpoints."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch

import holdfast
from bench.environment import in_words
from bench.markdown import table
from bench.runner import command, scratch, seconds_of
from bench.schema import Bar, Benchmark, Options, Part, Result, Sample, Scenario, measured
from bench.statistics import median
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
    rounds, samples = options.rounds or 5, []
    state: dict[str, object] = {"w": torch.zeros(1024)}
    with scratch(options.folder) as folder:
        root = folder / "run"
        grow(root, state, length)
        os.sync()  # else the first fsync of a save has to wait for all that was written
        holdfast.load(root, state)
        for number in range(1, rounds + 1):
            ls_s, ls_cpu_s = command("ls", root)
            values = {
                "load_s": seconds_of(lambda: holdfast.load(root, state)),
                "save_s": seconds_of(lambda: holdfast.save(root, state, length + number)),  # noqa: B023 - called at once
                "find_s": seconds_of(lambda: find_oldest(root)),
                "ls_s": ls_s,
                "ls_cpu_s": ls_cpu_s,
                "doctor_s": command("doctor", root)[0],
            }
            samples.append(Sample(OURS, number, {key: (value,) for key, value in values.items()}))
    scenario = Scenario(name=str(length), rounds=rounds, facts={"num_checkpoints": length})
    return measured(scenario, samples, options.folder)


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


def find_oldest(root: Path) -> None:
    """Find the oldest step by its number."""
    assert Run.open(open_store(Location(str(root)))).find(step=1).place == Place(1, 1)


def bars(result: Result) -> Iterator[Bar]:
    """The bar of the longest history."""
    if longest := result.find(str(LENGTHS[-1])):
        cpu_s = median(longest.series(OURS, "ls_cpu_s"))
        yield Bar("ls", cpu_s, LS_BAR_S, f"ls of {LENGTHS[-1]:,} checkpoints {cpu_s:.2f} s (at most {LS_BAR_S})")


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
    how = (
        f"A state of 4 KiB, one process, medians of {result.parts[-1].scenario.rounds}. `python -m bench history`; "
        f"{in_words(result.parts[-1].environment)}."
    )
    return "\n".join((*lines, "", how))


HISTORY = Benchmark(
    "history", {str(length): partial(measure_history, length) for length in LENGTHS}, render_history, bars
)
