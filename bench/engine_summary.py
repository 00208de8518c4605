"""From the samples of ``bench engine`` to its figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from bench.engine_results import (
    NO_SAVES,
    Beside,
    LoopSample,
    LoopSummary,
    PythonSample,
    PythonSummary,
    RestoreFigures,
    RestoreSample,
    SaveSample,
    SaveSummary,
)
from bench.results import RAW, WARM_UP, raw_name
from bench.statistics import Spread, fastest, paired_ratios, spread

S = TypeVar("S", SaveSample, PythonSample, LoopSample)


def summarize_saves(
    samples: Sequence[SaveSample], contenders: Sequence[str], *, raw_ways: Sequence[str], nbytes: int
) -> tuple[SaveSummary, ...]:
    """One summary per contender, on a state of `nbytes`; the raw limit is the fastest of `raw_ways` by the median."""
    of_raw = {way: [sample.durable_s for sample in _alone(samples, raw_name(way))] for way in raw_ways}
    best = fastest(of_raw)
    summaries = []
    for name in contenders:
        entrant = raw_name(best) if name == RAW else name
        summary = _summary(samples, entrant, raw=of_raw[best], gb=nbytes / 1e9)
        way = best if name == RAW else None
        summaries.append(msgspec.structs.replace(summary, contender=name, raw_way=way))
    return tuple(summaries)


def summarize_restores(samples: Sequence[RestoreSample]) -> RestoreFigures:
    """The figures of all restores."""
    restore_s, memcpy_s = [sample.restore_s for sample in samples], [sample.memcpy_s for sample in samples]
    moved_s = [sample.moved_s for sample in samples]
    return RestoreFigures(
        restore_s=spread(restore_s),
        memcpy_s=spread(memcpy_s),
        moved_s=spread(moved_s),
        moved_cpu_s=spread([sample.moved_cpu_s for sample in samples]),
        load_s=spread([sample.load_s for sample in samples]),
        share_of_memcpy=spread(paired_ratios(memcpy_s, restore_s)),
        moved_share_of_memcpy=spread(paired_ratios(memcpy_s, moved_s)),
    )


def summarize_python(samples: Sequence[PythonSample], contenders: Sequence[str]) -> tuple[PythonSummary, ...]:
    """One summary per contender."""
    summaries = []
    for name in contenders:
        series = _timed(samples, name)
        calm = [(sample.before_per_s + sample.after_per_s) / 2 for sample in series]
        saving = paired_ratios([sample.saving_per_s for sample in series], calm)
        persisting = paired_ratios([sample.persisting_per_s for sample in series], calm)
        summaries.append(
            PythonSummary(
                contender=name,
                slow_down=spread([1 - ratio for ratio in saving]),
                persist_slow_down=spread([1 - ratio for ratio in persisting]),
                durable_s=spread([sample.durable_s for sample in series]),
            )
        )
    return tuple(summaries)


def summarize_loops(samples: Sequence[LoopSample], contenders: Sequence[str]) -> tuple[LoopSummary, ...]:
    """One summary of the loop without saves, and one per contender."""
    plain = [sample.seconds for sample in _timed(samples, NO_SAVES)]
    summaries = []
    for name in (NO_SAVES, *contenders):
        series = _timed(samples, name)
        seconds = [sample.seconds for sample in series]
        summaries.append(
            LoopSummary(
                contender=name,
                seconds=spread(seconds),
                slow_down=spread([ratio - 1 for ratio in paired_ratios(seconds, plain)]),
                lag_s=spread([sample.lag_s for sample in series]),
            )
        )
    return tuple(summaries)


def _summary(samples: Sequence[SaveSample], name: str, *, raw: Sequence[float], gb: float) -> SaveSummary:
    alone, beside_work = _alone(samples, name), _of_kind(_timed(samples, name), "work")
    warm_up = [sample for sample in samples if sample.contender == name and sample.round == WARM_UP]
    durable_s = [sample.durable_s for sample in alone]
    persist_s = [sample.persist_s for sample in alone if sample.persist_s is not None]
    return SaveSummary(
        contender=name,
        first_blocked_s=_of_kind(warm_up, "nothing")[0].blocked_s,
        durable_s=spread(durable_s),
        share_of_raw=spread(paired_ratios(raw, durable_s)),
        cpu_s_per_gb=spread([sample.cpu_s / gb for sample in alone if sample.cpu_s is not None]),
        peak_extra_nbytes_per_rank=max((peak for sample in warm_up for peak in sample.peak_extra_nbytes), default=0),
        blocked_s=_spread_if_any([sample.blocked_s for sample in beside_work]),
        step_wait_s=_spread_if_any([sample.step_wait_s for sample in beside_work if sample.step_wait_s is not None]),
        durable_beside_work_s=_spread_if_any([sample.durable_s for sample in beside_work]),
        persist_share_of_raw=spread(paired_ratios(raw, persist_s)) if persist_s else None,
    )


def _alone(samples: Sequence[SaveSample], name: str) -> list[SaveSample]:
    return _of_kind(_timed(samples, name), "nothing")


def _of_kind(samples: Sequence[SaveSample], beside: Beside) -> list[SaveSample]:
    return [sample for sample in samples if sample.beside == beside]


def _timed(samples: Sequence[S], name: str) -> list[S]:
    """The samples of `name` in order of rounds, without the warm-up."""
    found = [sample for sample in samples if sample.contender == name and sample.round != WARM_UP]
    return sorted(found, key=lambda sample: sample.round)


def _spread_if_any(series: Sequence[float]) -> Spread | None:
    return spread(series) if series else None
