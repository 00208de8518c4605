"""``python -m bench view``: opening a checkpoint of many tensors to read one, and looking at the largest manifests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import typer
import xxhash

from bench import layouts
from bench.caches import settle
from bench.contenders import not_installed
from bench.errors import SetupError, WrongBytesError
from bench.many import OPENERS, SAVERS, expected, name_of
from bench.markdown import in_time, reasons, table, time_bars, whereabouts
from bench.options import Folder, Name, Results, Rounds
from bench.plan import CASES, IDENTITY
from bench.progress import progress
from bench.runner import scratch
from bench.schema import (
    RESULTS,
    Bar,
    Contender,
    Part,
    Result,
    Sample,
    Scenario,
    StateSize,
    measured,
    require_bars,
    write_result,
)
from bench.statistics import median, rotated, text
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
OPENED, SHOWN = "opened", "shown"
_LABELS = {"holdfast": "holdfast (verified)", NOTHING: "`holdfast --help`, for comparison"}
#: Bounds memory.
_FILES_AT_ONCE = 512


def view(
    *,
    tensors: Annotated[int, typer.Option(help="Tensors of the checkpoint of which one is read.")] = BAR_NUM_TENSORS,
    world: Annotated[int, typer.Option(help="Simulated ranks of the manifests that are shown.")] = BAR_WORLD,
    rounds: Rounds = 7,
    folder: Folder = Path(),
    name: Name = "view",
    results: Results = RESULTS,
) -> None:
    """Measure opening a checkpoint to read one tensor of many, and `holdfast show` at scale, against their bars."""
    if tensors < 1 or rounds < 1:
        raise SetupError("Ask for at least one tensor and one round.")
    absent = not_installed("safetensors", "safetensors")
    names = tuple(name for name in OPENERS if name not in absent)
    with scratch(folder) as root, progress(3 * rounds) as advance:
        opened = _timed_opens(root, names, tensors, rounds, advance)
        shown = _timed_shows(root, world, rounds, advance)
    sizes = {OPENED: (1, StateSize(num_tensors=tensors), opened), SHOWN: (world, StateSize(), shown)}
    entrants = {OPENED: tuple(OPENERS), SHOWN: (NOTHING, *CASES)}
    parts = tuple(
        measured(
            Scenario(name=part, world=ranks, rounds=rounds, state=size),
            samples,
            folder,
            contenders=tuple(Contender(each) for each in entrants[part]),
            not_possible=absent if part == OPENED else {},
        )
        for part, (ranks, size, samples) in sizes.items()
    )
    result = Result(name, parts)
    typer.echo(f"wrote {write_result(result, results)}")
    require_bars(bars(result))


def bars(result: Result) -> Iterator[Bar]:
    """The bars that hold for a run of this size, with its medians."""
    opened, shown = result.part(OPENED), result.part(SHOWN)
    if opened.scenario.state.num_tensors == BAR_NUM_TENSORS:
        yield in_time("open and read one", median(opened.series("holdfast")), BAR_OPEN_S)
    if shown.scenario.world == BAR_WORLD:
        for contender in shown.contenders:
            if contender.name != NOTHING:
                yield in_time(f"show {contender.name}", median(shown.series(contender.name)), BAR_SHOW_S)


def render_view(result: Result) -> str:
    """The figures of `result` as Markdown."""
    opened, shown = result.part(OPENED), result.part(SHOWN)
    how = (
        f"Medians of {opened.scenario.rounds} interleaved rounds (lowest to highest). Opening: in a new process that "
        f"has imported the library, caches are cold ({opened.caches}), and the tensor is compared with what was saved; "
        f"dcp loads a state dict of that one tensor, safetensors is one file.{reasons(opened)} `show`: whole commands, "
        "warm caches."
    )
    heads = {
        f"open a checkpoint of {opened.scenario.state.num_tensors:,} tensors, read one": opened,
        f"`holdfast show` of a manifest of {shown.scenario.world:,} ranks": shown,
    }
    lines: list[str] = []
    for head, part in heads.items():
        rows = {each.name: _LABELS.get(each.name, each.name) for each in part.able}
        lines += [*table(head, rows, [("s", _seconds_of(part))]), ""]
    return "\n".join((*lines, *time_bars(bars(result)), how, "", whereabouts(result.name, opened)))


def _seconds_of(part: Part) -> Callable[[str], str]:
    return lambda name: text(part.series(name))


def _timed_opens(
    root: Path, names: tuple[str, ...], tensors: int, rounds: int, advance: Callable[[str], None]
) -> tuple[Sample, ...]:
    for name in names:
        (root / name).mkdir()
        _in_a_process(_save, name, root / name, tensors)
    samples: list[Sample] = []
    for number in range(rounds):
        for turn, name in enumerate(rotated(names, number)):
            settle(root)
            seconds = _in_a_process(_open, name, root / name, tensors // 2)
            samples.append(Sample(name, number + 1, {"seconds": (seconds,)}, turn=turn))
        advance(f"opened {tensors:,} tensors")
    return tuple(samples)


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


def _timed_shows(root: Path, world: int, rounds: int, advance: Callable[[str], None]) -> tuple[Sample, ...]:
    """Whole commands, with warm caches: Python's own start from a cold disk would hide the rest."""
    commands = {NOTHING: [NOTHING]}
    for case, (simulate, smallest, _) in CASES.items():
        checkpoint = root / case
        write_simulated(checkpoint, simulate(max(world, smallest)))
        commands[case] = ["show", str(checkpoint)]
        advance(f"planned {case}")
    samples: list[Sample] = []
    for number in range(-1, rounds):
        for turn, name in enumerate(rotated(tuple(commands), number)):
            start_s = time.perf_counter()
            subprocess.run([sys.executable, "-m", "holdfast.cli", *commands[name]], check=True, capture_output=True)
            seconds = time.perf_counter() - start_s
            samples.append(Sample(name, number + 1, {"seconds": (seconds,)}, turn=turn))
        advance("shown")
    return tuple(samples)


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
