"""The catalogue of known defects, read from their tests. Run as a module to write the table of README.md anew."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
_SEEN_IN = "Seen in: "
_HEADER = "| symptom | system and source | test |\n|---|---|---|\n"


@dataclass(frozen=True)
class KnownDefect:
    """A published defect, and the test that would find it here."""

    file: str
    test: str
    symptom: str
    source: str

    @staticmethod
    def of(file: str, function: ast.FunctionDef) -> KnownDefect:
        """Read the docstring: the symptom, then after a blank line where it was seen."""
        symptom, _, source = (ast.get_docstring(function) or "").partition("\n\n")
        if not symptom or not source.startswith(_SEEN_IN):
            raise ValueError(f"{file}: {function.name} does not say what was seen and where")
        text = source.removeprefix(_SEEN_IN)
        return KnownDefect(file, function.name, " ".join(symptom.split()), " ".join(text.split()).removesuffix("."))


def known_defects() -> list[KnownDefect]:
    """All known defects, in the order of files and lines."""
    return [
        KnownDefect.of(path.name, node)
        for path in sorted(HERE.glob("test_*.py"))
        if path.stem not in ("test_catalogue", "test_mutations", "test_promises")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def table() -> str:
    """The table of README.md."""
    rows = [(e.symptom, e.source, f"`{e.file.removesuffix('.py')}::{e.test}`") for e in known_defects()]
    return _HEADER + "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def main() -> None:
    """Replace the table of README.md."""
    README.write_text(README.read_text().partition(_HEADER)[0] + table())


if __name__ == "__main__":
    main()
