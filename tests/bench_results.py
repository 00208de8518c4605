"""Results of benchmarks that never ran, small enough to check by hand."""

from __future__ import annotations

from collections.abc import Mapping

from bench.contenders import LATER, SMALL_NAMES
from bench.environment import Environment
from bench.metadata import metadata
from bench.results import (
    LOAD_ONLY,
    MEASURES,
    MODEL_KINDS,
    ContenderMetadata,
    LoadResult,
    LoadSetup,
    Measure,
    NotPossible,
    Result,
    Sample,
    ScenarioResult,
    Setup,
    SmallResult,
    SmallSetup,
    StateSize,
    TimedSeries,
    ViewResult,
    WalkFigure,
    raw_name,
)
from bench.small import bars
from bench.statistics import spread
from bench.summary import summarize, summarize_small
from bench.view import NOTHING
from bench.view import bars as view_bars
from bench.walks import FIRST, GET_STATE_DICT, STATE_DICTS
from bench.walks import LATER as LATER_WALK

NBYTES = 2_000_000_000
RAW_WAYS = ("slow", "fast", "other")
MACHINE = Environment(
    holdfast="0.1",
    torch="2.13",
    python="3.11",
    kernel="6.1",
    filesystem="ext4",
    num_cpus=2,
    cpu="a CPU",
    memory_nbytes=1 << 34,
    revision="0123456789abcdef",
)
SECONDS = {
    raw_name("slow"): (2.0, 2.0, 2.0),
    raw_name("fast"): (1.0, 1.2, 1.1),
    raw_name("other"): (0.5, 1.5, 1.5),
    "dcp": (4.0, 2.4, 2.2),
}


def samples(seconds: Mapping[str, tuple[float, ...]]) -> tuple[Sample, ...]:
    """One sample per measure, contender and round; each of two ranks used 1 s of CPU and 3 MB."""
    return tuple(
        sample(measure, name, number, second)
        for measure in MEASURES
        for name, series in seconds.items()
        for number, second in enumerate(series, start=1)
    )


def sample(measure: Measure, name: str, number: int, seconds: float) -> Sample:
    return Sample(
        measure=measure,
        round=number,
        turn=0,
        contender=name,
        seconds=seconds,
        cpu_s=(1.0, 1.0),
        peak_extra_nbytes=(1_000_000, 3_000_000),
        device_nbytes=(NBYTES // 4, 3 * NBYTES // 4),
        asked_nbytes=(NBYTES, NBYTES),
    )


def result(seconds: Mapping[str, tuple[float, ...]]) -> Result:
    taken = samples(seconds)
    names = ("raw", "dcp")
    return Result(
        name="io",
        date="2030-01-02T03:04:05+00:00",
        setup=Setup(
            world=2,
            rounds=3,
            state=StateSize(nbytes=NBYTES, num_tensors=300, num_values=3),
            raw_ways=RAW_WAYS,
            torch_threads=1,
            caches="dropped",
        ),
        environment=MACHINE,
        contenders=tuple(
            ContenderMetadata(name=name, description="loops", durable="fsync", verified="no", io="") for name in names
        ),
        summaries=summarize(taken, names, raw_ways=RAW_WAYS, nbytes=NBYTES),
        samples=taken,
    )


def small_result(*, num_tensors: int = 10_000, save_s: float = 0.9, later_walk_s: float = 0.004) -> SmallResult:
    """A run over 8 ranks: dcp in one of three rounds, holdfast in all."""
    taken = samples({"dcp": (40.0,), "holdfast": (save_s, 0.8, 1.2), LATER: (0.7, 0.6, 0.5)})
    seconds = {FIRST: 0.006, LATER_WALK: later_walk_s, STATE_DICTS: 0.003, GET_STATE_DICT: 0.09}
    setup = SmallSetup(
        world=8,
        rounds=3,
        state=StateSize(nbytes=1, num_tensors=num_tensors, num_values=0),
        local_shape=(2, 16),
        torch_threads=1,
        caches="dropped",
        walk_rounds=30,
        walk_num_tensors=3_000,
    )
    summaries = summarize_small(taken, SMALL_NAMES)
    walks = tuple(
        WalkFigure(kind, name, spread([second]), (second,)) for kind in MODEL_KINDS for name, second in seconds.items()
    )
    return SmallResult(
        name="small",
        date="2030-01-02T03:04:05+00:00",
        setup=setup,
        environment=MACHINE,
        contenders=tuple(metadata(name, direct=True) for name in SMALL_NAMES),
        summaries=summaries,
        walks=walks,
        bars=tuple(bars(setup, summaries, walks)),
        samples=taken,
    )


def load_result(seconds: Mapping[str, tuple[float, ...]]) -> LoadResult:
    """A run of one scenario, which torchsnapshot cannot do. Loads read the state twice, and once from the device."""
    names = ("raw", "dcp", "torchsnapshot")
    taken = tuple(each for each in samples(seconds) if each.measure == "load")
    scenario = ScenarioResult(
        name="columns",
        title="rows -> columns",
        saved="rows, 2 ranks",
        loaded="columns, 2 ranks",
        state=StateSize(nbytes=NBYTES, num_tensors=300, num_values=3),
        not_possible=(NotPossible("torchsnapshot", "it is from 2023"),),
        summaries=summarize(taken, names[:2], raw_ways=RAW_WAYS, nbytes=NBYTES, measures=LOAD_ONLY),
        samples=taken,
    )
    setup = LoadSetup(
        rounds=3,
        raw_ways=RAW_WAYS,
        torch_threads=1,
        caches="dropped",
        packages={"torchsnapshot": "0.1"},
    )
    return LoadResult(
        name="load",
        date="2030-01-02T03:04:05+00:00",
        setup=setup,
        environment=MACHINE,
        contenders=tuple(metadata(name, direct=True) for name in names),
        scenarios=(scenario,),
    )


def view_result(*, num_tensors: int = 100_000, world: int = 8960) -> ViewResult:
    """A result of `bench view`."""
    opened = (timed("holdfast", 0.2), timed("dcp", 9.0))
    shown = (timed(NOTHING, 0.1), timed("fsdp", 0.5), timed("random-flat-cuts", 1.5))
    return ViewResult(
        name="view",
        date="2026-11-22T00:00:00+00:00",
        environment=MACHINE,
        rounds=3,
        caches="dropped",
        num_tensors=num_tensors,
        world=world,
        opened=opened,
        not_possible=(NotPossible("safetensors", "it is not installed"),),
        shown=shown,
        bars=tuple(view_bars(num_tensors, world, opened, shown)),
    )


def timed(name: str, seconds: float) -> TimedSeries:
    """Three runs around a median."""
    samples = (seconds, seconds / 2, seconds * 2)
    return TimedSeries(name, spread(samples), samples)
