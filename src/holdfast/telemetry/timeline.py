"""The timeline of one save: the phases of each rank over time."""

from __future__ import annotations

from html import escape
from typing import Final

from holdfast.telemetry.charts import drawing, legend
from holdfast.telemetry.rank_saves import PhaseSpan, RankSave
from holdfast.telemetry.run_figures import BLOCKED, JobSave
from holdfast.wording import duration

#: Most ranks that are shown: the slowest ones.
_MOST_RANKS: Final = 32
_LEFT, _WIDTH, _ROW, _TOP = 72, 676, 20, 4
#: The number of the colour of each phase.
_COLOURS: Final = {
    phase: number
    for phases in (("agree", "memory", "copy", "seal", "store"), ("describe", "plan", "write", "compare", "commit"))
    for number, phase in enumerate(phases)
}


def timeline(save: JobSave) -> str:
    """The timeline as a drawing with its legend."""
    slowest = sorted(save.ranks, key=lambda each: each.durable_s or 0.0, reverse=True)[:_MOST_RANKS]
    ranks = sorted(slowest, key=lambda each: each.rank)
    spans = [span for each in ranks for span in _spans(each)]
    begun_s = min((span.begun_s for span in spans), default=save.begun_s)
    length_s = max((span.begun_s + span.seconds - begun_s for span in spans), default=0.0) or 1.0
    parts: list[str] = []
    for row, each in enumerate(ranks):
        y = _TOP + row * _ROW
        parts.append(f'<text class="tick y" x="{_LEFT - 8}" y="{y + 14}">rank {each.rank}</text>')
        parts.extend(_bar(each, span, begun_s, length_s, y) for span in _spans(each))
    bottom = _TOP + len(ranks) * _ROW
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = f'text-anchor="{anchor}" x="{_LEFT + share * _WIDTH:.0f}" y="{bottom + 16}"'
        parts.append(f'<text class="tick" {at}>{escape(duration(share * length_s))}</text>')
    phases = dict.fromkeys(span.phase for span in spans if span.phase != BLOCKED)
    names = [(phase, _look(phase)) for phase in phases] + [("training is blocked", "blocked")]
    more = len(save.ranks) - len(ranks)
    note = f'<p class="note">The {len(ranks)} slowest ranks; {more} others are not shown.</p>' if more else ""
    label = f"Timeline of the save of step {save.step}"
    return drawing(label, _LEFT + _WIDTH + 12, bottom + 24, parts) + legend(names) + note


def _spans(save: RankSave) -> list[PhaseSpan]:
    return [*save.spans, *([] if save.blocked is None else [save.blocked])]


def _bar(save: RankSave, span: PhaseSpan, begun_s: float, length_s: float, y: float) -> str:
    x = _LEFT + _WIDTH * (span.begun_s - begun_s) / length_s
    width = max(_WIDTH * span.seconds / length_s, 0.8)
    is_blocked = span.phase == BLOCKED
    top, height = (y + _ROW - 5, 3) if is_blocked else (y + 1, _ROW - 7)
    told = escape(f"rank {save.rank}, {span.phase}: {duration(span.seconds)}")
    box = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}"'
    return f'<rect class="{"blocked" if is_blocked else _look(span.phase)}" {box}><title>{told}</title></rect>'


def _look(phase: str) -> str:
    return f"phase-{_COLOURS.get(phase, 5)}"
