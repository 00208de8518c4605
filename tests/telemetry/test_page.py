"""The page about a run: it holds what it shows, loads nothing, and a browser shows it."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest

from holdfast.telemetry.goodput_ledger import RunLedger
from holdfast.telemetry.page import page
from holdfast.telemetry.rank_saves import JobEvents, job_events
from tests.support.browser import found_by, needs_browser, screenshot
from tests.support.recorded_history import picture_of
from tests.support.recorded_job import PHASES, recorded_job

#: Elements without an end.
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Nesting(HTMLParser):
    """Checks that elements end in the order in which they begin, and notes what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Nesting:
    nesting = Nesting()
    nesting.feed(text)
    nesting.close()
    assert nesting.open == []
    return nesting


def test_the_page_loads_nothing() -> None:
    text = page(picture_of())
    assert parsed(text).loads == []
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_the_page_has_every_part() -> None:
    text = page(picture_of())
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles == [
        "Ranks and phases",
        "Timelines",
        "Time until durable",
        "Training blocked",
        "Step time",
        "Age of the recovery point",
        "Sizes",
        "Ledger",
        "Ledger of time",
    ]
    tiles = dict(re.findall("<li><b>(.*?)</b><span>(.*?)</span></li>", text))
    assert tiles["step 299"] == "newest checkpoint"
    assert tiles["60 s"] == "age of its state"
    assert tiles["4 ms"] == "training blocked by a save (median)"
    assert tiles["1.26 s"] == "until a save is durable (median)"
    assert tiles["+10.0 %"] == "longer step time while a save is under way (120 steps)"


def test_the_slow_rank_stands_out_in_the_heat_map() -> None:
    text = page(picture_of(slow_rank=2))
    strong = re.findall(r'<title>([^<]*)</title><rect class="heat-5"', text)
    assert strong == ["rank 2, copy: 200 ms (middle rank: 50 ms)"]
    assert re.findall(r'<rect class="heat-5"', page(picture_of())) == []


def test_text_from_files_cannot_act_in_the_page() -> None:
    picture = picture_of(num_ranks=1, num_saves=1)
    records = [
        msgspec.structs.replace(each, event="SaveFailed", message="<script>alert(1)</script>\x1b[2J")
        if each.event == "SaveCommitted"
        else msgspec.structs.replace(each, place="<b>1.9</b>", seconds={"<i>": 1.0})
        for each in recorded_job(num_ranks=1, num_saves=1)
    ]
    text = page(dataclasses.replace(picture, job=job_events(records), run="/runs/<img src=x>"))
    assert parsed(text).loads == []
    assert "<script" not in text
    assert "<b>1.9" not in text
    assert "<i>" not in text
    assert "\x1b" not in text


def test_a_run_without_events_has_a_page_with_its_history() -> None:
    picture = dataclasses.replace(
        picture_of(), job=JobEvents([], [], [], 0), ledger=RunLedger([]), remarks=["no events are recorded."]
    )
    text = page(picture)
    parsed(text)
    assert re.findall("<h2>(.*?)</h2>", text) == ["Sizes", "Ledger"]
    assert '<p class="alarm">no events are recorded.</p>' in text


def test_a_run_without_checkpoints_has_a_page() -> None:
    text = page(picture_of(num_saves=0))
    parsed(text)
    assert "<b>none</b><span>newest checkpoint</span>" in text


def test_pages_of_large_jobs_are_small_and_show_the_slowest_ranks() -> None:
    text = page(picture_of(num_ranks=1000, num_saves=12, slow_rank=501))
    parsed(text)
    assert len(text) < 1_000_000
    assert "Each column is 8 ranks" in text
    assert "rank 501, copy: 200 ms" in text
    assert "The 32 slowest ranks; 968 others are not shown." in text


def test_long_histories_are_thinned() -> None:
    text = page(picture_of(num_ranks=1, num_saves=3000))
    assert len(text) < 1_000_000
    assert "older rows are not shown" in text


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(page(picture_of(num_ranks=8, num_saves=12, slow_rank=5)))
    return path


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_the_page_without_a_scroll_to_the_side(stored: Path) -> None:
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert found_by(stored, too_wide) == "0"
    assert found_by(stored, too_wide, width=500) == "0"
    assert found_by(stored, "performance.getEntriesByType('resource').length") == "0"


@pytest.mark.slow
@needs_browser
def test_the_colours_of_the_heat_map_differ_in_lightness_in_both_schemes(stored: Path) -> None:
    """Readers who cannot tell colours apart tell lightness apart."""
    lightness = (
        "[0,1,2,3,4,5].map(n => getComputedStyle(document.querySelector('.swatch.heat-' + n)).backgroundColor"
        ".match(/\\d+/g).slice(0, 3).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0)"
        ".toFixed(0)).join(' ')"
    )
    light = [int(each) for each in found_by(stored, lightness).split()]
    dark = [int(each) for each in found_by(stored, lightness, is_dark=True).split()]
    assert light == sorted(light, reverse=True)
    assert dark == sorted(dark)
    for levels in (light, dark):
        assert min(abs(a - b) for a, b in pairwise(levels)) >= 18


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("is_dark", [False, True])
def test_the_colours_of_phases_can_be_told_apart(stored: Path, is_dark: bool) -> None:
    colours = (
        "[...document.querySelectorAll('.legend .swatch')].map(swatch => swatch.className).filter(name =>"
        " name.includes('phase')).filter((name, at, all) => all.indexOf(name) === at).map(name =>"
        " getComputedStyle(document.querySelector('.' + name.replace(' ', '.'))).backgroundColor"
        ".match(/\\d+/g).slice(0, 3).join(',')).join(' ')"
    )
    found = [tuple(map(int, each.split(","))) for each in found_by(stored, colours, is_dark=is_dark).split()]
    assert len(found) == len(PHASES)
    for one, other in combinations(found, 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 70


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("is_dark", [False, True])
def test_text_can_be_read_in_both_schemes(stored: Path, is_dark: bool) -> None:
    """The contrast of text and page is that of WCAG AA, at least."""
    contrast = (
        "(() => { const light = text => { const part = text.match(/\\d+/g).slice(0, 3).map(n => n / 255)"
        ".map(n => n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4);"
        " return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2]; };"
        " const page = light(getComputedStyle(document.body).backgroundColor);"
        " const of = name => { const text = light(getComputedStyle(document.querySelector(name)).color);"
        " return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05); };"
        " return Math.min(of('h1'), of('.about'), of('td'), of('th')); })()"
    )
    assert float(found_by(stored, contrast, is_dark=is_dark)) >= 4.5


@pytest.mark.slow
@needs_browser
def test_a_picture_of_the_page_can_be_taken(stored: Path, tmp_path: Path) -> None:
    screenshot(stored, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000
