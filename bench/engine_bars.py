"""The bars that the save engine must meet. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.engine_contenders import OURS, OURS_SYNC
from bench.engine_results import EngineResult, Goal, LoopPart, PythonPart, RestorePart, SavesPart, SaveSummary, Taken
from bench.errors import RawLimitError
from bench.results import ContenderMetadata
from bench.statistics import Spread
from bench.summary import MAX_SHARE_OF_RAW

#: The sizes that the bars hold for.
MIN_ROUNDS, MIN_WORLD, MIN_TENSORS = 7, 2, 3_000
MIN_NBYTES, MIN_PYTHON_NBYTES, MIN_LOOP_NBYTES = 2_000_000_000, 1_000_000_000, 500_000_000

BLOCKED_MS, STEP_WAIT_MS = 20.0, 5.0
SHARE_OF_RAW, SHARE_OF_MEMCPY = 0.9, 0.6
CPU_S_PER_GB = 0.2
MEMORY_MIB = 128.0
PYTHON_SLOW_DOWN, LOOP_SLOW_DOWN = 0.05, 0.03


def bars(result: EngineResult) -> Iterator[Goal]:
    """The bars that hold for the parts of `result`, with their medians."""
    if result.saves is not None:
        yield from _of_saves(result.saves)
    if result.restore is not None:
        yield from _of_restore(result.restore)
    if result.python is not None:
        yield from _of_python(result.python)
    if result.loop is not None:
        yield from _of_loop(result.loop)


def require_limit(part: SavesPart) -> None:
    """RawLimitError when a contender whose saves are durable was faster than the device; those that sync nothing may
    be."""
    for summary in part.summaries:
        share = summary.share_of_raw.median
        if share > MAX_SHARE_OF_RAW and _traits(part.contenders, summary.contender).durable != "no":
            raise RawLimitError(
                f"{summary.contender} reached {share:.2f} of the raw limit: the raw limit was not reached by the raw "
                "loop, so no share of this run counts. Add a way to `bench/raw.py`, or rounds."
            )


def _of_saves(part: SavesPart) -> Iterator[Goal]:
    found = {summary.contender: summary for summary in part.summaries}
    if not _is_full(part, world=MIN_WORLD, nbytes=MIN_NBYTES) or part.state.num_tensors < MIN_TENSORS:
        return
    if OURS in found:
        yield from _of_ours(found[OURS])
    if OURS_SYNC in found:
        share = found[OURS_SYNC].share_of_raw.median
        yield Goal("holdfast.save, of raw", share, SHARE_OF_RAW, "", at_least=True)


def _of_ours(ours: SaveSummary) -> Iterator[Goal]:
    yield Goal("blocked", 1e3 * _median(ours.blocked_s), BLOCKED_MS, "ms")
    yield Goal("step wait", 1e3 * _median(ours.step_wait_s), STEP_WAIT_MS, "ms")
    yield Goal("persist, of raw", _median(ours.persist_share_of_raw), SHARE_OF_RAW, "", at_least=True)
    yield Goal("CPU", ours.cpu_s_per_gb.median, CPU_S_PER_GB, "s/GB")
    yield Goal("extra memory per rank", ours.peak_extra_nbytes_per_rank / 2**20, MEMORY_MIB, "MiB")


def _of_restore(part: RestorePart) -> Iterator[Goal]:
    if _is_full(part, world=MIN_WORLD, nbytes=MIN_NBYTES):
        yield Goal("restore, of memcpy", part.figures.share_of_memcpy.median, SHARE_OF_MEMCPY, "", at_least=True)


def _of_python(part: PythonPart) -> Iterator[Goal]:
    if _is_full(part, world=1, nbytes=MIN_PYTHON_NBYTES):
        for summary in part.summaries:
            if summary.contender == OURS:
                figure = summary.persist_slow_down.median
                yield Goal("Python-bound rank slowed down by", 100 * figure, 100 * PYTHON_SLOW_DOWN, "%")


def _of_loop(part: LoopPart) -> Iterator[Goal]:
    if _is_full(part, world=MIN_WORLD, nbytes=MIN_LOOP_NBYTES):
        for summary in part.summaries:
            if summary.contender == OURS:
                yield Goal("loop slowed down by", 100 * summary.slow_down.median, 100 * LOOP_SLOW_DOWN, "%")


def _is_full(part: Taken, *, world: int, nbytes: int) -> bool:
    return part.rounds >= MIN_ROUNDS and part.world >= world and part.state.nbytes >= nbytes


def _traits(contenders: Sequence[ContenderMetadata], name: str) -> ContenderMetadata:
    (found,) = (each for each in contenders if each.name == name)
    return found


def _median(spread: Spread | None) -> float:
    assert spread is not None, "holdfast tells it of every save"
    return spread.median
