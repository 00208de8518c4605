"""From samples to figures, and the rule that they must pass."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.errors import RawLimitError
from bench.results import (
    LOAD_ONLY,
    MEASURES,
    RAW,
    WARM_UP,
    LoadResult,
    Measure,
    Result,
    Sample,
    SmallSummary,
    Summary,
    raw_name,
)
from bench.statistics import fastest, paired_ratios, spread

#: A contender cannot be faster than the device; above this share the raw loop was not at the limit.
MAX_SHARE_OF_RAW = 1.05


def summarize(
    samples: Sequence[Sample],
    contenders: Sequence[str],
    *,
    raw_ways: Sequence[str],
    nbytes: int,
    measures: Sequence[Measure] = MEASURES,
) -> tuple[Summary, ...]:
    """One summary per measure and contender, on a state of `nbytes`.

    The raw limit of a measure is the fastest of `raw_ways` by the median over all rounds.
    """
    summaries: list[Summary] = []
    for measure in measures:
        of_raw = {way: _series(samples, measure, raw_name(way)) for way in raw_ways}
        best = fastest({way: [sample.seconds for sample in series] for way, series in of_raw.items()})
        for name in contenders:
            entrant = raw_name(best) if name == RAW else name
            series, watched = _series(samples, measure, entrant), _of(samples, measure, entrant)
            summary = _summary(series, watched, name=name, raw=of_raw[best], nbytes=nbytes)
            summaries.append(msgspec.structs.replace(summary, raw_way=best) if name == RAW else summary)
    return tuple(summaries)


def summarize_small(samples: Sequence[Sample], contenders: Sequence[str]) -> tuple[SmallSummary, ...]:
    """One summary per measure and contender."""
    summaries: list[SmallSummary] = []
    for measure in MEASURES:
        for name in contenders:
            series = _series(samples, measure, name)
            summary = SmallSummary(
                measure=measure,
                contender=name,
                num_rounds=len(series),
                seconds=spread([sample.seconds for sample in series]),
                cpu_s=spread([sum(sample.cpu_s) for sample in series]),
            )
            summaries.append(summary)
    return tuple(summaries)


def require_raw_limit(summaries: Sequence[Summary]) -> None:
    """RawLimitError when a contender's median share of the raw limit is above `MAX_SHARE_OF_RAW`."""
    for summary in summaries:
        share = summary.share_of_raw.median
        if share > MAX_SHARE_OF_RAW:
            raise RawLimitError(
                f"{summary.contender} reached {share:.2f} of the raw limit in {summary.measure}: the raw limit was "
                f"not reached by the raw loop, so no figure of this run counts. Add a way to `bench/raw.py`, or rounds."
            )


def require_valid(result: Result) -> None:
    """`require_raw_limit` for a whole result, from its samples rather than its summaries."""
    names = [contender.name for contender in result.contenders]
    setup = result.setup
    require_raw_limit(summarize(result.samples, names, raw_ways=setup.raw_ways, nbytes=setup.state.nbytes))


def require_valid_load(result: LoadResult) -> None:
    """`require_valid` for every scenario of `result`."""
    for scenario in result.scenarios:
        names = [summary.contender for summary in scenario.summaries]
        ways, nbytes = result.setup.raw_ways, scenario.state.nbytes
        require_raw_limit(summarize(scenario.samples, names, raw_ways=ways, nbytes=nbytes, measures=LOAD_ONLY))


def _series(samples: Sequence[Sample], measure: Measure, entrant: str) -> list[Sample]:
    """The samples of `entrant` in order of rounds, without the warm-up."""
    found = _of(samples, measure, entrant)
    return sorted((sample for sample in found if sample.round != WARM_UP), key=lambda sample: sample.round)


def _of(samples: Sequence[Sample], measure: Measure, entrant: str) -> list[Sample]:
    return [sample for sample in samples if (sample.measure, sample.contender) == (measure, entrant)]


def _peak_nbytes(samples: Sequence[Sample]) -> int:
    """The most memory of any rank in those of `samples` that watched it."""
    return max((peak for sample in samples for peak in sample.peak_extra_nbytes if peak is not None), default=0)


def _summary(
    series: Sequence[Sample], watched: Sequence[Sample], *, name: str, raw: Sequence[Sample], nbytes: int
) -> Summary:
    seconds = [sample.seconds for sample in series]
    shares = paired_ratios([sample.seconds for sample in raw], seconds)
    return Summary(
        measure=series[0].measure,
        contender=name,
        seconds=spread(seconds),
        gb_per_s=spread([nbytes / 1e9 / second for second in seconds]),
        share_of_raw=spread(shares),
        shares_of_raw=shares,
        cpu_s_per_gb=spread([sum(sample.cpu_s) / (nbytes / 1e9) for sample in series]),
        peak_extra_nbytes_per_rank=_peak_nbytes(watched),
        device_of_needed=spread([sum(sample.device_nbytes) / nbytes for sample in series]),
        asked_of_needed=spread([sum(sample.asked_nbytes) / nbytes for sample in series]),
    )
