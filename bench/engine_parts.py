"""The parts of ``bench engine``: each measured, summarized, and with what it was measured on."""

from __future__ import annotations

from datetime import UTC, datetime

from bench.caches import how_dropped
from bench.engine_contenders import BACKGROUND, GENERATIONS, PACKAGES, able
from bench.engine_loop import LoopJob, run_loops
from bench.engine_metadata import engine_metadata
from bench.engine_plan import Plan
from bench.engine_python import PythonJob, run_python
from bench.engine_restore import run_restores
from bench.engine_results import LoopPart, PythonPart, RestorePart, SavesPart
from bench.engine_saves import SavesJob, num_samples, run_saves
from bench.engine_summary import summarize_loops, summarize_python, summarize_restores, summarize_saves
from bench.environment import environment, package_versions
from bench.errors import SetupError
from bench.progress import progress
from bench.rank import TORCH_THREADS
from bench.raw import RAW_WAYS, takes_direct
from bench.results import RAW


def measure_saves(plan: Plan, gib: float) -> SavesPart:
    """Saves of a state of `gib` by all contenders."""
    names, reasons = able(plan.contenders)
    recipe = plan.recipe(gib)
    # Two runs keep their head until after their next save.
    with plan.place(recipe, world=plan.world, saves=5) as place:
        direct = takes_direct(place.folder)
        job = SavesJob(
            world=plan.world,
            rounds=plan.rounds,
            recipe=recipe,
            contenders=names,
            work_s=plan.work_s,
            folder=place.folder,
            node_dir=place.node_dir,
            direct=direct,
            store_port=place.port,
        )
        with progress(num_samples(job)) as advance:
            size, samples = run_saves(
                job, on_sample=lambda each: advance(f"round {each.round}: {each.contender} {each.durable_s:.2f} s")
            )
    return SavesPart(
        date=_now(),
        environment=environment(plan.folder),
        world=plan.world,
        rounds=plan.rounds,
        state=size,
        work_s=plan.work_s,
        generations=GENERATIONS,
        raw_ways=tuple(RAW_WAYS),
        torch_threads=TORCH_THREADS,
        caches=how_dropped(),
        packages=package_versions(PACKAGES.values()),
        contenders=tuple(engine_metadata(name, direct=direct) for name in names),
        not_possible=reasons,
        summaries=summarize_saves(samples, names, raw_ways=tuple(RAW_WAYS), nbytes=size.nbytes),
        samples=samples,
    )


def measure_restores(plan: Plan, gib: float) -> RestorePart:
    """Restores of a state of `gib` after the death of all ranks."""
    recipe = plan.recipe(gib)
    with plan.place(recipe, world=plan.world, saves=plan.rounds + 1) as place, progress(plan.rounds) as advance:
        size, samples = run_restores(
            plan.world,
            plan.rounds,
            recipe,
            place.folder / "run",
            place.node_dir,
            on_sample=lambda each: advance(f"round {each.round}: restored in {each.restore_s:.2f} s"),
        )
    return RestorePart(
        date=_now(),
        environment=environment(plan.folder),
        world=plan.world,
        rounds=plan.rounds,
        state=size,
        figures=summarize_restores(samples),
        samples=samples,
    )


def measure_python(plan: Plan, gib: float) -> PythonPart:
    """Saves of a state of `gib` beside a loop of Python, by those contenders that save in the background."""
    recipe, names = plan.recipe(gib), _in_background(plan)
    num_turns = (plan.rounds + 1) * len(names)
    with plan.place(recipe, world=1, saves=3) as place, progress(num_turns) as advance:
        job = PythonJob(plan.rounds, recipe, names, plan.calm_s, place.folder, place.node_dir, place.port)
        size, samples = run_python(
            job, on_sample=lambda each: advance(f"round {each.round}: beside Python, {each.contender}")
        )
    return PythonPart(
        date=_now(),
        environment=environment(plan.folder),
        world=1,
        rounds=plan.rounds,
        state=size,
        summaries=summarize_python(samples, names),
        samples=samples,
    )


def measure_loops(plan: Plan, gib: float) -> LoopPart:
    """Training loops with saves of a state of `gib` by those contenders that save in the background, with writes of as
    many bytes by nobody's checkpoint, and without."""
    recipe, names = plan.recipe(gib), (RAW, *_in_background(plan))
    saves = 2 + len(range(0, plan.steps, plan.every))
    num_turns = (plan.rounds + 1) * (1 + len(names))
    with plan.place(recipe, world=plan.world, saves=saves) as place, progress(num_turns) as advance:
        job = LoopJob(
            world=plan.world,
            rounds=plan.rounds,
            recipe=recipe,
            contenders=names,
            steps=plan.steps,
            every=plan.every,
            tokens=plan.tokens,
            folder=place.folder,
            node_dir=place.node_dir,
            store_port=place.port,
        )
        size, samples = run_loops(
            job, on_sample=lambda each: advance(f"round {each.round}: {each.contender} {each.seconds:.2f} s")
        )
    return LoopPart(
        date=_now(),
        environment=environment(plan.folder),
        world=plan.world,
        rounds=plan.rounds,
        state=size,
        steps=plan.steps,
        every=plan.every,
        tokens=plan.tokens,
        summaries=summarize_loops(samples, names),
        samples=samples,
    )


def _in_background(plan: Plan) -> tuple[str, ...]:
    names = tuple(name for name in BACKGROUND if name in plan.contenders)
    if not names:
        raise SetupError(f"None of the contenders saves in the background. Choose from {', '.join(BACKGROUND)}.")
    return names


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
