"""``python -m bench view``: opening a checkpoint of many tensors to read one, and looking at the largest manifests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import typer
import xxhash

from bench import layouts
from bench.caches import how_dropped, settle
from bench.environment import environment
from bench.errors import BenchError, SetupError, WrongBytesError
from bench.many import OPENERS, SAVERS, expected, name_of, why_not
from bench.plan import CASES, IDENTITY
from bench.progress import progress
from bench.results import RESULTS, Bar, NotPossible, TimedSeries, ViewResult, write_result
from bench.statistics import rotated, spread
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import Files
from holdfast.format.records import FileSeal, Seal
from holdfast.plan.save import RankValues, encode_plan, plan_save

T = TypeVar("T")

#: What the bars hold for, and the bars.
BAR_NUM_TENSORS, BAR_OPEN_S = 100_000, 0.5
BAR_WORLD, BAR_SHOW_S = 8960, 1.0
#: The command alone: what Python and its imports take.
NOTHING = "--help"
#: Bounds memory.
_FILES_AT_ONCE = 512


def view(
    *,
    tensors: Annotated[int, typer.Option(help="Tensors of the checkpoint of which one is read.")] = BAR_NUM_TENSORS,
    world: Annotated[int, typer.Option(help="Simulated ranks of the manifests that are shown.")] = BAR_WORLD,
    rounds: Annotated[int, typer.Option(help="Rounds; in each, everything is done once.")] = 7,
    folder: Annotated[
        Path, typer.Option("--dir", exists=True, file_okay=False, help="A folder on the device to save to.")
    ] = Path(),
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "view",
    results: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
) -> None:
    """Measure opening a checkpoint to read one tensor of many, and `holdfast show` at scale, against their bars."""
    if tensors < 1 or rounds < 1:
        raise SetupError("Ask for at least one tensor and one round.")
    names = tuple(name for name in OPENERS if why_not(name) is None)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as scratch, progress(3 * rounds) as advance:
        opened = _timed_opens(Path(scratch), names, tensors, rounds, advance)
        shown = _timed_shows(Path(scratch), world, rounds, advance)
    result = ViewResult(
        name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(folder),
        rounds=rounds,
        caches=how_dropped(),
        num_tensors=tensors,
        world=world,
        opened=opened,
        not_possible=tuple(NotPossible(name, reason) for name in OPENERS if (reason := why_not(name)) is not None),
        shown=shown,
        bars=tuple(bars(tensors, world, opened, shown)),
    )
    typer.echo(f"wrote {write_result(result, results)}")
    missed = [f"{bar.what} {bar.seconds:.3g} s > {bar.most_s} s" for bar in result.bars if not bar.met]
    if missed:
        raise BenchError(f"bars missed: {'; '.join(missed)}")


def bars(tensors: int, world: int, opened: tuple[TimedSeries, ...], shown: tuple[TimedSeries, ...]) -> Iterator[Bar]:
    """The bars that hold for a run of this size, with its medians."""
    if tensors == BAR_NUM_TENSORS:
        (ours,) = (series for series in opened if series.name == "holdfast")
        yield Bar(what="open and read one", seconds=ours.seconds.median, most_s=BAR_OPEN_S)
    if world == BAR_WORLD:
        for series in shown:
            if series.name != NOTHING:
                yield Bar(what=f"show {series.name}", seconds=series.seconds.median, most_s=BAR_SHOW_S)


def _timed_opens(
    scratch: Path, names: tuple[str, ...], tensors: int, rounds: int, advance: Callable[[str], None]
) -> tuple[TimedSeries, ...]:
    for name in names:
        (scratch / name).mkdir()
        _in_a_process(_save, name, scratch / name, tensors)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in rotated(names, number):
            settle(scratch)
            taken[name].append(_in_a_process(_open, name, scratch / name, tensors // 2))
        advance(f"opened {tensors:,} tensors")
    return tuple(TimedSeries(name, spread(series), tuple(series)) for name, series in taken.items())


def _save(name: str, folder: Path, tensors: int) -> None:
    SAVERS[name](folder, tensors)


def _open(name: str, folder: Path, index: int) -> float:
    """Seconds to open what `name` saved and read one tensor, in this process, which has imported what it needs."""
    read = OPENERS[name]()
    start_s = time.perf_counter()
    found = read(folder, name_of(index))
    seconds = time.perf_counter() - start_s
    if not (found == expected(index)).all():
        raise WrongBytesError(f"{name} read another tensor than it saved.")
    return seconds


def _in_a_process(call: Callable[[str, Path, int], T], name: str, folder: Path, number: int) -> T:
    """`call` in a new process, in which nothing is warm."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(call, name, folder, number).result()


def _timed_shows(scratch: Path, world: int, rounds: int, advance: Callable[[str], None]) -> tuple[TimedSeries, ...]:
    """Whole commands, with warm caches: Python's own start from a cold disk would hide the rest."""
    commands = {NOTHING: [NOTHING]}
    for case, (simulate, smallest, _) in CASES.items():
        checkpoint = scratch / case
        write_simulated(checkpoint, simulate(max(world, smallest)))
        commands[case] = ["show", str(checkpoint)]
        advance(f"planned {case}")
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(-1, rounds):
        for name in rotated(tuple(commands), number):
            start_s = time.perf_counter()
            subprocess.run([sys.executable, "-m", "holdfast.cli", *commands[name]], check=True, capture_output=True)
            if number >= 0:
                taken[name].append(time.perf_counter() - start_s)
        advance("shown")
    return tuple(TimedSeries(name, spread(series), tuple(series)) for name, series in taken.items())


def write_simulated(folder: Path, sent: layouts.Sent) -> None:
    """The folder of a checkpoint that simulated ranks saved, without its data files."""
    manifest = encode_plan(
        plan_save(sent.messages, sent.bodies), identity=IDENTITY, values=[RankValues(0, 1000, ("a",))]
    )
    decoded = fmt.decode(manifest, path=str(folder))
    seal = Seal(
        checkpoint_id=decoded.body.checkpoint_id,
        place=decoded.place,
        step=decoded.body.step,
        manifest=FileSeal(fmt.NAME, len(manifest), xxhash.xxh3_128_hexdigest(manifest)),
        files=tuple(_file_seals(Files(decoded))),
    )
    folder.mkdir()
    (folder / fmt.NAME).write_bytes(manifest)
    (folder / records.SEAL_NAME).write_bytes(records.encode(seal))


def _file_seals(files: Files) -> Iterator[FileSeal]:
    for low in range(0, files.manifest.body.num_files, _FILES_AT_ONCE):
        numbers = np.arange(low, min(low + _FILES_AT_ONCE, files.manifest.body.num_files))
        columns = files.columns(numbers, positions=numbers[:0])
        for index, nbytes in zip(numbers.tolist(), (columns.data_starts + columns.data_nbytes).tolist(), strict=True):
            yield FileSeal(fmt.file_name(index), nbytes, "0" * 32)
