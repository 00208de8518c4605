"""The site has every page and every public name, and no broken link."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import holdfast
import holdfast.data
import holdfast.frameworks
import holdfast.mapping
import holdfast.store.base
import holdfast.testing

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Those that tools/site_pages.py makes of files at the root of the repository.
MADE = {"index.md", "contributing.md", "changelog.md"}


def pages(nav: object) -> Iterator[str]:
    """The pages in a part of a nav."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from pages(part)
    elif isinstance(nav, list):
        for part in nav:
            yield from pages(part)


def test_the_nav_names_every_page_once() -> None:
    nav = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == sorted({str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | MADE)


def test_the_api_pages_have_every_public_name() -> None:
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    named = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    public = {f"holdfast.{name}" for name in holdfast.__all__}
    public |= {f"holdfast.testing.{name}" for name in holdfast.testing.__all__}
    for module in (holdfast.frameworks, holdfast.store.base):
        classes = inspect.getmembers(module, inspect.isclass)
        public |= {f"{module.__name__}.{name}" for name, item in classes if item.__module__ == module.__name__}
    assert public - {"holdfast.store.base.Location"} <= set(named)  # its public name is holdfast.Location


def test_the_list_of_design_notes_has_all_of_them() -> None:
    notes = DOCS / "design"
    listed = re.findall(r"^\| \[\d+\]\((.+?)\)", (notes / "README.md").read_text(), re.MULTILINE)
    assert listed == sorted(path.name for path in notes.glob("0*.md"))


def test_what_belongs_to_an_entry_of_a_list_is_indented_by_four_columns() -> None:
    """The markdown of the site ends the list at less, where that of code hosts does not."""
    fenced = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    short = []
    for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")):
        text = fenced.sub(lambda code: "\n" * code[0].count("\n"), path.read_text())
        found = re.finditer(r"(?<=\n\n) {1,3}\S|^ {1,3}([-*]|\d+\.) ", text, re.MULTILINE)
        short += [f"{path.name}:{text.count(chr(10), 0, each.start()) + 1}" for each in found]
    assert short == []


class Html(HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif (tag, name) in (("a", "href"), ("link", "href"), ("img", "src"), ("script", "src")) and value:
                self.targets.append(value)


@pytest.mark.slow
def test_the_site_is_built_strictly_and_nothing_in_it_leads_nowhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path: Html(path) for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    nowhere = []
    for page, html in found.items():
        for target in html.targets:
            parts = urlsplit(target)
            if parts.scheme:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not path.exists() or (parts.fragment and unquote(parts.fragment) not in found[path].anchors):
                nowhere.append(f"{page.relative_to(tmp_path)}: {target}")
    assert nowhere == []
    anchors = {anchor for html in found.values() for anchor in html.anchors}
    public = {f"holdfast.{name}" for name in holdfast.__all__}
    for module in (holdfast.data, holdfast.mapping):
        public |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert public <= anchors
