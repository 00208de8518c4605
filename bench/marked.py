"""Generated parts of a document, between markers such as ``<!-- bench:start -->`` and ``<!-- bench:end -->``."""

from __future__ import annotations

from pathlib import Path

from bench.errors import MarkersError

README = Path("README.md")
TABLES = Path("docs/benchmarks.md")
#: Drawn anew as a whole, without markers.
CHART = Path("docs/figures/speed.svg")


def rewrite(document: Path, name: str, rendered: str) -> None:
    """Replace what stands between the markers of `name`. MarkersError when they are not there once each."""
    document.write_text(replace_part(read_marked(document, name), name, rendered, where=str(document)))


def read_marked(document: Path, name: str) -> str:
    """The text of `document`; MarkersError when it does not exist or has not exactly one place for `name`."""
    if not document.is_file():
        raise MarkersError(f"There is no {document}. Run from the root of the repository, or name another file.")
    text = document.read_text()
    _split(text, name, where=str(document))
    return text


def replace_part(text: str, name: str, rendered: str, *, where: str) -> str:
    """`text` with `rendered` between the markers of `name`; MarkersError, naming `where`, without them."""
    before, after = _split(text, name, where=where)
    start, end = markers(name)
    return f"{before}{start}\n{rendered}\n{end}{after}"


def markers(name: str) -> tuple[str, str]:
    """The start and end markers of `name`."""
    return f"<!-- {name}:start -->", f"<!-- {name}:end -->"


def _split(text: str, name: str, *, where: str) -> tuple[str, str]:
    start, end = markers(name)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise MarkersError(f"{where} needs one line {start} and below it one line {end}. Add both.")
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return before, after
