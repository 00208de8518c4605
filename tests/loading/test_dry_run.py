"""Dry runs of loads: their figures for all ranks at once equal the plans that loads make rank by rank."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Placement, distribute_tensor, init_device_mesh
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard

import holdfast
from bench.layouts import fsdp
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.cooperative import reading as together
from holdfast.cooperative.neighbours import node_id
from holdfast.errors import ConfigurationError, IncompatibleError
from holdfast.format.container import Files
from holdfast.format.manifest import decode
from holdfast.format.patterns import Globs
from holdfast.geometry import FlatRange, Int64s, Shape
from holdfast.io import jobs as io_jobs
from holdfast.io.buffers import BUFFER_NBYTES
from holdfast.io.jobs import ReadJob
from holdfast.loading.load_plan import LoadPlan
from holdfast.mapping import Fuse, Pad, Rename, Rule, Stack, Transpose
from holdfast.mapping.apply import mapped
from holdfast.mapping.draft import CheckpointTable
from holdfast.mapping.parts import StoredTensor, as_stored, stored_tensors
from holdfast.plan import blocks, layout_rules
from holdfast.plan.blocks import NodeReading, PerFile
from holdfast.plan.dry_run import Traffic, even_nodes, match, seconds, traffic
from holdfast.plan.exchange import Bandwidths, divide_job_reads, divide_reads, united
from holdfast.plan.layout import Mesh, Pieces, Placed, Replicate, Shard, TensorLayout
from holdfast.plan.layout_rules import HeldTensor, PipelineStage, assign, from_toml
from holdfast.plan.load import ReadRequest, plan_load
from holdfast.plan.placements import local_boxes
from holdfast.plan.save import encode_plan, plan_save
from holdfast.run.history import resolve
from holdfast.run.paths import parse
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks
from tests.support.worlds import IDENTITY, World, placements, worlds

REQUEST = 48


class Job(NamedTuple):
    """A job that loads: a mesh, the node of each rank, and placements for each tensor."""

    mesh_shape: Shape
    node_of: Int64s
    held: dict[str, HeldTensor]


def table_of(files: Files, rules: tuple[Rule, ...] = ()) -> CheckpointTable:
    return mapped(rules, stored_tensors(files.manifest), files.manifest.body.aliases, {})


@st.composite
def jobs(draw: st.DrawFn, table: CheckpointTable) -> Job:
    mesh_shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)))
    world_size = math.prod(mesh_shape)
    node_of = even_nodes(world_size, draw(st.integers(1, world_size)))
    mesh = Mesh(mesh_shape, tuple(range(world_size)))
    held = {}
    for name, stored in table.stored.items():
        if draw(st.integers(0, 4)):
            places: list[layout_rules.Place] = list(draw(placements(mesh, stored.shape)))
            for axis, extent in enumerate(mesh_shape):
                if not draw(st.integers(0, 4)):
                    places[axis] = PipelineStage(draw(st.integers(0, extent - 1)))
            held[name] = HeldTensor(tuple(places), None)
    return Job(mesh_shape, node_of, held)


def rank_by_rank(files: Files, table: CheckpointTable, job: Job) -> Traffic:
    """The same as `traffic`, by the plan of each rank and the plans of nodes."""
    world_size, num_files = len(job.node_of), files.manifest.body.num_files
    numbers = {name: number for number, name in enumerate(files.manifest.body.names)}
    needed, needs = np.zeros(world_size, np.int64), []
    for rank in range(world_size):
        wants = []
        for name, held in job.held.items():
            stored = table.stored[name]
            for box, _ in local_boxes(held.placed(job.mesh_shape), stored.shape, rank):
                for part in table.parts.get(name, as_stored(name, stored).parts):
                    met = part.meet(box)
                    if met is not None and part.source is not None:
                        wants.append(ReadRequest(numbers[part.source], met[1]))
        needed[rank] = sum(want.box.numel * int(files.itemsizes[want.tensor]) for want in wants)
        runs = [np.zeros((0, 3), np.int64)]
        for reads in plan_load(files, wants):
            extents = np.stack([reads.starts, reads.stops], axis=1)
            job_of = ReadJob(reads.data_nbytes, nothing, extents, nothing)
            runs.append(np.insert(job_of.ranges(), 0, reads.file, axis=1))
        needs.append(np.concatenate(runs))
    members = [np.flatnonzero(job.node_of == node).tolist() for node in range(int(job.node_of.max()) + 1)]
    nodes = np.zeros(len(members), np.int64)
    apart, once = (PerFile(*np.zeros((2, num_files), np.int64)) for _ in range(2))
    for node, ranks in enumerate(members):
        alone = divide_reads(ranks, [needs[rank] for rank in ranks], chunk_nbytes=REQUEST)
        nodes[node] = (alone.stops - alone.starts).sum()
        np.add.at(apart.nbytes, alone.files, alone.stops - alone.starts)
        np.add.at(apart.num_requests, alone.files, 1)
        of_all = [[needs[rank] for rank in each] for each in members]
        shared = divide_job_reads(members, of_all, node, chunk_nbytes=REQUEST)
        read = shared.senders < 0
        np.add.at(once.nbytes, shared.files[read], (shared.stops - shared.starts)[read])
        np.add.at(once.num_requests, shared.files[read], 1)
    return Traffic(needed, NodeReading(nodes, apart, once))


def nothing(*_: object) -> Any:
    raise AssertionError("nothing is read")


def assert_same(found: Traffic, expected: Traffic) -> None:
    assert found.needed.tolist() == expected.needed.tolist()
    assert found.reading.nodes.tolist() == expected.reading.nodes.tolist()
    for mine, theirs in ((found.reading.apart, expected.reading.apart), (found.reading.once, expected.reading.once)):
        assert mine.nbytes.tolist() == theirs.nbytes.tolist()
        assert mine.num_requests.tolist() == theirs.num_requests.tolist()


@contextmanager
def blocks_of(nbytes: int) -> Iterator[pytest.MonkeyPatch]:
    """Have blocks be as small as that, and requests of a few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, io_jobs):
            patch.setattr(module, "BLOCK_NBYTES", nbytes)
        patch.setattr(blocks, "REQUEST_NBYTES", REQUEST)
        patch.setattr(io_jobs, "_BRIDGE_NBYTES", 0)
        yield patch


@pytest.mark.parametrize("at_once", [1, 1 << 22])
@given(worlds(), st.sampled_from([1, 4, 16]), st.data())
def test_all_ranks_at_once_come_to_what_each_of_them_plans(
    at_once: int, world: World, block: int, data: st.DataObject
) -> None:
    files = Files(world.plan())
    table = table_of(files)
    job = data.draw(jobs(table))
    with blocks_of(block) as patch:
        patch.setattr(blocks, "_AT_ONCE", at_once)
        found = traffic(files, table, job.held, job.mesh_shape, job.node_of)
        assert_same(found, rank_by_rank(files, table, job))


def test_ranges_that_lie_in_the_gaps_of_a_box_are_not_read() -> None:
    shape, ranges = (4, 6), [FlatRange(at, at + 3) for at in range(0, 24, 3)]
    layouts = [[TensorLayout("w", "uint8", shape, Pieces.ranges(each))] for each in ranges]
    files = Files(World(layouts, {}).plan())
    job = Job((2,), np.asarray([0, 1]), {"w": HeldTensor((Shard(1),), None)})
    with blocks_of(1):
        found = traffic(files, table_of(files), job.held, job.mesh_shape, job.node_of)
        assert_same(found, rank_by_rank(files, table_of(files), job))
    assert found.reading.nodes.tolist() == [12, 12]
    assert found.reading.apart.num_requests.tolist() == [1] * 8


RULES = (
    Fuse(["q.{i}", "k.{i}"], "qk.{i}", groups=2),
    Stack("qk.{i}", "qk"),
    Transpose("v"),
    Pad("w", size=9, axis=0, fill="keep"),
    Rename("v", "value"),
)


@given(st.data())
def test_what_a_mapping_makes_is_planned_as_a_load_plans_it(data: st.DataObject) -> None:
    sizes = {"q.0": (8, 3), "q.1": (8, 3), "k.0": (4, 3), "k.1": (4, 3), "v": (5, 4), "w": (6,)}
    specs = {name: data.draw(st.sampled_from([(2,), (3,), (4,)])) for name in sizes}
    tensors = [
        TensorLayout(name, "float32", shape, Placed(Mesh(specs[name], tuple(range(*specs[name]))), (Shard(0),)))
        for name, shape in sorted(sizes.items())
    ]
    held_by = [[tensor for tensor in tensors if rank < specs[tensor.name][0]] for rank in range(4)]
    files = Files(World(held_by, {}).plan())
    table = table_of(files, RULES)
    assert sorted(table.stored) == ["qk", "value", "w"]
    job = data.draw(jobs(table))
    with blocks_of(4):
        found = traffic(files, table, job.held, job.mesh_shape, job.node_of)
        assert_same(found, rank_by_rank(files, table, job))


def test_a_request_is_a_buffer_of_a_load() -> None:
    assert blocks.REQUEST_NBYTES == BUFFER_NBYTES


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=4), min_size=1))
def test_the_faster_way_is_the_one_that_a_load_chooses(nodes: list[list[tuple[int, int, int]]]) -> None:
    runs = [np.asarray([(f, min(a, b), max(a, b)) for f, a, b in node], np.int64).reshape(-1, 3) for node in nodes]
    needs = [united([each[each[:, 1] < each[:, 2]]]) for each in runs]
    once = united(needs)
    num_bytes = [int((each[:, 2] - each[:, 1]).sum()) for each in (*needs, once)]
    per_file = PerFile(np.asarray(num_bytes[-1:]), np.zeros(1, np.int64))
    reading = NodeReading(np.asarray(num_bytes[:-1]), per_file, per_file)
    for bandwidths in (Bandwidths(1, 2, 1), Bandwidths(2, 2, 9), Bandwidths(1, 9, 1), Bandwidths(3, math.inf, 1)):
        assert seconds(reading, bandwidths).favour_exchange == bandwidths.favour_exchange(needs)


@pytest.mark.parametrize(("world_size", "num_nodes"), [(8, 2), (7, 3), (5, 5), (4, 1)])
def test_ranks_are_spread_evenly_over_nodes(world_size: int, num_nodes: int) -> None:
    counts = np.bincount(even_nodes(world_size, num_nodes))
    assert (len(counts), counts.sum(), int(np.ptp(counts)) <= 1) == (num_nodes, world_size, True)


def test_a_405b_checkpoint_of_8960_ranks_is_planned_for_1024_in_seconds() -> None:
    """2 s of one core; what is asserted leaves room for a busy machine."""
    sent = fsdp(8960)
    planned = encode_plan(plan_save(sent.messages, sent.bodies), identity=IDENTITY, values=[])
    files = Files(decode(planned, path="manifest"))
    table, layout = table_of(files), layout_rules.fsdp(1024)
    started = time.process_time()
    matching = match(layout, table, select=None, cast=False)
    found = traffic(files, table, matching.held, layout.mesh_shape, even_nodes(1024, 128))
    assert time.process_time() - started < 10
    stored = int(files.columns(np.arange(files.manifest.body.num_files), np.zeros(0, np.int64)).data_nbytes.sum())
    assert (len(matching.held), int(found.needed.sum())) == (4548, stored)
    assert int(found.reading.once.nbytes.sum()) == stored
    assert int(found.reading.apart.nbytes.sum()) == int(found.reading.nodes.sum()) >= stored


# --- layouts ----------------------------------------------------------------------------------------------------------

MODEL = {
    "model/embed": StoredTensor("bfloat16", (64, 8)),
    "model/layers.0.up": StoredTensor("bfloat16", (32, 8)),
    "model/layers.1.up": StoredTensor("bfloat16", (32, 8)),
    "model/layers.0.norm": StoredTensor("bfloat16", (8,)),
    "model/ticks": StoredTensor("int64", ()),
    "optimizer/state/model/layers.0.up/exp_avg": StoredTensor("float32", (32, 8)),
    "optimizer/state/model/layers.0.up/step": StoredTensor("float32", ()),
}
MESH = "mesh = { dp = 2, tp = 4 }\n"


def places(text: str, name: str, tensors: dict[str, StoredTensor] | None = None) -> tuple[object, ...]:
    return assign(from_toml(MESH + text, path="x.toml"), tensors or MODEL, {})[name].places


def test_the_first_rule_that_speaks_of_a_mesh_axis_counts_for_it_and_then_the_default() -> None:
    text = """
        default = { dp = "shard 1" }
        [[rule]]
        names = "model/layers.0.up"
        place = { tp = "shard 0" }
        [[rule]]
        names = ["model/*.up", "model/embed"]
        place = { tp = "replicate", dp = "shard 0" }
    """
    assert places(text, "model/layers.0.up") == (Shard(0), Shard(0))
    assert places(text, "model/layers.1.up") == (Shard(0), Replicate())
    assert places(text, "model/layers.0.norm") == (Replicate(), Replicate()), "it has no axis 1"
    assert places(text, "model/ticks") == (Replicate(), Replicate())


def test_state_of_an_optimizer_follows_its_parameter_and_its_own_name() -> None:
    text = """
        [[rule]]
        names = "optimizer"
        place = { dp = "shard 1" }
        [[rule]]
        names = "model/**"
        dtype = "float32"
    """
    parameter = '[[rule]]\nnames = "model/layers.0.up"\nplace = { tp = "shard 0" }\n'
    assert places(parameter + text, "optimizer/state/model/layers.0.up/exp_avg") == (Shard(1), Shard(0))
    assert places(parameter + text, "model/layers.0.up") == (Replicate(), Shard(0))
    assert places(parameter + text, "optimizer/state/model/layers.0.up/step") == (Replicate(), Replicate())


def test_a_stage_is_held_by_the_ranks_of_one_coordinate() -> None:
    held = HeldTensor((PipelineStage(1), Shard(0)), None)
    assert held.placed((2, 3)) == Placed(Mesh((1, 3), (3, 4, 5)), (Replicate(), Shard(0)))


def test_without_a_default_nobody_holds_what_no_rule_matches() -> None:
    layout = from_toml(MESH + '[[rule]]\nnames = "optimizer"\n[[rule]]\nnames = "**.up"\n', path="x.toml")
    matching = match(layout, CheckpointTable(MODEL, {}, {}, {}, {}), select=Globs("model"), cast=False)
    assert matching.unexpected == ("model/embed", "model/layers.0.norm", "model/ticks")
    assert sorted(matching.held) == ["model/layers.0.up", "model/layers.1.up"]
    assert not matching.loads


def test_dtypes_are_compared_as_a_load_compares_them() -> None:
    text = 'default = {}\n[[rule]]\nnames = ["**.up", "model/ticks"]\ndtype = "float32"\n'
    layout, table = from_toml(MESH + text, path="x.toml"), CheckpointTable(MODEL, {}, {}, {}, {})
    matching = match(layout, table, select=None, cast=Globs(["model/layers.0.*", "model/ticks"]))
    assert [one.name for one in matching.cast] == ["model/layers.0.up"]
    assert [one.name for one in matching.refused] == ["model/layers.1.up", "model/ticks"]
    assert match(layout, table, select=Globs("optimizer"), cast=False).loads


def test_optimizers_are_chosen_as_a_whole_and_keep_their_dtypes() -> None:
    layout = from_toml(MESH + '[[rule]]\nnames = "**"\ndtype = "bfloat16"\n', path="x.toml")
    table = CheckpointTable(MODEL, {}, {}, {}, {})
    state = [name for name in MODEL if name.startswith("optimizer")]
    assert list(match(layout, table, select=Globs("optimizer"), cast=False).held) == state
    chosen = match(layout, table, select=Globs("**.up"), cast=False)
    assert [*chosen.held] == ["model/layers.0.up", "model/layers.1.up"]
    assert not match(layout, table, select=Globs("optimizer"), cast=True).cast


def test_a_tied_tensor_is_placed_and_chosen_by_any_of_its_names() -> None:
    layout = from_toml(MESH + '[[rule]]\nnames = "model/head"\nplace = { tp = "shard 0" }\n', path="x.toml")
    table = CheckpointTable({"model/embed": MODEL["model/embed"]}, {"model/head": "model/embed"}, {}, {}, {})
    matching = match(layout, table, select=Globs("model/head"), cast=False)
    assert matching.held["model/embed"].places == (Replicate(), Shard(0))


@pytest.mark.parametrize("option", ["select", "cast"])
def test_globs_that_match_nothing_are_refused(option: str) -> None:
    globs = {"select": None, "cast": False} | {option: Globs("model/layer.0.up")}
    with pytest.raises(IncompatibleError, match=r"did you mean .*layers\.0\.up") as caught:
        match(layout_rules.fsdp(2), CheckpointTable(MODEL, {}, {}, {}, {}), **globs)  # type: ignore[arg-type]
    assert caught.value.code == f"incompatible.{option}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[rule]]\nnames = "model/embed"\n[[rule]]\nnames = "model/layer.0.up"', r"Rule 2 .*layers\.0\.up"),
        ('[[rule]]\nnames = "**.norm"\nplace = { tp = "shard 1" }', r"axis 1 along 'tp'.*layers\.0\.norm.*\(8,\)"),
    ],
)
def test_rules_that_do_not_fit_the_checkpoint_are_refused(text: str, told: str) -> None:
    with pytest.raises(IncompatibleError, match=told) as caught:
        places(text, "model/embed")
    assert caught.value.code == "incompatible.layout"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mesh = { dp = 2", "line|end of document"),
        ("", "mesh"),
        ("mesh = { dp = 0 }", "without ranks"),
        (MESH + "rules = []", "unknown field `rules`"),
        (MESH + 'default = { xp = "replicate" }', "default: the mesh has no axis 'xp'; it has dp, tp"),
        (MESH + '[[rule]]\nnames = "a"\n\n[[rule]]\nplace = {}', r"`names` - at `rule 2 \(line 5\)`"),
        (MESH + '[[rule]]\nnames = "a"\nplace = { tp = "shard" }', r"'shard' is not a placement.*rule 1 \(line 2\)"),
        (MESH + '[[rule]]\nnames = "a"\nplace = { tp = "stage 4" }', r"rule 1 \(line 2\): 'tp' has no stage 4"),
        (MESH + '[[rule]]\nnames = "a"\nplace = { pp = "stage 4" }', r"rule 1 \(line 2\): the mesh has no axis 'pp'"),
        (MESH + '[[rule]]\nnames = "{"', r"brace.*rule 1 \(line 2\)"),
        (MESH + "[[rule]]\nnames = []", r"no names.*rule 1 \(line 2\)"),
        (
            MESH + '[[rule]]\nnames = "a"\ndtype = "float"',
            r"'float' is not a dtype: .* 'float32'.*rule 1 \(line 2\)",
        ),
    ],
)
def test_a_malformed_layout_says_what_and_where(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        from_toml(text, path="rules.toml")
    assert caught.value.code == "config.layout"
    assert caught.value.path == "rules.toml"


# --- loads ------------------------------------------------------------------------------------------------------------

SIZES = {"large": (4096, 1024), "rows": (1000, 7), "columns": (300, 2048), "alike": (50,), "count": ()}
LAYOUT = """
    mesh = { dp = 2, tp = 2 }
    default = {}
    [[rule]]
    names = ["large", "columns"]
    place = { tp = "shard 1" }
    [[rule]]
    names = ["large", "rows"]
    place = { dp = "shard 0" }
"""
PLACEMENTS: dict[str, list[Placement]] = {
    "large": [DShard(0), DShard(1)],
    "rows": [DShard(0), DReplicate()],
    "columns": [DReplicate(), DShard(1)],
}
SLOW_STORE = Bandwidths(node_storage=2e9, all_storage=2e9, node_network=20e9)


def save_rows(run: str) -> None:
    start_new_job()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: torch.arange(math.prod(shape), dtype=torch.float32).view(shape) for name, shape in SIZES.items()}
    sharded: dict[str, torch.Tensor] = {
        name: distribute_tensor(tensors[name], mesh, [DShard(0)]) for name in PLACEMENTS
    }
    holdfast.save(run, tensors | sharded, 1)


def load_there(run: str, nodes: tuple[int, ...], bandwidths: Bandwidths | None) -> tuple[int, int]:
    """Bytes that this rank needed and read."""
    mesh = init_device_mesh("cpu", (2, 2))
    into: dict[str, torch.Tensor] = {name: torch.zeros(shape) for name, shape in SIZES.items()}
    into |= {name: distribute_tensor(into[name], mesh, where) for name, where in PLACEMENTS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "node_id", lambda: bytes([*node_id()[:15], nodes[dist.get_rank()]]))
        report = holdfast.load(run, into, bandwidths=bandwidths)
    return report.needed_nbytes, report.read_nbytes


@pytest.fixture(scope="module")
def run_of_rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved by two ranks, each with half of the rows."""
    run = str(tmp_path_factory.mktemp("rows") / "run")
    run_ranks(2, save_rows, run)
    return run


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("bandwidths", [None, SLOW_STORE], ids=["apart", "once"])
@pytest.mark.few(3)
def test_a_load_does_what_the_dry_run_says(run_of_rows: str, num_nodes: int, bandwidths: Bandwidths | None) -> None:
    checkpoint = Checkpoint(resolve(parse(run_of_rows)).sealed)
    table, layout = table_of(checkpoint.files), from_toml(LAYOUT, path="x.toml")
    matching = match(layout, table, select=None, cast=False)
    node_of = even_nodes(4, num_nodes)
    found = traffic(checkpoint.files, table, matching.held, layout.mesh_shape, node_of)
    loaded = np.asarray(run_ranks(4, load_there, run_of_rows, tuple(node_of.tolist()), bandwidths))
    assert found.needed.tolist() == loaded[:, 0].tolist()
    if bandwidths is not None and seconds(found.reading, bandwidths).favour_exchange:
        assert found.reading.once.nbytes.sum() == loaded[:, 1].sum()
    else:
        read = np.zeros(num_nodes, np.int64)
        np.add.at(read, node_of, loaded[:, 1])
        assert found.reading.nodes.tolist() == read.tolist()
    assert seconds(found.reading, SLOW_STORE).favour_exchange == (num_nodes > 1)


def plan_there(run: str) -> tuple[LoadPlan, holdfast.LoadReport]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    into: dict[str, torch.Tensor] = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SIZES.items()}
    into["large"] = distribute_tensor(into["large"], mesh, [DShard(1)])
    plan = holdfast.plan_load(run, into, cast=True)
    assert not any(bool(tensor.any()) for tensor in map(local, into.values())), "nothing is loaded"
    return plan, holdfast.load(run, into, cast=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_can_ask_what_a_load_into_its_live_state_would_do(run_of_rows: str, world_size: int) -> None:
    for plan, report in run_ranks(world_size, plan_there, run_of_rows):
        told = (plan.step, plan.place, plan.path, plan.loaded, plan.resharded, plan.cast, plan.needed_nbytes)
        done = (report.step, report.place, report.path, report.loaded, report.resharded, report.cast)
        assert told == (*done, report.needed_nbytes)
        assert (plan.missing, plan.unexpected, plan.unmatched) == ((), (), ())
        if world_size == 1:
            assert sum(plan.read_nbytes.values()) == report.read_nbytes


def test_what_a_live_state_lacks_or_has_more_is_listed_and_no_error(run_of_rows: str) -> None:
    into = {"rows": torch.zeros(1000, 7), "more": torch.zeros(2)}
    plan = holdfast.plan_load(run_of_rows, into, cast=["rows", "other"])
    assert (plan.loaded, plan.missing, plan.unmatched) == (("rows",), ("more",), ("other",))
    assert plan.unexpected == ("alike", "columns", "count", "large")
    chosen = holdfast.plan_load(run_of_rows, into, select="rows", mapping=[Rename("columns", "other")])
    assert (chosen.loaded, chosen.missing, chosen.unexpected) == (("rows",), (), ())
    assert list(chosen.read_nbytes) == ["data-00000.safetensors", "data-00001.safetensors"]
