"""A hook of mkdocs: the pages and files that the site has beside those of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
#: Files at the root of the repository that are pages of the site.
PAGES: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: The results that docs/benchmarks.md links to.
RESULTS: Final = "bench/results"
#: Files of the repository that pages link to.
LINKED: Final = (f"{RESULTS}/*.json", "examples/*.py")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add pages, and the files that they link to, to the files of the site."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_with_links_of_the_site((ROOT / name).read_text())))
    for path in sorted(path for pattern in LINKED for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - named so
    """Have links of docs/ to the results lead to their copies in the site."""
    return markdown.replace(f"](../{RESULTS}/", f"]({RESULTS}/")


def _with_links_of_the_site(text: str) -> str:
    """The text of a page at the root, as one that lies in docs/."""
    for name, page in PAGES.items():
        text = text.replace(f"]({name})", f"]({page})")
    return re.sub(r"\]\(docs/", "](", text)
