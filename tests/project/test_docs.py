"""The names, commands and files that the documents promise exist."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

import holdfast
import holdfast.inference

ROOT = Path(__file__).parents[2]


PAGE = ROOT / "docs" / "troubleshooting.md"
#: A row of the tables at the end of the page. The first part is the code.
ROW = re.compile(r"^\| `([a-z_.]+)` \| (.+) \| (.+) \|$", re.MULTILINE)
#: The beginnings of codes of errors and findings. A code of another kind needs a table of its own in the page.
KINDS = (
    "config|state|not_found|incompatible|corrupt|storage|timeout|fenced|"
    "commit|epoch|extra|folder|leftover|marker|record|unknown"
)
WHOLE_CODES = {"unexpected", "leftover"}


def codes_of_the_library() -> set[str]:
    """All codes that stand in the source: as ``code=`` of a call, or as a text that begins like a code."""
    codes = set(WHOLE_CODES)
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code":
                assert not isinstance(node.value, ast.JoinedStr), f"write out the code in {path}:{node.value.lineno}"
                if isinstance(node.value, ast.Constant):
                    codes.add(str(node.value.value))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                codes.update([node.value] if re.fullmatch(rf"({KINDS})\.(?!json$)[a-z_]+", node.value) else [])
    return codes


def test_the_troubleshooting_page_has_one_row_for_every_code_of_the_library() -> None:
    rows = [code for code, _, _ in ROW.findall(PAGE.read_text())]
    codes = codes_of_the_library()
    missing, stale = sorted(codes - set(rows)), sorted(set(rows) - codes)
    row = "| `the.code` | What happened. | What to do. |"
    assert missing == [], f"add a row to docs/troubleshooting.md for each, such as: {row}"
    assert stale == [], "no code of the library is called that any more: remove the row"
    assert [code for code, number in Counter(rows).items() if number > 1] == []


def test_rows_of_the_troubleshooting_page_are_sorted_within_each_table() -> None:
    for table in PAGE.read_text().split("\n#"):
        rows = [code for code, _, _ in ROW.findall(table)]
        assert rows == sorted(rows)


def test_every_code_in_the_text_of_the_troubleshooting_page_has_a_row() -> None:
    page = PAGE.read_text()
    named = set(re.findall(r"\[([a-z_]+\.[a-z_]+)\]", page))
    assert len(named) >= 10
    assert named <= {code for code, _, _ in ROW.findall(page)}


def test_the_readme_is_short_and_names_the_commands_that_show_and_test() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120, "tables belong into docs/benchmarks.md, details into the guides"
    assert all(f"\nmake {command} " in text for command in ("demo", "test", "test-slow"))


def test_the_eight_lines_of_the_readme_train_stop_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: holdfast.Memory
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line]) == 8
    monkeypatch.chdir(tmp_path)
    embedding = torch.nn.Embedding(100, 8)
    model = torch.nn.ModuleDict({"tok_emb": embedding})
    optimizer = torch.optim.AdamW(model.parameters())
    trained: list[int] = []

    def train(step: int) -> None:
        trained.append(step)
        embedding.weight.square().sum().backward()  # type: ignore[no-untyped-call]  # torch does not say
        optimizer.step()

    names: dict[str, object] = {"model": model, "optimizer": optimizer, "train": train}
    names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names["memory"] = memory
    code = example.replace('holdfast.open("runs/gpt")[', 'rows = holdfast.open("runs/gpt")[')
    code = code.replace("save=policy) as", "save=policy, memory=memory) as")
    for num_steps in (2, 5):
        exec(code, names | {"num_steps": num_steps})
    exec(code, names := names | {"num_steps": 5})  # nothing is left to do
    assert trained == [0, 1, 2, 3, 4]
    rows = names["rows"]
    assert isinstance(rows, torch.Tensor)
    assert torch.equal(rows, embedding.weight[10:20])


#: A row of a table of docs/reference.md: argument, type, default.
ARGUMENT = re.compile(r"^\| `(.+?)` \| (?:`(.+?)`)? *\| (?:`(.+?)`|-)? *\| .*\|$", re.MULTILINE)
ALL = (
    *("Bandwidths", "Checkpointer", "Copies", "Memory", "Parity", "PerRank", "Piecewise", "Still"),
    *("load", "open", "plan_load"),
    *("KeepBest", "KeepEvery", "KeepFor", "KeepLast", "StopAfter", "ls", "pin", "unpin", "remove", "compact"),
    *("Auto", "EverySteps", "EveryTime", "OnMetric", "OnPreemption", "OnRequest", "request_save"),
    *("inference.HTTPEngineClient", "inference.InferenceWorker", "inference.ModuleEngine", "inference.Publisher"),
    *("dcp.async_save", "dcp.load", "dcp.save"),
    *(
        "ExportHub",
        "copy_run",
        "export",
        "import_checkpoint",
        "inference.StoredWeights",
        "mapping.family",
        "register_adapter",
        "register_tensor",
        "register_value",
        "save",
        "transfer",
    ),
    *(f"data.{name}" for name in holdfast.data.__all__ if name != "ShardSource"),
)


def signature_rows(call: Callable[..., object]) -> list[tuple[str, str, str]]:
    """The rows that a call has in docs/reference.md: its arguments, a star before those that are passed by name."""
    rows: list[tuple[str, str, str]] = []
    for parameter in inspect.signature(call).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in [name for name, _, _ in rows]:
            rows.append(("*", "", ""))
        kind, default = parameter.annotation, parameter.default
        text = str(default) if isinstance(default, Path) else repr(default)
        text = {parameter.empty: "", holdfast.Memory(): "Memory()", default_collate: "default_collate"}.get(
            default, text
        )
        rows.append((parameter.name, kind if isinstance(kind, str) else kind.__name__, text))
    return rows


def test_the_reference_has_every_argument_of_every_call_with_its_type_and_default() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    sections = dict(re.findall(r"^## `holdfast\.(\S+)`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    methods = [name for name, item in vars(holdfast.Checkpointer).items() if callable(item) and name[0] != "_"]
    assert set(sections) == {*ALL, *(f"Checkpointer.{name}" for name in methods)}
    for name, text in sections.items():
        call = attrgetter(name)(holdfast)
        rows = [(argument, kind.replace("\\|", "|"), default) for argument, kind, default in ARGUMENT.findall(text)]
        assert rows == signature_rows(call), f"correct the table of holdfast.{name} in docs/reference.md"


def test_links_between_documents_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_map_of_the_house_has_every_package_once_and_nothing_else() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The map of the house")[2].partition("\n## ")[0]
    rows = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(.+?)`", row)]
    package = ROOT / "src" / "holdfast"
    entries = [*package.glob("*.py"), *(path.parent for path in package.glob("*/__init__.py"))]
    expected = {f"src/holdfast/{path.name}{'/' * path.is_dir()}" for path in entries if path.name[0] != "_"}
    assert sorted(name for name in named if name.startswith("src/")) == sorted(expected)
    assert [name for name in named if "<" not in name and not (ROOT / name).exists()] == []


def test_the_map_of_the_house_stands_in_the_order_of_the_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [re.findall(r"`src/holdfast/(\w+)(?:/|\.py)`", row) for row in re.findall(r"(?m)^\| (`src/.*?) \| ", text)]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    floors = {name: floor for floor, layer in enumerate(layers) for name in layer.split(" | ")}
    for upper, lower in pairwise(rows):
        assert max(floors[name] for name in upper) <= min(floors[name] for name in lower), f"{upper} is above {lower}"


def test_each_folder_of_tests_mirrors_a_package_or_has_a_row_in_the_map() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = set(re.findall(r"^\| `tests/(\w+)/` \|", text, re.MULTILINE))
    package, tests = ROOT / "src" / "holdfast", ROOT / "tests"
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    folders = {path.parent.name for path in tests.glob("*/*.py")}
    assert sorted(folders - packages) == sorted(rows), "name the folder after the package, or give it a row in the map"
    assert [name for name in sorted(folders) if not (tests / name / "__init__.py").exists()] == []
