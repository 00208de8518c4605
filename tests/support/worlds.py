"""Worlds of simulated ranks for planner tests: random layouts of random tensors, and full tensors as the truth."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import DecodedManifest
from holdfast.format.records import Place
from holdfast.geometry import Box, FlatRange, Shape
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import (
    Mesh,
    PieceReplicas,
    Pieces,
    Placed,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    TensorLayout,
    Whole,
)
from holdfast.plan.load import ReadRequest, pieces, plan_load
from holdfast.plan.save import CheckpointIdentity, RankMessage, RankValues, encode_plan, plan_save
from holdfast.plan.strided_runs import StridedRun, copy_spans

T = TypeVar("T")

IDENTITY = CheckpointIdentity("00112233445566aa", "0" * 32, Place(1, 1), 7, 123.5, {})


@dataclass(frozen=True)
class World:
    """`layouts[rank]` are the tensors as that rank describes them; `full` is the truth, as raw bytes per element."""

    layouts: list[list[TensorLayout]]
    full: dict[str, np.ndarray]

    def sent(self) -> tuple[list[RankMessage], dict[bytes, bytes]]:
        """The messages that the coordinator gets."""
        layouts = [RankLayout.of(tensors, {}) for tensors in self.layouts]
        return [RankMessage(x.digest, x.columns) for x in layouts], {x.digest: x.body for x in layouts}

    def plan(self, *, values_nbytes: int = 100) -> DecodedManifest:
        """The manifest of this world, encoded and decoded again."""
        messages, bodies = self.sent()
        plan = plan_save(messages, bodies)
        data = encode_plan(plan, identity=IDENTITY, values=[RankValues(0, values_nbytes, ("a",))])
        return fmt.decode(data, path="manifest")


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=0, max_size=3).map(tuple)


@st.composite
def meshes(draw: st.DrawFn, world_size: int) -> Mesh:
    """All ranks of a world in some order, as a mesh of one to three axes."""
    ranks = draw(st.permutations(range(world_size)))
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    first = draw(st.sampled_from(divisors))
    rest = world_size // first
    second = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    return Mesh(draw(st.sampled_from([(world_size,), (first, rest), (first, second, rest // second)])), tuple(ranks))


@st.composite
def placements(draw: st.DrawFn, mesh: Mesh, shape: Shape) -> tuple[Placement, ...]:
    """Any mixture of replicated, sharded and strided axes."""
    choices: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if shape:
        axes = st.integers(0, len(shape) - 1)
        choices += [axes.map(Shard), st.builds(StridedShard, axes, st.integers(1, 3))]
    return tuple(draw(st.one_of(choices)) for _ in mesh.shape)


@st.composite
def cut_points(draw: st.DrawFn, extent: int, parts: int) -> list[int]:
    """`parts + 1` cut points of ``[0, extent]``, with empty parts."""
    inner = draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), extent]


@st.composite
def dealt(draw: st.DrawFn, world_size: int, parts: Iterable[T]) -> list[list[T]]:
    """Each of `parts` in the hands of one rank or several; some ranks may hold none."""
    hands: list[list[T]] = [[] for _ in range(world_size)]
    for part in parts:
        for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
            hands[rank].append(part)
    return hands


@st.composite
def specs(draw: st.DrawFn, world_size: int, shape: Shape) -> list[Spec]:
    """One spec per rank, which together cover a tensor of `shape`."""
    kind = draw(st.sampled_from(["placed", "split", "first", "compare", "flat", "rows"]))
    if kind == "placed":
        mesh = draw(meshes(world_size))
        return [Placed(mesh, draw(placements(mesh, shape)))] * world_size
    policy: PieceReplicas = draw(st.sampled_from(["split", "compare"]))
    if kind == "flat":
        ranges = itertools.starmap(FlatRange, itertools.pairwise(draw(cut_points(prod(shape), world_size + 1))))
        return [Pieces.ranges(*held, replicas=policy) for held in draw(dealt(world_size, ranges))]
    if kind == "rows" and shape:
        cuts, rest = draw(cut_points(shape[0], world_size)), shape[1:]
        rows = (Box((a, *(0 for _ in rest)), (b - a, *rest)) for a, b in itertools.pairwise(cuts))
        return [Pieces.boxes(*held, replicas=policy) for held in draw(dealt(world_size, rows))]
    return [Whole("split" if kind in ("split", "rows") else kind)] * world_size  # type: ignore[arg-type]


@st.composite
def worlds(draw: st.DrawFn, max_ranks: int = 6) -> World:
    """A world of up to `max_ranks` ranks and up to six tensors."""
    world_size = draw(st.integers(1, max_ranks))
    layouts: list[list[TensorLayout]] = [[] for _ in range(world_size)]
    full: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for number in range(draw(st.integers(0, 6))):
        name, shape, dtype = f"t{number}", draw(shapes), draw(st.sampled_from(sorted(DTYPES)))
        for rank, spec in enumerate(draw(specs(world_size, shape))):
            layouts[rank].append(TensorLayout(name, dtype, shape, spec))
        full[name] = rng.integers(0, 256, (*shape, DTYPES[dtype].itemsize), np.uint8)
    return World(layouts, full)


def cut(full: np.ndarray, shape: Shape, part: Box | FlatRange) -> bytes:
    """The bytes of `part` of a full tensor."""
    if isinstance(part, Box):
        return full[part.slices()].tobytes()
    return full.reshape(prod(shape), full.shape[-1])[part.start : part.stop].tobytes()


def data_sections(world: World, files: Files) -> list[bytearray]:
    """The data sections that correct writers produce; gaps stay 0xEE, so that a test would see them."""
    sections = []
    for index in range(files.manifest.body.num_files):
        layout = files.layout(index)
        section = bytearray(b"\xee" * layout.data_nbytes)
        for entry in layout.entries:
            name, shape = files.manifest.body.names[entry.tensor], files.manifest.shape(entry.tensor)
            data = cut(world.full[name], shape, entry.part)
            assert len(data) == entry.nbytes
            section[entry.offset : entry.offset + entry.nbytes] = data
        sections.append(section)
    return sections


def fill(
    files: Files, sections: Sequence[bytes | bytearray], wants: list[ReadRequest], first_file: int
) -> list[np.ndarray]:
    """Execute a load plan on data sections: the raw bytes of each want, in the shape of its box."""
    itemsizes = files.itemsizes
    filled = [np.full((*want.box.size, itemsizes[want.tensor]), 0xDD, np.uint8) for want in wants]
    for reads in plan_load(files, wants, first_file=first_file):
        for number, read in enumerate(map(reads.read, range(len(reads)))):
            want, itemsize = wants[read.want], int(itemsizes[wants[read.want].tensor])
            rows = np.frombuffer(bytes(sections[reads.file][read.start : read.stop]), np.uint8).reshape(-1, itemsize)
            for at, stored, source, target in pieces(read, want.box, 0, len(rows)):
                held = rows[at : at + stored.numel].reshape(*stored.size, itemsize)
                filled[read.want][target.slices()] = held[source.slices()]
            _check_run(reads.strided_run(number), rows, filled[read.want])
            assert not reads.straight[number] or np.array_equal(filled[read.want].reshape(rows.shape), rows)
    return filled


def _check_run(run: StridedRun | None, rows: np.ndarray, filled: np.ndarray) -> None:
    """Check that the runs of a read describe the same elements as its boxes."""
    if run is None:
        return
    elements = filled.reshape(-1, rows.shape[-1])
    for at, place, num_rows, size in copy_spans(run, 0, len(rows)):
        for row in range(num_rows):
            source, target = at + row * run.step, place + row * run.pitch
            assert np.array_equal(rows[source : source + size], elements[target : target + size])
