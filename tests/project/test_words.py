"""One word, one meaning: names are unique, and every name that a page or an import spells exists."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "holdfast"
#: An import of ours, wherever it is written: in code, in a script inside a string, in a page.
IMPORT = re.compile(r"from (holdfast[\w.]*) import (?:\(([^)]*)\)|([^\n\"'\\;`]*))")


def test_every_class_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.ClassDef):
                found[item.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}: {item.name}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_every_module_has_a_file_name_of_its_own() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem not in ("__init__", "__main__"):
            found[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


@pytest.mark.parametrize("folder", ["tests", "bench", "demo", "docs", "src"])
def test_every_import_of_ours_names_something_that_exists(folder: str) -> None:
    """Imports in code are checked by mypy; those in strings (scripts of tests) and pages are checked only here."""
    missing = {
        f"{path.relative_to(ROOT)}: from {module} import {name}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".md", ".sh")
        for module, name in _imports(path.read_text())
        if not _exists(module, name)
    }
    assert missing == set()


def _imports(text: str) -> Iterator[tuple[str, str]]:
    for module, in_parentheses, on_the_line in IMPORT.findall(text):
        names = re.sub(r"#.*", "", in_parentheses or on_the_line)
        for item in re.split(r"[,\n]", names):
            name = item.split(" as ")[0].strip()
            if re.fullmatch(r"\w+", name):
                yield module, name


def _defines(module: str, name: str) -> bool:
    """Whether the text of a module defines a class or a function of that name."""
    text = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
    return any(getattr(node, "name", None) == name for node in ast.parse(text).body)


def _exists(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
    except ModuleNotFoundError as error:
        if str(error.name).startswith("holdfast"):
            raise
        return _defines(module, name)  # it imports a library that has an environment of its own
    try:
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True
