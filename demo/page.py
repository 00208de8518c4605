"""The page of ``python -m demo.nodes``: who holds whose copies, who sent what to whom, and where the time went. It is
one HTML file with its pictures in it, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import sqrt
from typing import Final, NamedTuple

from demo.promises import Promise

_WIDTH, _BOX_WIDTH, _BLOCK_HEIGHT, _ARC = 980, 196, 30, 34
#: Smaller flows are messages, and have no arrow.
_SMALLEST_SHARE: Final = 0.02

_STYLE: Final = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1c2430; --soft: #667080; --line: #c9cfd8; --box: #f5f7fa;
  --own: #1f5fa8; --copy: #d97706; --lost: #c8232c; --good: #1e7a46; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --ink: #e6e9ee; --soft: #98a2b3; --line: #3b4454;
  --box: #1d232d; --own: #3b82d6; --copy: #e08a1e; --lost: #e5555d; --good: #3fa66a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 1000px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem; } p { margin: .2rem 0 .8rem; }
p, td, th { color: var(--ink); } .soft { color: var(--soft); }
svg { width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .white { fill: #ffffff; } svg .small { font-size: 12px; fill: var(--soft); }
svg .label { paint-order: stroke; stroke: var(--back); stroke-width: 4px; font-weight: 600; }
.box { fill: var(--box); stroke: var(--line); } .own { fill: var(--own); } .copy { fill: var(--copy); }
.gone { fill: none; stroke: var(--lost); stroke-dasharray: 5 4; } .cross { stroke: var(--lost); stroke-width: 3; }
.arrow { fill: none; stroke: var(--ink); opacity: .75; } .tip { fill: var(--ink); }
.unread { opacity: .3; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } td.number, th.number { text-align: right; }
td.kept { color: var(--good); font-weight: 600; } td.broken { color: var(--lost); font-weight: 600; }
.bar td { border: 0; padding: .15rem .8rem .15rem 0; } .bar .track { width: 55%; }
.bar .fill { display: block; height: 14px; background: var(--soft); border-radius: 2px; min-width: 2px; }
.bar .holdfast .fill { background: var(--own); }
"""


class Block(NamedTuple):
    """A snapshot in the memory of a node: its label, and whether it is a copy of another node's. A restore did not read
    it if it is not `is_used`."""

    label: str
    is_copy: bool
    is_used: bool = True


class NodeBox(NamedTuple):
    """A node in a picture: its name and address, whether it is lost, and the snapshots in its memory."""

    name: str
    address: str
    blocks: Sequence[Block]
    is_lost: bool = False


class Picture(NamedTuple):
    """A picture of the nodes, with an arrow for the bytes that each sent to each other one, by address."""

    title: str
    text: str
    nodes: Sequence[NodeBox]
    sent: Mapping[tuple[str, str], int]


class Phase(NamedTuple):
    """A phase between the loss and the next step. `is_own` says that it is holdfast's."""

    name: str
    seconds: float
    is_own: bool = False


class Story(NamedTuple):
    """The contents of the page."""

    title: str
    text: str
    pictures: Sequence[Picture]
    phases: Sequence[Phase]
    promises: Sequence[Promise]
    note: str


def page_of(story: Story) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(story.title)}</h1>", f"<p>{escape(story.text)}</p>"]
    for picture in story.pictures:
        parts += [f"<h2>{escape(picture.title)}</h2>", f"<p>{escape(picture.text)}</p>", drawn(picture)]
    parts += ["<h2>What each node sent</h2>", _sent_table(story.pictures), f'<p class="soft">{escape(story.note)}</p>']
    total_s = sum(phase.seconds for phase in story.phases)
    own_s = sum(phase.seconds for phase in story.phases if phase.is_own)
    told = f"{total_s:.1f} s, of which holdfast took {own_s:.1f} s (blue)."
    parts += ["<h2>From the loss to the next step</h2>", f"<p>{told}</p>", _phase_table(story.phases)]
    parts += ["<h2>What holdfast promised, and what was seen</h2>", _promise_table(story.promises)]
    head = f'<meta charset="utf-8"><title>{escape(story.title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def drawn(picture: Picture) -> str:
    """The picture as SVG. Arrows to the right go above the nodes, arrows to the left below them."""
    nodes = picture.nodes
    columns = {node.address: number for number, node in enumerate(nodes)}
    largest = max(picture.sent.values(), default=0)
    flows = [
        (columns[source], columns[target], nbytes)
        for (source, target), nbytes in sorted(picture.sent.items())
        if {source, target} <= columns.keys() and nbytes > _SMALLEST_SHARE * largest
    ]
    spans = [source - target for source, target, _ in flows]
    above = 30 + _ARC * max((-span for span in spans), default=0)
    below = 30 + _ARC * max(spans, default=0)
    box_height = 52 + (_BLOCK_HEIGHT + 6) * max(len(node.blocks) for node in nodes)
    parts = [_box(node, _left(nodes, number), above, box_height) for number, node in enumerate(nodes)]
    for source, target, nbytes in flows:
        y, up = (above, -1) if source < target else (above + box_height, 1)
        parts.append(_arrow(nodes, source, target, y=y, up=up, nbytes=nbytes, largest=largest))
    told = ", ".join(f"{nodes[a].name} sent {_megabytes(n)} to {nodes[b].name}" for a, b, n in flows) or "nothing sent"
    size = f'viewBox="0 0 {_WIDTH} {above + box_height + below}"'
    return f'<svg {size} role="img" aria-label="{escape(told)}">{"".join(parts)}</svg>'


def _left(nodes: Sequence[NodeBox], number: int) -> float:
    gap = (_WIDTH - _BOX_WIDTH * len(nodes)) / len(nodes)
    return gap / 2 + number * (_BOX_WIDTH + gap)


def _box(node: NodeBox, x: float, y: float, height: float) -> str:
    kind = "gone" if node.is_lost else "box"
    parts = [f'<rect class="{kind}" x="{x:.0f}" y="{y}" width="{_BOX_WIDTH}" height="{height}" rx="8"/>']
    parts.append(f'<text x="{x + 12:.0f}" y="{y + 22}" font-weight="600">{escape(node.name)}</text>')
    parts.append(f'<text x="{x + 12:.0f}" y="{y + 39}" class="small">{escape(node.address)}</text>')
    for number, block in enumerate(node.blocks):
        top, kind = y + 48 + number * (_BLOCK_HEIGHT + 6), "copy" if block.is_copy else "own"
        kind += "" if block.is_used else " unread"
        shape = f'x="{x + 10:.0f}" y="{top}" width="{_BOX_WIDTH - 20}" height="{_BLOCK_HEIGHT}" rx="4"'
        parts.append(f'<rect class="{kind}" {shape}/>')
        parts.append(f'<text class="white" x="{x + 18:.0f}" y="{top + 20}">{escape(block.label)}</text>')
    if node.is_lost:
        right, bottom = x + _BOX_WIDTH - 14, y + height - 14
        parts.append(f'<path class="cross" d="M{x + 14:.0f} {y + 56}L{right:.0f} {bottom}"/>')
        parts.append(f'<path class="cross" d="M{right:.0f} {y + 56}L{x + 14:.0f} {bottom}"/>')
    return "".join(parts)


def _arrow(nodes: Sequence[NodeBox], source: int, target: int, *, y: float, up: int, nbytes: int, largest: int) -> str:
    """An arc from the edge at height `y` of one node to that of another."""
    # Arrows that begin and end at one node must not lie on each other.
    side = 1 if source < target else -1
    x1 = _left(nodes, source) + _BOX_WIDTH / 2 + side * 14 * abs(target - source)
    x2 = _left(nodes, target) + _BOX_WIDTH / 2 - side * 14 * abs(target - source)
    top, middle = y + up * _ARC * abs(target - source), (x1 + x2) / 2
    width = 1.5 + 4 * sqrt(nbytes / largest)
    end = y + up * 9
    control = y + up * (_ARC * abs(target - source) - 9) * 4 / 3 + up * 9
    label_y = top + (17 if up > 0 else -8)
    tip = f"M{x2:.0f} {y + up * 1}l-6 {up * 10}l12 0z"
    curve = f"M{x1:.0f} {y}C{x1:.0f} {control:.0f} {x2:.0f} {control:.0f} {x2:.0f} {end}"
    return (
        f'<path class="arrow" stroke-width="{width:.1f}" d="{curve}"/><path class="tip" d="{tip}"/>'
        f'<text class="label" text-anchor="middle" x="{middle:.0f}" y="{label_y}">{_megabytes(nbytes)}</text>'
    )


def _sent_table(pictures: Iterable[Picture]) -> str:
    columns = [(picture, {node.address: node.name for node in picture.nodes}) for picture in pictures]
    names = sorted({name for _, known in columns for name in known.values()})
    heads = "".join(f'<th class="number">{escape(picture.title)}</th>' for picture, _ in columns)
    rows = []
    for name in names:
        cells = "".join(f'<td class="number">{_sent_by(name, picture, known)}</td>' for picture, known in columns)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    return f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>"


def _sent_by(name: str, picture: Picture, known: Mapping[str, str]) -> str:
    if any(node.name == name and node.is_lost for node in picture.nodes) or name not in known.values():
        return "lost"
    return _megabytes(sum(nbytes for (source, _), nbytes in picture.sent.items() if known.get(source) == name))


def _phase_table(phases: Sequence[Phase]) -> str:
    longest_s = max(phase.seconds for phase in phases)
    rows = []
    for phase in phases:
        fill = f'<span class="fill" style="width:{100 * phase.seconds / longest_s:.1f}%"></span>'
        kind = ' class="holdfast"' if phase.is_own else ""
        cells = f'<td>{escape(phase.name)}</td><td class="number">{phase.seconds:.2f} s</td>'
        rows.append(f'<tr{kind}>{cells}<td class="track">{fill}</td></tr>')
    return f'<table class="bar">{"".join(rows)}</table>'


def _promise_table(promises: Iterable[Promise]) -> str:
    rows = []
    for promise in promises:
        mark = '<td class="kept">kept</td>' if promise.kept else '<td class="broken">BROKEN</td>'
        rows.append(f'<tr>{mark}<td>{escape(promise.text)}</td><td class="soft">{escape(promise.seen)}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
