"""The tables of ``bench engine``."""

from __future__ import annotations

from collections.abc import Iterator

from bench.engine_contenders import OURS
from bench.engine_results import (
    NO_SAVES,
    EngineResult,
    LoopPart,
    PythonPart,
    RestorePart,
    SavesPart,
    SaveSummary,
)
from bench.environment import in_words
from bench.load_table import ways_in_words
from bench.results import RAW, samples_link
from bench.statistics import Spread

_NO_FIGURE = "-"


def render_engine(result: EngineResult) -> str:
    """The figures of `result` as Markdown: of each part that was measured."""
    lines: list[str] = []
    if result.saves is not None:
        lines += [*_save_rows(result.saves), "", _about_saves(result.saves), ""]
    if result.restore is not None:
        lines += [*_restore_rows(result.restore), "", _about_restore(result.restore), ""]
    if result.python is not None or result.loop is not None:
        lines += [*_slow_down_rows(result.python, result.loop), "", *_about_slow_downs(result.python, result.loop)]
    if result.bars:
        lines += [f"Bars for holdfast: {'; '.join(bar.text() for bar in result.bars)}.", ""]
    return "\n".join((*lines, _where(result)))


def _save_rows(part: SavesPart) -> Iterator[str]:
    yield "| | save blocks, ms | next step waits, ms | durable after, s | of raw | CPU, s/GB | memory per rank, MB |"
    yield "|---|---|---|---|---|---|---|"
    for summary in part.summaries:
        label = "raw limit" if summary.contender == RAW else summary.contender
        cells = (label, *_waits(summary), summary.durable_s.text(), *_costs(summary))
        yield f"| {' | '.join(cells)} |"


def _waits(summary: SaveSummary) -> tuple[str, str]:
    return _ms(summary.blocked_s), _ms(summary.step_wait_s)


def _costs(summary: SaveSummary) -> tuple[str, str, str]:
    if summary.contender == RAW:
        return "1", f"{summary.cpu_s_per_gb.median:.2f}", _NO_FIGURE
    memory = f"{summary.peak_extra_nbytes_per_rank / 1e6:.0f}"
    return summary.share_of_raw.text(), f"{summary.cpu_s_per_gb.median:.2f}", memory


def _about_saves(part: SavesPart) -> str:
    first = ", ".join(
        f"{summary.contender} {summary.first_blocked_s:.2f}" for summary in part.summaries if summary.contender != RAW
    )
    synced = "; ".join(f"{contender.name}: {contender.durable}" for contender in part.contenders)
    (raw,) = (summary for summary in part.summaries if summary.contender == RAW)
    ours = [summary for summary in part.summaries if summary.contender == OURS]
    persisting = f" (holdfast, from the end of the copy: {_text(ours[0].persist_share_of_raw)})" if ours else ""
    absent = "".join(f" Not possible for {each.contender}: {each.reason}." for each in part.not_possible)
    return (
        f"{part.state.nbytes / 1e9:.2f} GB ({part.state.num_tensors:,} tensors), {part.world} ranks, medians of "
        f"{part.rounds} interleaved rounds (lowest to highest) after a warm-up. Blocked: the call of save, beside "
        f"{part.work_s:g} s of work per step. The next step waits as long as it takes more than one without a save. "
        "Durable, shares and CPU (of all processes) are of saves beside which ranks do nothing. Of raw: raw seconds / "
        f"seconds, paired by round{persisting}; raw limit: best of {ways_in_words(part.raw_ways)} ({raw.raw_way}). "
        f"Memory is the proportional set size of all processes beyond what there was before a contender's first save; "
        f"holdfast has {part.generations} generations of the state in the memory of the node beside it. What durable "
        f"means: {synced}. The first save of each blocked for, s: {first}. Every contender's last save is loaded and "
        f"compared with what was saved.{absent}"
    )


def _restore_rows(part: RestorePart) -> Iterator[str]:
    figures = part.figures
    yield "| after SIGKILL of all ranks | s | of memcpy |"
    yield "|---|---|---|"
    yield f"| restore from node memory (verified) | {figures.restore_s.text()} | {figures.share_of_memcpy.text()} |"
    moved = f"{figures.moved_s.text()} | {figures.moved_share_of_memcpy.text()}"
    yield f"| copy of each tensor, with its digests, and no more | {moved} |"
    yield f"| memcpy of as many bytes | {figures.memcpy_s.text()} | 1 |"
    yield f"| load from storage, cold caches (verified) | {figures.load_s.text()} | {_NO_FIGURE} |"


def _about_restore(part: RestorePart) -> str:
    moved_cpu_s = part.figures.moved_cpu_s.median / (part.state.nbytes / 1e9)
    return (
        f"{part.state.nbytes / 1e9:.2f} GB, {part.world} ranks, medians of {part.rounds} rounds (lowest to highest). "
        "In each, ranks that have saved are killed, and new ones have everything but the state when the clock starts. "
        "The memcpy is of one block from touched memory to touched memory, by all ranks at once, best of three, and so "
        f"is the copy of each tensor; with digests it takes {moved_cpu_s:.2f} s of CPU per GB, of a save as of a "
        "restore. Every state is compared with what was saved."
    )


def _slow_down_rows(python: PythonPart | None, loop: LoopPart | None) -> Iterator[str]:
    yield "| slowed down by, % | loop of Python, while persisting | with the copy | training loop, all cores busy |"
    yield "|---|---|---|---|"
    counted = {each.contender: each for each in python.summaries} if python else {}
    looped = {each.contender: each for each in loop.summaries} if loop else {}
    for name in dict.fromkeys((*counted, *looped)):
        if name != NO_SAVES:
            spreads = (
                counted[name].persist_slow_down if name in counted else None,
                counted[name].slow_down if name in counted else None,
                looped[name].slow_down if name in looped else None,
            )
            yield f"| {name} | {' | '.join(_percent(each) for each in spreads)} |"


def _about_slow_downs(python: PythonPart | None, loop: LoopPart | None) -> Iterator[str]:
    if python is not None:
        yield (
            f"Python: one rank counts beside a save of {python.state.nbytes / 1e9:.2f} GB, with a core to spare; its "
            f"rate against that just before and after, medians of {python.rounds} rounds."
        )
        yield ""
    if loop is not None:
        plain = next(each for each in loop.summaries if each.contender == NO_SAVES)
        lags = ", ".join(
            f"{each.contender} {each.lag_s.median:.2f}" for each in loop.summaries if each.contender != NO_SAVES
        )
        yield (
            f"Training loop: {loop.world} ranks with the arithmetic of {loop.tokens} tokens each per step, "
            f"{loop.steps} steps in {plain.seconds.text()} s without saves, and with a save of "
            f"{loop.state.nbytes / 1e9:.2f} GB every {loop.every} steps; medians of {loop.rounds} interleaved rounds. "
            f"`{RAW}` only writes as many bytes. The last save was durable after the end of the loop, s: {lags}."
        )
        yield ""


def _where(result: EngineResult) -> str:
    parts = [part for part in (result.saves, result.restore, result.python, result.loop) if part is not None]
    machines = dict.fromkeys(f"{in_words(part.environment)}, {part.date[:10]}" for part in parts)
    packages = "".join(f", {name} {found}" for name, found in (result.saves.packages if result.saves else {}).items())
    return f"{'; '.join(machines)}{packages}. {samples_link(result.name)}."


def _ms(spread: Spread | None) -> str:
    return _NO_FIGURE if spread is None else spread.text(1, scale=1e3)


def _percent(spread: Spread | None) -> str:
    return _NO_FIGURE if spread is None else spread.text(1, scale=100)


def _text(spread: Spread | None) -> str:
    return _NO_FIGURE if spread is None else spread.text()
