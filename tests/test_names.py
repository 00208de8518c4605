"""One word, one meaning: each class has a name of its own in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "holdfast"


def test_every_class_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.ClassDef):
                found[item.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}: {item.name}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
