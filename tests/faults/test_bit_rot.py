"""Media that lie: one bit, in one file, at any place. A load refuses damage by name, and never loads a wrong value.

A run of two ranks with checkpoints at places 1.1, 1.2 and 2.1 is damaged in place and healed again. Seed and count of
the flips are printed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast import CorruptError, NotFoundError
from holdfast.checkpoint.fault import Fault
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.format import records
from holdfast.format.container import BLOCK_NBYTES, TABLE_OFFSET, VALUES_NAME, num_blocks
from holdfast.format.records import Place
from holdfast.run.history import resolve
from holdfast.run.paths import parse
from tests.support.models import bits, start_new_job
from tests.support.ranks import run_ranks

SEED = 20_251_121
NUM_FLIPS = 75
NUM_FLIPS_SLOW = 2000
HEAD, OLDER = Place(2, 1), Place(1, 2)
STEPS = {Place(1, 1): 1, OLDER: 2, HEAD: 3}
#: Names of tensors and whether they are sharded; the last one makes data files of several blocks.
TENSORS: dict[str, tuple[torch.dtype, tuple[int, ...], bool]] = {
    "bias": (torch.float32, (33,), False),
    "flags": (torch.bool, (17,), True),
    "ids": (torch.int64, (40, 3), True),
    "scale": (torch.bfloat16, (6, 5), True),
    "spin": (torch.complex64, (9,), True),
    "table": (torch.int16, (1_300_000,), True),
    "tiny": (torch.float8_e4m3fn, (11,), False),
}

State = dict[str, object]


def truth(step: int) -> State:
    """The whole state at a step, without ranks."""
    generator = torch.Generator().manual_seed(step)
    model: State = {}
    for name, (dtype, shape, _) in TENSORS.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 100, (*shape, dtype.itemsize), generator=generator)
        model[name] = raw.to(torch.uint8).view(dtype).reshape(shape)
    return {"model": model, "progress": {"step": step, "losses": [0.5 * step, 0.25], "note": f"step {step}"}}


def blank() -> State:
    """A state to load into: of the same form, and with nothing of any checkpoint in it."""
    model: State = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape, _) in TENSORS.items()}
    return {"model": model, "progress": {"step": -1, "losses": [-1.0, -1.0], "note": ""}}


def sharded(state: State) -> State:
    mesh = init_device_mesh("cpu", (2,))
    model: State = {}
    for name, tensor in cast("dict[str, torch.Tensor]", state["model"]).items():
        split = TENSORS[name][2]
        # Moved as bytes: not every dtype can be scattered.
        raw = tensor.view(torch.uint8).reshape(tensor.shape[0], -1)
        model[name] = _as(distribute_tensor(raw, mesh, [Shard(0)]), tensor) if split else tensor
    return {**state, "model": model}


def _as(raw: DTensor, like: torch.Tensor) -> DTensor:
    local = raw.to_local().contiguous().view(like.dtype)
    local = local.reshape(local.shape[0], *like.shape[1:])
    return DTensor.from_local(local, raw.device_mesh, raw.placements, shape=like.shape, stride=like.stride())


def save_all(path: str) -> list[str]:
    """Two steps of one job, and one of the job that resumed from it."""
    start_new_job()
    places = [holdfast.save(path, sharded(truth(step)), step, timeout_s=40).place for step in (1, 2)]
    start_new_job()
    holdfast.load(path, sharded(blank()), continues=True, timeout_s=40)
    return [*places, holdfast.save(path, sharded(truth(3)), 3, timeout_s=40).place]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rot") / "run"
    assert run_ranks(2, save_all, str(path)) == [list(map(str, STEPS))] * 2
    return path


def folder(run: Path, place: Place) -> Path:
    (found,) = run.glob(f"{records.CHECKPOINTS}/step-{STEPS[place]:010d}-*")
    return found


def attempt(path: object, step: int) -> CorruptError | NotFoundError | None:
    """Load a checkpoint: None where every bit is that of `step`, else the refusal. Anything else fails the test."""
    state = blank()
    try:
        report = holdfast.load(str(path), state)
    except (CorruptError, NotFoundError) as error:
        return error
    want = truth(step)
    assert state["progress"] == want["progress"]
    held, wanted = (cast("dict[str, torch.Tensor]", s["model"]) for s in (state, want))
    assert [name for name in wanted if bits(held[name]).tobytes() != bits(wanted[name]).tobytes()] == []
    assert report.step == step
    return None


def verified(path: object) -> list[Fault]:
    """The result of a deep verification."""
    return verify_checkpoint(Checkpoint(resolve(parse(str(path))).sealed), deep=True)


class Region(NamedTuple):
    """Bytes of a file that mean one thing, and the checkpoint that they are of."""

    kind: str
    place: Place | None
    path: Path
    start: int
    stop: int


class Flip(NamedTuple):
    region: Region
    byte: int
    bit: int

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The flip, undone at the end."""
        flip(self.region.path, self.byte, self.bit)
        try:
            yield
        finally:
            flip(self.region.path, self.byte, self.bit)


def flip(path: Path, byte: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))


def regions(run: Path) -> list[Region]:
    """Everything that a run consists of."""
    found = [Region("marker", None, run / records.MARKER_KEY, 0, (run / records.MARKER_KEY).stat().st_size)]
    found += [Region("epoch", None, path, 0, path.stat().st_size) for path in sorted(run.glob("epochs/*"))]
    for place in STEPS:
        commit = run / records.commit_key(place)
        found.append(Region("commit", place, commit, 0, commit.stat().st_size))
        for path in sorted(folder(run, place).iterdir()):
            if path.suffix == ".safetensors":
                found += data_regions(place, path)
            else:
                found.append(Region(path.stem, place, path, 0, path.stat().st_size))
    return found


def data_regions(place: Place, path: Path) -> Iterator[Region]:
    """Header, digest table, and each entry of the data section."""
    header, start = read_header(path)
    table_stop = TABLE_OFFSET + 32 * num_blocks(path.stat().st_size - start)
    yield Region("header", place, path, 0, TABLE_OFFSET)
    yield Region("table", place, path, TABLE_OFFSET, table_stop)
    yield Region("header", place, path, table_stop, start)
    for name, entry in header.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            yield Region("data", place, path, start + low, start + high)


def read_header(path: Path) -> tuple[dict[str, dict[str, list[int]]], int]:
    """A data file's header and where its data section begins."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def hit(flip: Flip) -> set[str]:
    """Names of the entries that have bytes in the block of a flip in a data section; that is as fine as digests are."""
    header, start = read_header(flip.region.path)
    block = (flip.byte - start) // BLOCK_NBYTES
    return {
        name.partition("@")[0] if name != VALUES_NAME else name
        for name, entry in header.items()
        if name != "__metadata__"
        and entry["data_offsets"][0] < (block + 1) * BLOCK_NBYTES
        and entry["data_offsets"][1] > block * BLOCK_NBYTES
    }


def draw(found: list[Region], rng: random.Random) -> Flip:
    """A random bit of a random region of a random kind."""
    kind = rng.choice(sorted({region.kind for region in found}))
    region = rng.choice([region for region in found if region.kind == kind and region.start < region.stop])
    return Flip(region, rng.randrange(region.start, region.stop), rng.randrange(8))


def check_flip(run: Path, flip: Flip) -> None:
    """For any flip, the head and the damaged checkpoint load to the right bits, or an error names the damaged file."""
    kind, place, path, *_ = flip.region
    refusal = attempt(run, STEPS[HEAD])
    if place is not None and place != HEAD:
        assert refusal is None, "an older checkpoint's damage stopped the head"
        refusal = attempt(f"{run}@{place}", STEPS[place])
    capital = kind == "table" and flip.bit == 5  # "a" may have become "A", which is the same digit
    if kind == "header" or (refusal is None and (kind == "epoch" or capital)):
        # No read touches a header; and an epoch's record only matters where the epoch has no commit of its own.
        assert refusal is None
    else:
        assert isinstance(refusal, CorruptError)
        assert refusal.path == str(path)
        assert str(path) in str(refusal)
    if kind == "data":
        names = hit(flip)
        assert refusal is not None
        assert {*names, "the values"} >= {refusal.tensor}
        assert refusal.tensor is not None
        assert refusal.tensor in str(refusal)
    if kind in ("data", "table", "header"):
        faults = verified(f"{run}@{place}")
        assert [fault.path for fault in faults] == [str(path)]
        assert kind != "data" or set(faults[0].tensors) == hit(flip)


def check_flips(run: Path, seed: int, count: int) -> None:
    rng, found = random.Random(seed), regions(run)
    assert {region.kind for region in found} == {
        *("marker", "epoch", "commit", "seal", "manifest", "data", "table", "header")
    }
    print(f"{count} flips from seed {seed}")  # noqa: T201 - the record of the sweep
    for number in range(count):
        flip = draw(found, rng)
        with flip.applied():
            try:
                check_flip(run, flip)
            except BaseException as error:
                error.add_note(f"flip {number} of seed {seed}: {flip}")
                raise
    assert attempt(run, STEPS[HEAD]) is None


def test_a_sound_run_loads_and_verifies(run: Path) -> None:
    for place, step in STEPS.items():
        assert attempt(f"{run}@{place}", step) is None
        assert verified(f"{run}@{place}") == []


def test_no_flipped_bit_gives_a_wrong_value(run: Path) -> None:
    check_flips(run, SEED, NUM_FLIPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_flipped_bit_of_thousands_gives_a_wrong_value(run: Path) -> None:
    check_flips(run, random.SystemRandom().randrange(2**32), NUM_FLIPS_SLOW)


@contextmanager
def swapped(a: Path, b: Path) -> Iterator[None]:
    """Two files under each other's names."""
    _swap(a, b)
    try:
        yield
    finally:
        _swap(a, b)


def _swap(a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


@contextmanager
def replaced(path: Path, data: bytes | None) -> Iterator[None]:
    """Another content under a name, or nothing."""
    old = path.read_bytes()
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(old)


NAMES = ["data-00000.safetensors", "data-00001.safetensors", "manifest.hfm", "seal.json"]


def check_named(refusal: CorruptError | NotFoundError | None, *paths: Path) -> None:
    assert refusal is not None
    assert refusal.path in [str(path) for path in paths]
    assert str(refusal.path) in str(refusal)


@pytest.mark.parametrize("place", [HEAD, OLDER], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [lambda n: 0, lambda n: 1, lambda n: n // 2, lambda n: n - 1, lambda n: n + 7])
def test_a_file_of_another_length_is_named(run: Path, place: Place, name: str, cut: Callable[[int], int]) -> None:
    path = folder(run, place) / name
    data = path.read_bytes()
    with replaced(path, (data + bytes(7))[: cut(len(data))]):
        refusal = attempt(f"{run}@{place}", STEPS[place])
        assert isinstance(refusal, CorruptError)
        check_named(refusal, path)
        assert place == HEAD or attempt(run, STEPS[HEAD]) is None


@pytest.mark.parametrize("place", [HEAD, OLDER], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(run: Path, place: Place, name: str) -> None:
    path = folder(run, place) / name
    with replaced(path, None):
        check_named(attempt(f"{run}@{place}", STEPS[place]), path)
        assert place == HEAD or attempt(run, STEPS[HEAD]) is None


@pytest.mark.parametrize("name", NAMES)
def test_files_swapped_between_checkpoints_are_named(run: Path, name: str) -> None:
    paths = [folder(run, place) / name for place in (HEAD, OLDER)]
    with swapped(*paths):
        for place, path in zip((HEAD, OLDER), paths, strict=True):
            check_named(attempt(f"{run}@{place}", STEPS[place]), path)
        assert attempt(f"{run}@1.1", 1) is None


def test_files_swapped_between_ranks_are_named(run: Path) -> None:
    paths = [folder(run, HEAD) / name for name in NAMES[:2]]
    with swapped(*paths):
        check_named(attempt(run, STEPS[HEAD]), *paths)
        assert {fault.path for fault in verified(run)} == set(map(str, paths))
        assert attempt(f"{run}@{OLDER}", STEPS[OLDER]) is None


@pytest.mark.parametrize(("first", "second"), [(HEAD, OLDER), (OLDER, Place(1, 1))], ids=str)
def test_swapped_commits_are_named(run: Path, first: Place, second: Place) -> None:
    paths = [run / records.commit_key(place) for place in (first, second)]
    with swapped(*paths):
        for place, path in zip((first, second), paths, strict=True):
            check_named(attempt(f"{run}@{place}", STEPS[place]), path)


@pytest.mark.parametrize("name", ["data-00002.safetensors", "notes.txt", "data-00000.safetensors.bak"])
def test_an_extra_file_is_a_finding_and_nothing_more(run: Path, name: str) -> None:
    extra = folder(run, HEAD) / name
    extra.write_bytes(b"anything")
    try:
        assert attempt(run, STEPS[HEAD]) is None
        assert [(fault.code, fault.path) for fault in verified(run)] == [("extra.file", str(extra))]
    finally:
        extra.unlink()


def test_extra_names_beside_the_records_change_nothing(run: Path) -> None:
    extras = [run / "epochs" / "notes.json", run / "history" / "9999999990.json", run / "checkpoints" / "step-9"]
    for extra in extras:
        extra.write_bytes(b"anything")
    assert attempt(run, STEPS[HEAD]) is None
    for extra in extras:
        extra.unlink()
