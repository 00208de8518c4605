"""The tables of ``bench small``."""

from __future__ import annotations

from bench import contenders, walks
from bench.environment import in_words
from bench.results import MEASURES, MODEL_KINDS, Bar, ContenderMetadata, SmallResult, samples_link

_LABELS = {
    "dcp": "dcp",
    "holdfast": "holdfast, first save into a new run",
    contenders.LATER: "holdfast, later saves into one run",
}
_WALK_LABELS = {
    walks.LATER: "holdfast, later save",
    walks.FIRST: "holdfast, first save",
    walks.STATE_DICTS: "`model.state_dict()` and `optimizer.state_dict()`",
    walks.GET_STATE_DICT: "dcp `get_state_dict`",
}


def render_small(result: SmallResult) -> str:
    """The figures of `result` as Markdown."""
    setup = result.setup
    rows, width = setup.local_shape
    peer = result.summary("save", "dcp")
    durable = "; ".join(f"{contender.name}: {contender.durable}" for contender in result.contenders[:2])
    how = (
        f"{setup.state.num_tensors:,} DTensors (Shard(0), float32, {rows * setup.world} x {width}), {setup.world} "
        f"ranks, gloo; from the first rank's start to the last rank's end. Medians of {setup.rounds} interleaved "
        f"rounds (lowest to highest) after a warm-up; dcp takes so long that it takes part in {peer.num_rounds} of "
        f"them, without a warm-up. Saves are durable ({durable}), caches are cold ({setup.caches}), and every load "
        "is compared with what was saved."
    )
    walk = (
        f"Walks: {setup.walk_num_tensors:,} tensors (parameters and AdamW's slots), one rank, medians of "
        f"{setup.walk_rounds}, Python's garbage collector paused for all. {in_words(result.environment)}, "
        f"{result.date[:10]}. {samples_link(result.name)}."
    )
    return "\n".join((*_save_rows(result), "", how, "", *_walk_rows(result), "", *bar_lines(result.bars), walk))


def _save_rows(result: SmallResult) -> tuple[str, ...]:
    return (
        f"| {result.setup.state.num_tensors:,} tensors | save, s | load, s | CPU of all ranks, s save, load |",
        "|---|---|---|---|",
        *(_save_row(result, contender) for contender in result.contenders),
    )


def _save_row(result: SmallResult, contender: ContenderMetadata) -> str:
    summaries = [result.summary(measure, contender.name) for measure in MEASURES]
    verified = " (loads verified)" if contender.verified != "no" else ""
    times = [
        summary.seconds.text() if summary.num_rounds > 1 else f"{summary.seconds.median:.2f}" for summary in summaries
    ]
    cpu = ", ".join(f"{summary.cpu_s.median:.1f}" for summary in summaries)
    return f"| {_LABELS[contender.name]}{verified} | {' | '.join(times)} | {cpu} |"


def _walk_rows(result: SmallResult) -> tuple[str, ...]:
    head = f"| finding {result.setup.walk_num_tensors:,} tensors, ms |"
    rows = [
        f"| {label} | {' | '.join(result.walk(kind, name).seconds.text(1, scale=1e3) for kind in MODEL_KINDS)} |"
        for name, label in _WALK_LABELS.items()
    ]
    return (f"{head} plain | FSDP2 |", "|---|---|---|", *rows)


def bar_lines(bars: tuple[Bar, ...]) -> tuple[str, ...]:
    """Which of `bars` were met, as a paragraph; nothing where there are none."""
    if not bars:
        return ()
    each = "; ".join(f"{bar.what} {_amount(bar.seconds)}: {'met' if bar.met else 'missed'}" for bar in bars)
    most = " and ".join(_amount(most_s) for most_s in sorted({bar.most_s for bar in bars}, reverse=True))
    return (f"Bars ({most}): {each}.", "")


def _amount(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
