"""``python -m bench view``: opening a checkpoint of many tensors to read one, and looking at the largest manifests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from bench.benchmark import Bar, Benchmark, Options
from bench.contenders import why_absent
from bench.costs import scratch, settle
from bench.layouts import Sent
from bench.markdown import about, table, text
from bench.plan import CASES, manifest_of
from bench.runner import command, in_ranks, in_turns, timed
from bench.schema import OURS, BenchError, Part, Result, StateSize
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import Files
from holdfast.format.records import FileSeal, Seal

NUM_TENSORS, BAR_OPEN_S = 100_000, 0.5
WORLD, BAR_SHOW_S = 8960, 1.0
ROUNDS = 7
#: The command alone: what Python and its imports take.
NOTHING = "--help"
OPENED, SHOWN = "opened", "shown"
_LABELS = {NOTHING: "`holdfast --help`, for comparison"}
_SHAPE, _MODEL = (4, 4), "model.safetensors"
#: Bounds memory.
_FILES_AT_ONCE = 512


def measure_opens(options: Options) -> Part:
    """Opening what each library saved to read one tensor of many, in a new process and from a cold cache."""
    num_tensors, takes = options.number(NUM_TENSORS, least=100), {}
    with scratch(options.folder) as root:
        for name, library in LIBRARIES.items():
            if not why_absent(library.package):
                (root / name).mkdir()
                library.save(root / name, dict(map(named, range(num_tensors))))
                takes[name] = partial(open_cold, name, root / name, num_tensors // 2)
        return in_turns(
            options.scenario(OPENED, rounds=ROUNDS, state=StateSize(num_tensors=num_tensors)), takes, options
        )


def open_cold(name: str, folder: Path, index: int) -> dict[str, float]:
    settle(folder)
    return in_ranks(1, open_one, name, folder, index)


def open_one(name: str, folder: Path, index: int) -> dict[str, float]:
    """Seconds to open what `name` saved and read one tensor, without those of imports."""
    library, found, (path, expected) = LIBRARIES[name], list[torch.Tensor](), named(index)
    import_module(library.package)
    seconds = timed(lambda: found.append(library.read(folder, path)))
    if not torch.equal(found[0], expected):
        raise BenchError(f"{name} read another tensor than it saved.")
    return seconds


def measure_shows(options: Options) -> Part:
    """Whole commands, with warm caches: Python's own start from a cold disk would hide the rest."""
    world, takes = options.number(WORLD), {NOTHING: partial(command, NOTHING)}
    with scratch(options.folder) as root:
        for name, case in CASES.items():
            write_simulated(root / name, case.simulate(max(world, case.smallest)))
            takes[name] = partial(command, "show", root / name)
        return in_turns(options.scenario(SHOWN, world=world, rounds=ROUNDS), takes, options)


def named(index: int) -> tuple[str, torch.Tensor]:
    return f"layers.{index:06d}.weight", torch.full(_SHAPE, float(index))


class Library(NamedTuple):
    """A library with its calls that save tensors into a folder, and read one of them by its name."""

    package: str
    save: Callable[[Path, dict[str, torch.Tensor]], object]
    read: Callable[[Path, str], torch.Tensor]


def _save_dcp(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that this is one process
        dcp_save(tensors, checkpoint_id=folder, no_dist=True)


def _read_dcp(folder: Path, name: str) -> torch.Tensor:
    state = {name: torch.empty(_SHAPE)}
    dcp_load(state, checkpoint_id=folder, no_dist=True)
    return state[name]


LIBRARIES = {
    "holdfast": Library(
        "holdfast",
        lambda folder, tensors: holdfast.save(folder / "run", tensors, 1),
        lambda folder, name: torch.from_numpy(holdfast.open(folder / "run")[name].numpy()),
    ),
    "dcp": Library(
        "torch.distributed.checkpoint",
        _save_dcp,
        _read_dcp,
    ),
    "safetensors": Library(
        "safetensors.torch",
        lambda folder, tensors: import_module("safetensors.torch").save_file(tensors, folder / _MODEL),
        lambda folder, name: import_module("safetensors").safe_open(folder / _MODEL, "pt").get_tensor(name),
    ),
}


def write_simulated(folder: Path, sent: Sent) -> None:
    """The folder of a checkpoint that simulated ranks saved, without its data files."""
    manifest = manifest_of(sent)
    decoded = fmt.decode(manifest, path=str(folder))
    seal = Seal(
        checkpoint_id=decoded.body.checkpoint_id,
        place=decoded.place,
        step=decoded.body.step,
        manifest=FileSeal(fmt.NAME, len(manifest), records.digest(manifest)),
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


def bars(part: Part) -> Iterator[Bar]:
    if part.scenario.name == OPENED:
        yield Bar("open and read one", part.median(OURS), BAR_OPEN_S, " s")
    else:
        for contender in part.able:
            if contender.name != NOTHING:
                yield Bar(f"show {contender.name}", part.median(contender.name), BAR_SHOW_S, " s")


def tables(result: Result) -> Iterator[str]:
    opened, shown = result.part(OPENED), result.part(SHOWN)
    heads = {
        f"open a checkpoint of {opened.scenario.state.num_tensors:,} tensors, read one": opened,
        f"`holdfast show` of a manifest of {shown.scenario.world:,} ranks": shown,
    }
    for head, part in heads.items():
        rows = {_LABELS.get(each.name, each.name): part.series(each.name) for each in part.able}
        yield table(head, rows, ("s", text))
    yield about(opened)


VIEW = Benchmark("view", {OPENED: measure_opens, SHOWN: measure_shows}, tables, bars)
