"""``python -m bench plan``: seconds, bytes and memory of planning, from 64 to 8,960 simulated ranks."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.benchmark import Bar, Benchmark, Options
from bench.layouts import Sent, flat_random, fsdp, fsdp_layout, three_d
from bench.markdown import about, ours, table
from bench.runner import in_ranks, in_turns, timed
from bench.schema import OURS, Part, Result
from holdfast.format.container import Files
from holdfast.format.manifest import decode
from holdfast.format.records import Place
from holdfast.geometry import coverage_fault
from holdfast.plan.layout import Placed
from holdfast.plan.load import ReadRequest, plan_load
from holdfast.plan.placements import local_boxes
from holdfast.plan.save import CheckpointIdentity, RankValues, encode_plan, plan_save

WORLDS = (64, 256, 1024, 4480, 8960)
#: A changed layout to load into: FSDP over this many ranks.
NEW_WORLD = 1024
ROUNDS = 5
IDENTITY = CheckpointIdentity("0" * 16, "1" * 32, Place(1, 1), 700, 0.0, {})


class Case(NamedTuple):
    """A simulated layout, its smallest world, and its bars at the largest one."""

    simulate: Callable[[int], Sent]
    smallest: int
    coordinator_s: float
    manifest_mib: float


CASES = {
    "fsdp": Case(fsdp, 1, 1.0, 1.0),
    "tp8-pp16-dp": Case(three_d, 128, 1.0, 1.0),
    "random-flat-cuts": Case(flat_random, 1, 10.0, 64.0),
}
#: Memory of the coordinator, a rank's load plan into a changed layout, and the check of 1,024 tensors x 1,024 shards.
MEMORY_BAR_GIB, LOAD_PLAN_BAR_S, VALIDATION_BAR_S = 2.0, 0.5, 1.0
VALIDATION = "validation"


def plan_world(case: str, world: int, options: Options) -> Part:
    """Plan from what all ranks sent to a manifest, and from that to one rank's reads. The peak of memory is of a world,
    so each needs a process of its own."""
    sent, before = CASES[case].simulate(world), _peak_nbytes()
    manifest = manifest_of(sent)
    facts = {"manifest_nbytes": len(manifest), "extra_memory_nbytes": _peak_nbytes() - before}

    def plan() -> dict[str, float]:
        planned = timed(lambda: manifest_of(sent), "plan_s")
        start_s = time.perf_counter()
        files = Files(decode(manifest, path="manifest"))
        decode_s = time.perf_counter() - start_s
        wants = changed_layout(files)

        def reads() -> None:
            assert sum(len(reads) for reads in plan_load(files, wants)) >= len(wants)

        return planned | {"decode_s": decode_s} | timed(reads, "load_plan_s")

    scenario = options.scenario(f"{case} x {world}", title=case, world=world, rounds=ROUNDS, facts=facts)
    return in_turns(scenario, {OURS: plan}, options)


def _peak_nbytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def manifest_of(sent: Sent) -> bytes:
    """The manifest that the coordinator writes when all ranks have sent these messages."""
    return encode_plan(plan_save(sent.messages, sent.bodies), identity=IDENTITY, values=[RankValues(0, 1000, ("a",))])


def changed_layout(files: Files) -> list[ReadRequest]:
    """The parts of the tensors of a checkpoint that one rank of FSDP over `NEW_WORLD` ranks holds."""
    spec = fsdp_layout(NEW_WORLD)[0].spec
    assert isinstance(spec, Placed)
    return [
        ReadRequest(tensor, box)
        for tensor in range(len(files.manifest.body.names))
        for box, _ in local_boxes(spec, files.manifest.shape(tensor), NEW_WORLD // 3)
    ]


def measure_validation(options: Options) -> Part:
    """Seconds to check that 1,024 tensors of 1,024 shards each, all cut differently, are covered exactly once."""
    rng, extent, num_tensors, num_shards = np.random.default_rng(0), 1 << 20, 1024, 1024
    inner = [np.sort(rng.choice(extent - 1, num_shards - 1, replace=False) + 1) for _ in range(num_tensors)]
    cuts = np.stack([np.concatenate([[0], row, [extent]]) for row in inner])
    starts, sizes = cuts[:, :-1].reshape(-1, 1), np.diff(cuts, axis=1).reshape(-1, 1)
    tensors = np.repeat(np.arange(num_tensors), num_shards)

    def check() -> None:
        assert coverage_fault([(extent,)] * num_tensors, tensors, starts, sizes) is None

    return in_turns(options.scenario(VALIDATION, rounds=ROUNDS), {OURS: lambda: timed(check)}, options)


def tables(result: Result) -> Iterator[str]:
    yield table(
        f"{WORLDS[-1]:,} ranks",
        {part.scenario.title: part for part in result.parts if part.scenario.world == WORLDS[-1]},
        ("coordinator, s", ours("plan_s")),
        ("manifest, MiB", lambda part: f"{_mib(part, 'manifest_nbytes'):.2f}"),
        ("extra memory, MiB", lambda part: f"{_mib(part, 'extra_memory_nbytes'):.0f}"),
        ("a rank's load plan, s", ours("decode_s", "load_plan_s")),
    )
    yield about(result.part(VALIDATION))


def bars(part: Part) -> Iterator[Bar]:
    title = part.scenario.title
    if part.scenario.name == VALIDATION:
        yield Bar(VALIDATION, part.median(OURS), VALIDATION_BAR_S, " s")
    elif part.scenario.world == WORLDS[-1]:
        yield Bar(f"{title} coordinator", part.median(OURS, "plan_s"), CASES[title].coordinator_s, " s")
        yield Bar(f"{title} manifest", _mib(part, "manifest_nbytes"), CASES[title].manifest_mib, " MiB")
        yield Bar(f"{title} memory", _mib(part, "extra_memory_nbytes") / 1024, MEMORY_BAR_GIB, " GiB")
        yield Bar(f"{title} load plan", part.median(OURS, "load_plan_s"), LOAD_PLAN_BAR_S, " s")


def draw_planning(result: Result, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for case in CASES:
        parts = [part for part in result.parts if part.scenario.title == case]
        worlds = [part.scenario.world for part in parts]
        left.plot(worlds, [part.median(OURS, "plan_s") for part in parts], marker="o", label=f"{case}: plan")
        load_plans = [part.median(OURS, "load_plan_s") for part in parts]
        left.plot(worlds, load_plans, marker=".", ls=":", label=f"{case}: a rank's load plan")
        right.plot(worlds, [_mib(part, "manifest_nbytes") for part in parts], marker="o", label=case)
    for axes, label in ((left, "seconds"), (right, "manifest, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label)
        axes.set_xticks(WORLDS, [f"{world:,}" for world in WORLDS])
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle("Planning a Llama-3-405B-like state with Adam (4,548 tensors), simulated ranks")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _mib(part: Part, fact: str) -> float:
    nbytes: int = part.scenario.facts[fact]
    return nbytes / 2**20


PARTS = {
    f"{name} x {world}": partial(in_ranks, 1, plan_world, name, world)
    for name, case in CASES.items()
    for world in (max(each, case.smallest) for each in WORLDS)
}
PLAN = Benchmark("plan", {**PARTS, VALIDATION: measure_validation}, tables, bars)
