"""``holdfast plan`` predicts a load on another number of ranks, on screen and as JSON."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.command_line import Stored, holdfast_command, rows, stored_run

KIB = 1 << 10


def weight(*shape: int, dtype: str = "float32", ranks: int = 2) -> Stored:
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    return Stored(dtype, np.ones(shape, {4: np.float32, 2: np.int16}[itemsize]), *rows(ranks))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Saved by two ranks: 64 KiB, 32 KiB in bf16, and a scalar."""
    tensors = {"model/up": weight(64, 256), "model/down": weight(256, 64, dtype="bfloat16"), "model/scale": weight()}
    return stored_run(tmp_path / "run", tensors)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.toml"
    path.write_text(
        'mesh = { dp = 2, tp = 2 }\ndefault = {}\n[[rule]]\nnames = "model/up"\nplace = { tp = "shard 1" }\n'
        '[[rule]]\nnames = "model/down"\nplace = { dp = "stage 1" }\ndtype = "float32"\n'
    )
    return path


def test_without_a_layout_every_tensor_is_divided_over_all_ranks(run: Path) -> None:
    done = holdfast_command("plan", run, "--on", "4")
    assert done.status == 0
    assert "loaded by 4 ranks on 1 node: every tensor divided along axis 0 over all ranks" in done.out
    row = next(line.split() for line in done.lines if line.startswith("rank needs"))
    assert row[2:] == ["24.0", "KiB", "(rank", "0)", "24.0", "KiB", "24.0", "KiB", "(rank", "0)"]
    assert holdfast_command("plan", run, "--on", "4", "--json").json["needed_nbytes"] == [24 * KIB + 4] * 4


def test_a_layout_says_who_holds_what(run: Path, layout: Path) -> None:
    done = holdfast_command("plan", run, "--on", "4", "--layout", layout, "--cast", "model/down", "--json")
    document = done.json
    assert document["mesh"] == {"dp": 2, "tp": 2}
    assert document["needed_nbytes"] == [32 * KIB + 4, 32 * KIB + 4, 64 * KIB + 4, 64 * KIB + 4]
    assert document["cast"] == [{"name": "model/down", "stored": "bfloat16", "held": "float32"}]
    assert (done.status, document["refused"], document["unexpected"]) == (0, [], [])


def test_what_a_load_would_refuse_is_a_finding(run: Path, layout: Path) -> None:
    done = holdfast_command("plan", run, "--on", "4", "--layout", layout)
    assert done.status == 1
    assert done.lines[-1].startswith("1 tensor of another dtype")
    assert done.lines[-1].endswith("model/down (bfloat16 to float32)")
    layout.write_text(layout.read_text().replace("default = {}\n", ""))
    done = holdfast_command("plan", run, "--on", "4", "--layout", layout, "--cast", "**")
    assert done.status == 1
    assert done.lines[-1].endswith("model/scale")
    selected = holdfast_command("plan", run, "--on", "4", "--layout", layout, "--cast", "**", "--select", "!**/scale")
    assert selected.status == 0


def test_a_mapping_is_applied_before_the_layout(run: Path, tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.toml"
    mapping.write_text('[[rule]]\nkind = "drop"\nnames = "model/down"\n[[rule]]\nkind = "pad"\nnames = "model/up"\n')
    assert holdfast_command("plan", run, "--on", "2", "--mapping", mapping).status == 2, "a pad has a size"
    mapping.write_text(mapping.read_text() + 'size = 80\nfill = "keep"\n')
    document = holdfast_command("plan", run, "--on", "2", "--mapping", mapping, "--json").json
    assert document["needed_nbytes"] == [40 * KIB + 4, 24 * KIB + 4]
    assert (document["num_tensors"], document["partly_kept"]) == (2, ["model/up"])


def test_nodes_read_what_their_ranks_need_in_whole_blocks(run: Path) -> None:
    document = holdfast_command("plan", run, "--on", "4", "--nodes", "2", "--json").json
    sizes = [path.stat().st_size for path in sorted(run.rglob("data-*"))]
    assert document["num_nodes"] == 2
    assert all(file["nbytes"] <= 2 * size for file, size in zip(document["files"], sizes, strict=True))
    assert sum(document["read_nbytes"]) == sum(file["nbytes"] for file in document["files"])
    assert document["read_once_nbytes"] <= sum(document["read_nbytes"])
    assert [file["num_requests"] for file in document["files"]] == [2, 1], "both hold the scalar, of one file"


def test_seconds_follow_from_bandwidths_and_decide_who_reads(run: Path) -> None:
    def expected(*options: str) -> dict[str, float | bool | None]:
        found: dict[str, float | bool | None] = holdfast_command(
            "plan", run, "--on", "4", "--nodes", "4", "--json", *options
        ).json["expected"]
        return found

    assert expected() is None
    document = holdfast_command("plan", run, "--on", "4", "--nodes", "4", "--json").json
    most, once = max(document["read_nbytes"]), document["read_once_nbytes"]
    total = sum(document["read_nbytes"])
    alone = expected("--storage", "1kB/s")
    assert alone == {"apart_s": most / 1000, "once_s": None, "once": False}
    shared = expected("--storage", "1MiB/s", "--all-storage", "8kbit/s", "--network", "1GB/s")
    assert shared == {"apart_s": total / 1000, "once_s": once / 1000, "once": True}
    done = holdfast_command("plan", run, "--on", "4", "--nodes", "4", "--storage", "1MiB/s", "--network", "1B/s")
    assert "as each node reads for itself (" in done.lines[-1]


@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        (["--layout", "{layout}"], 2, "the mesh of .*, dp 2 x tp 2, has 4 ranks, but --on is 8"),
        (["--layout", "nowhere.toml"], 2, "nowhere.toml cannot be read"),
        (["--mapping", "nowhere.toml"], 2, "nowhere.toml cannot be read"),
        (["--nodes", "9"], 2, "8 ranks cannot run on 9 nodes"),
        (["--storage", "fast"], 2, "'fast' is not a bandwidth"),
        (["--storage", "0GB/s"], 2, "'0GB/s' is not a bandwidth"),
        (["--network", "1GB/s"], 2, "Add --storage"),
        (["--select", "model/u"], 3, "did you mean 'model/up'"),
    ],
)
def test_mistakes_are_told(run: Path, layout: Path, options: list[str], status: int, told: str) -> None:
    done = holdfast_command("plan", run, "--on", "8", *(option.format(layout=layout) for option in options))
    assert done.status == status
    assert done.out == ""
    assert re.search(told, done.err)


def test_no_data_file_is_read(run: Path) -> None:
    for file in run.rglob("data-*"):
        file.unlink()
    assert holdfast_command("plan", run, "--on", "3").status == 0


def test_the_figures_fit_a_terminal_of_100_columns(run: Path) -> None:
    lines = holdfast_command("plan", run, "--on", "64").lines
    table = lines[lines.index("") + 1 :]
    assert max(map(len, table[: table.index("")])) <= 100


def test_a_plan_starts_without_torch(run: Path, layout: Path) -> None:
    code = (
        "import sys\n"
        "from holdfast.cli import run\n"
        "try: run(sys.argv[1:])\n"
        "finally: print([name for name in ('torch', 'ml_dtypes') if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", str(run), "--on", "4", "--layout", str(layout), "--cast", "**"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")
