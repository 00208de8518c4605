"""A result of ``bench engine`` that never ran, small enough to check by hand."""

from __future__ import annotations

from bench.engine_bars import bars
from bench.engine_contenders import OURS, OURS_SYNC, THREAD
from bench.engine_metadata import engine_metadata
from bench.engine_results import (
    NO_SAVES,
    EngineResult,
    LoopPart,
    LoopSample,
    PythonPart,
    PythonSample,
    RestorePart,
    RestoreSample,
    SaveSample,
    SavesPart,
)
from bench.engine_summary import summarize_loops, summarize_python, summarize_restores, summarize_saves
from bench.results import RAW, WARM_UP, NotPossible, StateSize, raw_name
from tests.bench_results import MACHINE, RAW_WAYS

ROUNDS = 7
NAMES = (RAW, THREAD, OURS_SYNC, OURS)
DATE = "2030-01-02T03:04:05+00:00"
#: Durable after, per contender; of holdfast half a second more is the copy.
DURABLE_S = {**dict.fromkeys(map(raw_name, RAW_WAYS), 1.0), THREAD: 4.0, OURS_SYNC: 1.25, OURS: 1.5}


def engine_result(
    *, nbytes: int = 2_000_000_000, blocked_s: float = 0.010, loop_s: float = 8.08, rounds: int = ROUNDS
) -> EngineResult:
    """A run in which every round is like the others, and of which holdfast meets all bars but that of its own save."""
    result = EngineResult(
        name="engine",
        saves=saves_part(nbytes=nbytes, blocked_s=blocked_s, rounds=rounds),
        restore=restore_part(nbytes=nbytes, rounds=rounds),
        python=python_part(nbytes=nbytes, rounds=rounds),
        loop=loop_part(nbytes=nbytes, loop_s=loop_s, rounds=rounds),
    )
    return EngineResult(result.name, result.saves, result.restore, result.python, result.loop, tuple(bars(result)))


def saves_part(
    *, nbytes: int, blocked_s: float = 0.010, rounds: int = ROUNDS, num_tensors: int = 4_000, thread_s: float = 4.0
) -> SavesPart:
    """Two saves of each contender in each round; the first ones took ten times as long, and were watched."""
    samples = []
    for number in range(WARM_UP, rounds + 1):
        scale = 10.0 if number == WARM_UP else 1.0
        for turn, (name, seconds) in enumerate((DURABLE_S | {THREAD: thread_s}).items()):
            alone = SaveSample(
                contender=name,
                round=number,
                turn=turn,
                beside="nothing",
                blocked_s=scale * blocked_s,
                durable_s=scale * seconds,
                persist_s=scale * (seconds - 0.5) if name == OURS else None,
                cpu_s=scale * 0.2,
            )
            beside_work = SaveSample(
                contender=name,
                round=number,
                turn=turn,
                beside="work",
                blocked_s=scale * blocked_s,
                durable_s=2 * scale * seconds,
                step_wait_s=scale * 0.004,
                peak_extra_nbytes=(30_000_000, 40_000_000) if number == WARM_UP else (),
            )
            samples += [alone] if name.startswith(RAW) else [alone, beside_work]
    return SavesPart(
        date=DATE,
        environment=MACHINE,
        world=2,
        rounds=rounds,
        state=StateSize(nbytes=nbytes, num_tensors=num_tensors, num_values=3),
        work_s=1.0,
        generations=2,
        raw_ways=RAW_WAYS,
        torch_threads=1,
        caches="dropped",
        packages={"torchsnapshot": "0.1"},
        contenders=tuple(engine_metadata(name, direct=True) for name in NAMES),
        not_possible=(NotPossible("torchsnapshot-async", "it is from 2023"),),
        summaries=summarize_saves(samples, NAMES, raw_ways=RAW_WAYS, nbytes=nbytes),
        samples=tuple(samples),
    )


def restore_part(*, nbytes: int, rounds: int = ROUNDS) -> RestorePart:
    """Restores at four fifths of a copy's speed."""
    samples = tuple(
        RestoreSample(
            round=number,
            durable=number % 2 == 1,
            restore_s=0.25,
            memcpy_s=0.2,
            moved_s=0.2,
            moved_cpu_s=0.4,
            load_s=1.0,
        )
        for number in range(1, rounds + 1)
    )
    return RestorePart(
        date=DATE,
        environment=MACHINE,
        world=2,
        rounds=rounds,
        state=StateSize(nbytes=nbytes, num_tensors=4_000, num_values=3),
        figures=summarize_restores(samples),
        samples=samples,
    )


def python_part(*, nbytes: int, rounds: int = ROUNDS) -> PythonPart:
    """A loop that a peer slows down by half, and holdfast by 2 % while it persists, with the copy by 10 %."""
    rates = {OURS: (90.0, 98.0), THREAD: (50.0, 50.0)}
    samples = tuple(
        PythonSample(
            contender=name,
            round=number,
            before_per_s=99.0,
            saving_per_s=saving,
            persisting_per_s=persisting,
            after_per_s=101.0,
            durable_s=1.0,
        )
        for number in range(WARM_UP, rounds + 1)
        for name, (saving, persisting) in rates.items()
    )
    return PythonPart(
        date=DATE,
        environment=MACHINE,
        world=1,
        rounds=rounds,
        state=StateSize(nbytes=nbytes, num_tensors=4_000, num_values=3),
        summaries=summarize_python(samples, (OURS, THREAD)),
        samples=samples,
    )


def loop_part(*, nbytes: int, loop_s: float = 8.08, rounds: int = ROUNDS) -> LoopPart:
    """Loops of 8 s without saves."""
    seconds = {NO_SAVES: 8.0, OURS: loop_s, THREAD: 10.0}
    samples = tuple(
        LoopSample(contender=name, round=number, seconds=each, lag_s=0.5)
        for number in range(WARM_UP, rounds + 1)
        for name, each in seconds.items()
    )
    return LoopPart(
        date=DATE,
        environment=MACHINE,
        world=2,
        rounds=rounds,
        state=StateSize(nbytes=nbytes, num_tensors=4_000, num_values=3),
        steps=20,
        every=10,
        tokens=512,
        summaries=summarize_loops(samples, (OURS, THREAD)),
        samples=samples,
    )
