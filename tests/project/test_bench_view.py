"""``bench view``: the results that it writes, and the tables made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import measure
from bench.benchmark import Options
from bench.plan import CASES
from bench.schema import read_result
from bench.view import NOTHING, OPENED, SHOWN, VIEW, write_simulated
from holdfast.format import records
from holdfast.format.container import Files
from holdfast.format.manifest import decode
from tests.project.bench_results import view_result


@pytest.mark.parametrize("case", CASES)
def test_the_seal_of_a_simulated_checkpoint_has_the_sizes_of_its_files(case: str, tmp_path: Path) -> None:
    write_simulated(tmp_path / "checkpoint", CASES[case].simulate(max(4, CASES[case].smallest)))
    (manifest,) = (path for path in (tmp_path / "checkpoint").iterdir() if path.name != records.SEAL_NAME)
    files = Files(decode(manifest.read_bytes(), path=str(manifest)))
    seal = records.decode((tmp_path / "checkpoint" / records.SEAL_NAME).read_bytes(), records.Seal, path="seal")
    last = files.layout(files.manifest.body.num_files - 1)
    assert len(seal.files) == files.manifest.body.num_files
    assert seal.files[-1].nbytes == last.data_start + last.data_nbytes


def test_the_command_alone_has_no_bar() -> None:
    assert {what: bar.met for what, bar in VIEW.judged(view_result()).items()} == {
        "open and read one": True,
        "show fsdp": True,
        "show random-flat-cuts": False,
    }


def test_the_tables_have_medians_extremes_and_bars() -> None:
    text = VIEW.render(view_result())
    for line in (
        "| dcp | 9.00 (4.50 to 18.00) |",
        "| `holdfast --help`, for comparison | 0.10 (0.05 to 0.20) |",
        "| show random-flat-cuts | 1.5 s (at most 1 s): missed |",
    ):
        assert line in text.splitlines()
    for fact in ("100,000 tensors", "8,960 ranks"):
        assert fact in text


@pytest.mark.slow
def test_a_run_leaves_a_result_that_its_tables_can_be_made_from(tmp_path: Path) -> None:
    measure(VIEW, Options(scale=0, rounds=1, folder=tmp_path), None, tmp_path)
    found = read_result("view", tmp_path)
    assert {each.contender for each in found.part(OPENED).samples} >= {"holdfast", "dcp"}
    assert {each.contender for each in found.part(SHOWN).samples} == {NOTHING, *CASES}
    assert VIEW.render(found)
    assert found.part(OPENED).scenario.state.num_tensors == 100
    assert not list(tmp_path.glob("bench-*"))
