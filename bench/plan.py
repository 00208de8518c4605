"""``python -m bench plan``: seconds, bytes and memory of planning, from 64 to 8,960 simulated ranks."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.layouts import Sent, flat_random, fsdp, fsdp_layout, three_d
from bench.markdown import table
from bench.marked import TABLES, rewrite
from bench.options import Results, Rounds
from bench.schema import RESULTS, Bar, Part, Result, Sample, Scenario, measured, require_bars, write_result
from bench.statistics import median
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
IDENTITY = CheckpointIdentity("0" * 16, "1" * 32, Place(1, 1), 700, 0.0, {})

#: Simulated layouts by name, the smallest world each makes sense for, and its bars at 8,960 ranks: coordinator's
#: seconds, manifest MiB, memory MiB.
CASES: dict[str, tuple[Callable[[int], Sent], int, tuple[float, float, float]]] = {
    "fsdp": (fsdp, 1, (1.0, 1.0, 2048.0)),
    "tp8-pp16-dp": (three_d, 128, (1.0, 1.0, 2048.0)),
    "random-flat-cuts": (flat_random, 1, (10.0, 64.0, 2048.0)),
}
#: A rank's own load plan into a changed layout, and the check of 1,024 tensors x 1,024 shards.
LOAD_PLAN_BAR_S = 0.5
VALIDATION_BAR_S = 1.0
VALIDATION, OURS = "validation", "holdfast"


def plan(
    *,
    rounds: Rounds = 5,
    results: Results = RESULTS,
    plot: Annotated[Path, typer.Option(help="The PNG.")] = Path("docs/figures/planning.png"),
    document: Annotated[Path, typer.Option(help="The file whose table is rewritten.")] = TABLES,
) -> None:
    """Measure planning at scale, and check it against its bars."""
    parts = []
    for case, (_, smallest, _) in CASES.items():
        for world_size in WORLDS:
            world = max(world_size, smallest)
            # A process of its own, so that its peak memory is this world's.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                facts, samples = pool.apply(measure, (case, world, rounds))
            scenario = Scenario(name=f"{case} x {world}", title=case, world=world, rounds=rounds, facts=facts)
            parts.append(measured(scenario, samples, results))
            print(describe(parts[-1]), file=sys.stderr)
    samples = measure_validation(rounds)
    scenario = Scenario(name=VALIDATION, rounds=rounds)
    parts.append(measured(scenario, samples, results))
    print(f"1,024 tensors x 1,024 shards validated in {_median(parts[-1], 'seconds'):.2f} s", file=sys.stderr)
    result = Result("plan", tuple(parts))
    write_result(result, results)
    draw(result, plot)
    rewrite(document, "plan", render_plan(result))
    require_bars(bars(result))


def measure(case: str, world_size: int, rounds: int) -> tuple[dict[str, int], tuple[Sample, ...]]:
    """Plan a simulated world: from what all ranks sent to a manifest, and from that to one rank's reads."""
    sent = CASES[case][0](world_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan_times, manifest = [], b""
    for _ in range(rounds):
        start = time.perf_counter()
        planned = plan_save(sent.messages, sent.bodies)
        manifest = encode_plan(planned, identity=IDENTITY, values=[RankValues(0, 1000, ("a",))])
        plan_times.append(time.perf_counter() - start)
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    samples = []
    for number, plan_s in enumerate(plan_times, 1):
        start = time.perf_counter()
        files = Files(decode(manifest, path="manifest"))
        decode_s = time.perf_counter() - start
        wants = changed_layout(files)
        start = time.perf_counter()
        num_reads = sum(len(reads) for reads in plan_load(files, wants))
        load_plan_s = time.perf_counter() - start
        assert num_reads >= len(wants)
        values = {"plan_s": (plan_s,), "decode_s": (decode_s,), "load_plan_s": (load_plan_s,)}
        samples.append(Sample(OURS, number, values))
    sent_nbytes = sum(map(len, sent.bodies.values())) + sum(16 + len(m.columns) for m in sent.messages)
    facts = {"sent_nbytes": sent_nbytes, "manifest_nbytes": len(manifest), "extra_memory_nbytes": extra}
    return facts, tuple(samples)


def changed_layout(files: Files) -> list[ReadRequest]:
    """The parts of a checkpoint's tensors that one rank of FSDP over `NEW_WORLD` ranks holds."""
    spec = fsdp_layout(NEW_WORLD)[0].spec
    assert isinstance(spec, Placed)
    rank = NEW_WORLD // 3
    return [
        ReadRequest(tensor, box)
        for tensor in range(len(files.manifest.body.names))
        for box, _ in local_boxes(spec, files.manifest.shape(tensor), rank)
    ]


def measure_validation(rounds: int, *, num_tensors: int = 1024, num_shards: int = 1024) -> tuple[Sample, ...]:
    """Seconds to check that 1,024 tensors of 1,024 shards each, all cut differently, are covered exactly once."""
    rng = np.random.default_rng(0)
    extent = 1 << 20
    inner = [np.sort(rng.choice(extent - 1, num_shards - 1, replace=False) + 1) for _ in range(num_tensors)]
    cuts = np.stack([np.concatenate([[0], row, [extent]]) for row in inner])
    starts, sizes = cuts[:, :-1].reshape(-1, 1), np.diff(cuts, axis=1).reshape(-1, 1)
    tensors = np.repeat(np.arange(num_tensors), num_shards)
    samples = []
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        fault = coverage_fault([(extent,)] * num_tensors, tensors, starts, sizes)
        samples.append(Sample(OURS, number, {"seconds": (time.perf_counter() - start,)}))
        assert fault is None
    return tuple(samples)


def render_plan(result: Result) -> str:
    """The figures at the largest world as Markdown."""
    largest = {part.scenario.name: part for part in result.parts if part.scenario.world == WORLDS[-1]}
    validation = result.part(VALIDATION)
    machine = validation.environment
    lines = table(
        f"{WORLDS[-1]:,} ranks",
        {name: part.scenario.title for name, part in largest.items()},
        [
            ("coordinator, s", lambda name: f"{_median(largest[name], 'plan_s'):.2f}"),
            ("manifest, MiB", lambda name: f"{_mib(largest[name], 'manifest_nbytes'):.2f}"),
            ("extra memory, MiB", lambda name: f"{_mib(largest[name], 'extra_memory_nbytes'):.0f}"),
            (
                "a rank's load plan, s",
                lambda name: f"{_median(largest[name], 'decode_s') + _median(largest[name], 'load_plan_s'):.2f}",
            ),
        ],
    )
    how = (
        f"Medians of {validation.scenario.rounds}. The load plan (with manifest decoding) is for one rank of FSDP over "
        f"{NEW_WORLD:,} ranks. 1,024 tensors of 1,024 irregular shards are checked for exact coverage in "
        f"{_median(validation, 'seconds'):.2f} s. {machine.cpu}, {machine.num_cpus} CPUs, Python {machine.python}, "
        f"revision {machine.revision[:12]}."
    )
    return "\n".join((*lines, "", how))


def describe(part: Part) -> str:
    """One line per world."""
    return (
        f"{part.scenario.title:>18} x {part.scenario.world:>5}: planned in {_median(part, 'plan_s'):.2f} s "
        f"(+{_mib(part, 'extra_memory_nbytes'):.0f} MiB), manifest {_mib(part, 'manifest_nbytes'):.2f} MiB, "
        f"decoded in {_median(part, 'decode_s'):.3f} s, a rank's load plan {_median(part, 'load_plan_s'):.2f} s"
    )


def bars(result: Result) -> Iterator[Bar]:
    """The bars, at the largest world."""
    for part in result.parts:
        if part.scenario.world == WORLDS[-1]:
            seconds, manifest_mib, memory_mib = CASES[part.scenario.title][2]
            for what, value, bar in (
                ("coordinator s", _median(part, "plan_s"), seconds),
                ("manifest MiB", _mib(part, "manifest_nbytes"), manifest_mib),
                ("memory MiB", _mib(part, "extra_memory_nbytes"), memory_mib),
                ("load plan s", _median(part, "load_plan_s"), LOAD_PLAN_BAR_S),
            ):
                yield Bar(what, value, bar, f"{part.scenario.title} {what} {value:.2f} (at most {bar})")
    seconds = _median(result.part(VALIDATION), "seconds")
    yield Bar("validation s", seconds, VALIDATION_BAR_S, f"validation s {seconds:.2f} (at most {VALIDATION_BAR_S})")


def _median(part: Part, key: str) -> float:
    return median(part.series(OURS, key))


def _mib(part: Part, fact: str) -> float:
    nbytes: int = part.scenario.facts[fact]
    return nbytes / 2**20


def draw(result: Result, path: Path) -> None:
    """Planning seconds and manifest size over world size, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for case in CASES:
        parts = [part for part in result.parts if part.scenario.title == case]
        worlds = [part.scenario.world for part in parts]
        left.plot(worlds, [_median(part, "plan_s") for part in parts], marker="o", label=f"{case}: plan")
        load_plans = [_median(part, "load_plan_s") for part in parts]
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
    plt.close(figure)
