"""The tables of ``bench load``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.environment import in_words
from bench.results import RAW, ContenderMetadata, LoadResult, ScenarioResult, Summary, samples_link
from bench.statistics import Spread

#: The least share of the raw limit that each scenario is to reach, and what all of them may cost at most.
SHARE_BARS = {"same": 0.9, "columns": 0.8, "grow": 0.7, "shrink": 0.7, "fsdp-tp": 0.7}
CPU_BAR_S_PER_GB = 0.35
READ_BAR = 1.02
#: The default memory budget, and 64 MiB beside it.
MEMORY_BAR_NBYTES = 128 << 20

_LABELS = {RAW: "raw limit, GB/s", "torch.save": "torch.load"}


def render_load(result: LoadResult) -> str:
    """The figures of `result` as Markdown."""
    head = (
        f"| | {' | '.join(scenario.title for scenario in result.scenarios)} |",
        f"|---|{'---|' * len(result.scenarios)}",
    )
    shares = [_row(result, contender, _share) for contender in result.contenders]
    costs = [_row(result, contender, _cost) for contender in result.contenders if contender.name != RAW]
    packages = "".join(f", {name} {version}" for name, version in result.setup.packages.items())
    where = f"{in_words(result.environment)}{packages}, {result.date[:10]}. {samples_link(result.name)}."
    ours = any(contender.name == "holdfast" for contender in result.contenders)
    judged = ("", _about_bars(result)) if ours else ()
    return "\n".join(
        (*head, *shares, "", _about_shares(result), "", *head, *costs, "", _about_costs(result), *judged, "", where)
    )


def bars(result: LoadResult) -> Iterator[tuple[str, bool]]:
    """What holdfast is to reach and did or did not, in words."""
    judged = [(scenario, scenario.summary("holdfast")) for scenario in result.scenarios]
    for scenario, ours in judged:
        least, share = SHARE_BARS.get(scenario.name), ours.share_of_raw.median
        if least is not None:
            yield f"{scenario.title}, of raw: {share:.2f} (at least {least})", share >= least
    for scenario, ours in judged:
        cpu_s, read = ours.cpu_s_per_gb.median, _median(ours.device_of_needed)
        if scenario.name == "same":
            yield f"CPU seconds per GB: {cpu_s:.2f} (at most {CPU_BAR_S_PER_GB})", cpu_s <= CPU_BAR_S_PER_GB
        if scenario.name == "replicas":
            yield f"{scenario.title}, read of needed: {read:.3f} (at most {READ_BAR})", read <= READ_BAR
    most = max(ours.peak_extra_nbytes_per_rank for _, ours in judged)
    what = f"extra memory of a rank: {most / 1e6:.0f} MB (at most {MEMORY_BAR_NBYTES / 1e6:.0f})"
    yield what, most <= MEMORY_BAR_NBYTES


def _about_bars(result: LoadResult) -> str:
    each = "; ".join(f"{what}: {'met' if met else 'missed'}" for what, met in bars(result))
    return f"Bars for holdfast: {each}."


def _about_shares(result: LoadResult) -> str:
    setup = result.setup
    (raw,) = (contender for contender in result.contenders if contender.name == RAW)
    sizes = sorted(f"{scenario.state.nbytes / 1e9:.2f}" for scenario in result.scenarios)
    return (
        f"Share of the raw limit (raw seconds / seconds, paired by round), medians of {setup.rounds} interleaved "
        f"rounds (lowest to highest). {sizes[0]} to {sizes[-1]} GB; caches are cold before every load "
        f"({setup.caches}), and every load is compared with what was saved. Raw limit: as many processes as ranks that "
        f"load read the state's bytes once, evenly, {raw.io}, best of "
        f"{ways_in_words(setup.raw_ways)}."
    )


def ways_in_words(ways: Sequence[str]) -> str:
    """The ways in which the raw limit was tried."""
    return f"{'; '.join(ways)} (threads of a rank x size of a request)"


def _about_costs(result: LoadResult) -> str:
    reasons = dict.fromkeys(
        f"{_LABELS.get(each.contender, each.contender)}: {each.reason}"
        for scenario in result.scenarios
        for each in scenario.not_possible
    )
    what = (
        "CPU seconds of all ranks per GB; extra memory of a rank, MB; bytes that all ranks read from the device per "
        "byte of the state (in brackets: that their read calls returned, from the page cache too; mapped files are "
        "none)."
    )
    return " ".join((what, *(f"Not possible for {reason}." for reason in reasons)))


def _row(result: LoadResult, contender: ContenderMetadata, cell: Callable[[Summary], str]) -> str:
    label = _LABELS.get(contender.name, contender.name) + (" (verified)" if contender.verified != "no" else "")
    return f"| {label} | {' | '.join(_cell(scenario, contender.name, cell) for scenario in result.scenarios)} |"


def _cell(scenario: ScenarioResult, name: str, cell: Callable[[Summary], str]) -> str:
    if any(each.contender == name for each in scenario.not_possible):
        return "not possible"
    return cell(scenario.summary(name))


def _share(summary: Summary) -> str:
    return (summary.gb_per_s if summary.contender == RAW else summary.share_of_raw).text()


def _cost(summary: Summary) -> str:
    read = f"{_median(summary.device_of_needed):.2f} ({_median(summary.asked_of_needed):.2f})"
    return f"{summary.cpu_s_per_gb.median:.2f}; {summary.peak_extra_nbytes_per_rank / 1e6:.0f}; {read}"


def _median(spread: Spread | None) -> float:
    assert spread is not None, "a load counts what it reads"
    return spread.median
