"""``python -m bench plan``: seconds, bytes and memory of planning, from 64 to 8,960 simulated ranks."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from bench.environment import Environment, environment
from bench.errors import BenchError
from bench.layouts import Sent, flat_random, fsdp, fsdp_layout, three_d
from bench.marked import TABLES, rewrite
from bench.results import RESULTS
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


class Figure(msgspec.Struct, frozen=True):
    """One simulated world, medians."""

    case: str
    world_size: int
    sent_nbytes: int
    plan_s: float
    manifest_nbytes: int
    extra_memory_nbytes: int
    decode_s: float
    load_plan_s: float


class PlanResult(msgspec.Struct, frozen=True):
    """All figures of one run."""

    environment: Environment
    rounds: int
    figures: list[Figure]
    validation_s: float


def plan(
    *,
    rounds: Annotated[int, typer.Option(help="Repetitions of each measurement; medians are reported.")] = 5,
    results: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
    plot: Annotated[Path, typer.Option(help="The PNG.")] = Path("docs/figures/planning.png"),
    document: Annotated[Path, typer.Option(help="The file whose table is rewritten.")] = TABLES,
) -> None:
    """Measure planning at scale, and check it against its bars."""
    figures = []
    for case, (_, smallest, _) in CASES.items():
        for world_size in WORLDS:
            world = max(world_size, smallest)
            # A process of its own, so that its peak memory is this world's.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                figures.append(pool.apply(measure, (case, world, rounds)))
            print(describe(figures[-1]), file=sys.stderr)
    result = PlanResult(environment(results), rounds, figures, measure_validation(rounds))
    print(f"1,024 tensors x 1,024 shards validated in {result.validation_s:.2f} s", file=sys.stderr)
    results.mkdir(parents=True, exist_ok=True)
    (results / "plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    draw(result, plot)
    rewrite(document, "plan", render(result))
    missed = list(misses(result))
    if missed:
        raise BenchError("bars missed: " + "; ".join(missed))


def measure(case: str, world_size: int, rounds: int) -> Figure:
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
    decode_times, load_times = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        files = Files(decode(manifest, path="manifest"))
        decode_times.append(time.perf_counter() - start)
        wants = changed_layout(files)
        start = time.perf_counter()
        num_reads = sum(len(reads) for reads in plan_load(files, wants))
        load_times.append(time.perf_counter() - start)
        assert num_reads >= len(wants)
    return Figure(
        case=case,
        world_size=world_size,
        sent_nbytes=sum(map(len, sent.bodies.values())) + sum(16 + len(m.columns) for m in sent.messages),
        plan_s=float(np.median(plan_times)),
        manifest_nbytes=len(manifest),
        extra_memory_nbytes=extra,
        decode_s=float(np.median(decode_times)),
        load_plan_s=float(np.median(load_times)),
    )


def changed_layout(files: Files) -> list[ReadRequest]:
    """What one rank of FSDP over `NEW_WORLD` ranks holds of the tensors of a checkpoint."""
    spec = fsdp_layout(NEW_WORLD)[0].spec
    assert isinstance(spec, Placed)
    rank = NEW_WORLD // 3
    return [
        ReadRequest(tensor, box)
        for tensor in range(len(files.manifest.body.names))
        for box, _ in local_boxes(spec, files.manifest.shape(tensor), rank)
    ]


def measure_validation(rounds: int, *, num_tensors: int = 1024, num_shards: int = 1024) -> float:
    """Seconds to check that 1,024 tensors of 1,024 shards each, all cut differently, are covered exactly once."""
    rng = np.random.default_rng(0)
    extent = 1 << 20
    inner = [np.sort(rng.choice(extent - 1, num_shards - 1, replace=False) + 1) for _ in range(num_tensors)]
    cuts = np.stack([np.concatenate([[0], row, [extent]]) for row in inner])
    starts, sizes = cuts[:, :-1].reshape(-1, 1), np.diff(cuts, axis=1).reshape(-1, 1)
    tensors = np.repeat(np.arange(num_tensors), num_shards)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        fault = coverage_fault([(extent,)] * num_tensors, tensors, starts, sizes)
        times.append(time.perf_counter() - start)
        assert fault is None
    return float(np.median(times))


def render(result: PlanResult) -> str:
    """The figures at the largest world as Markdown."""
    rows = [
        f"| {row.case} | {row.plan_s:.2f} | {row.manifest_nbytes / 2**20:.2f} | {row.extra_memory_nbytes / 2**20:.0f} "
        f"| {row.decode_s + row.load_plan_s:.2f} |"
        for row in result.figures
        if row.world_size == WORLDS[-1]
    ]
    machine = result.environment
    return "\n".join(
        (
            f"| {WORLDS[-1]:,} ranks | coordinator, s | manifest, MiB | extra memory, MiB | a rank's load plan, s |",
            "|---|---|---|---|---|",
            *rows,
            "",
            (
                f"Medians of {result.rounds}. The load plan (with manifest decoding) is for one rank of FSDP over "
                f"{NEW_WORLD:,} ranks. 1,024 tensors of 1,024 irregular shards are checked for exact coverage in "
                f"{result.validation_s:.2f} s. {machine.cpu}, {machine.num_cpus} CPUs, Python {machine.python}, "
                f"revision {machine.revision[:12]}."
            ),
        )
    )


def describe(figure: Figure) -> str:
    """One line per world."""
    return (
        f"{figure.case:>18} x {figure.world_size:>5}: planned in {figure.plan_s:.2f} s "
        f"(+{figure.extra_memory_nbytes / 2**20:.0f} MiB), manifest {figure.manifest_nbytes / 2**20:.2f} MiB, "
        f"decoded in {figure.decode_s:.3f} s, a rank's load plan {figure.load_plan_s:.2f} s"
    )


def misses(result: PlanResult) -> list[str]:
    """Bars that were not met at the largest world."""
    missed = []
    for figure in result.figures:
        if figure.world_size != WORLDS[-1]:
            continue
        seconds, manifest_mib, memory_mib = CASES[figure.case][2]
        for what, value, bar in (
            ("coordinator s", figure.plan_s, seconds),
            ("manifest MiB", figure.manifest_nbytes / 2**20, manifest_mib),
            ("memory MiB", figure.extra_memory_nbytes / 2**20, memory_mib),
            ("load plan s", figure.load_plan_s, LOAD_PLAN_BAR_S),
        ):
            if value > bar:
                missed.append(f"{figure.case} {what} {value:.2f} > {bar}")
    if result.validation_s > VALIDATION_BAR_S:
        missed.append(f"validation s {result.validation_s:.2f} > {VALIDATION_BAR_S}")
    return missed


def draw(result: PlanResult, path: Path) -> None:
    """Planning seconds and manifest size over world size, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for case in CASES:
        rows = [row for row in result.figures if row.case == case]
        worlds = [row.world_size for row in rows]
        left.plot(worlds, [row.plan_s for row in rows], marker="o", label=f"{case}: plan")
        left.plot(worlds, [row.load_plan_s for row in rows], marker=".", ls=":", label=f"{case}: a rank's load plan")
        right.plot(worlds, [row.manifest_nbytes / 2**20 for row in rows], marker="o", label=case)
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
