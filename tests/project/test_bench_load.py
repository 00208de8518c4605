"""The rules by which ``bench load`` measures loads across layouts. No test depends on a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bench.__main__ import measure
from bench.benchmark import Options
from bench.contenders import LOADING, why_absent
from bench.costs import read_nbytes
from bench.save_load import LOADS, MOVES, impossible
from bench.schema import RAW, BenchError, Result, read_result
from bench.state import State, as_bytes, content, parameter_shapes, width_for
from tests.project.bench_results import NBYTES, SECONDS, load_part, load_result

TORCH_ONLY = ("torch.save", "dcp", "holdfast")


# The loaded state


def test_what_a_tensor_holds_follows_from_its_path_alone() -> None:
    again, other = content("model/a", (4, 3)), content("model/b", (4, 3))
    assert torch.equal(content("model/a", (4, 3)), again)
    assert not torch.equal(again, other)


def test_of_plain_tensors_each_rank_has_an_even_share_and_all_shares_are_the_whole() -> None:
    tensor = content("a", (7, 3))
    shares = [State({"a": tensor}).share(rank, 4) for rank in range(4)]
    assert b"".join(bytes(part) for share in shares for part in share) == bytes(as_bytes(tensor))
    assert {len(share[0]) for share in shares} == {21}


def test_of_replicas_every_weight_is_at_least_8_mib() -> None:
    replicas = MOVES["replicas"]
    shapes = parameter_shapes(width_for(2 << 30, replicas.num_layers), replicas.num_layers)
    assert min(4 * shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2) >= 8 << 20


# The contenders


def test_scenarios_are_chosen_by_name_and_an_unknown_one_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no part up.*same, columns, grow, shrink, fsdp-tp, replicas"):
        measure(LOADS, Options(folder=tmp_path), ["up"], tmp_path)


def test_torch_load_takes_part_only_where_the_same_ranks_load() -> None:
    assert [name for name, move in MOVES.items() if "torch.save" not in impossible(move)] == ["same", "replicas"]


def test_a_package_that_is_not_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.contenders.find_spec", lambda name: None)
    absent = {name: reason for name, kind in LOADING.items() if (reason := why_absent(kind.package))}
    packages = ("torch_checkpointing", "torchsnapshot", "safetensors")
    assert absent == dict.fromkeys(packages, "it is not installed; `make bench` installs it")


# Figures


def test_what_read_calls_return_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    _, before = read_nbytes()
    path.read_bytes()
    assert 1 << 20 <= read_nbytes()[1] - before < 2 << 20


def test_bytes_are_those_of_all_ranks() -> None:
    (part,) = load_result(SECONDS).parts
    found = [part.series("dcp", key, measure="load", of=sum)[0] for key in ("device_nbytes", "asked_nbytes")]
    assert found == [NBYTES, 2 * NBYTES]


def test_the_tables_have_shares_and_costs_and_name_what_is_not_possible_with_its_reason() -> None:
    text = LOADS.render(load_result(SECONDS))
    for line in (
        "| raw limit | 1.82 (1.67 to 2.00) GB/s |",
        "| dcp | 0.50 (0.25 to 0.50) |",
        "| torchsnapshot | not possible |",
        "| dcp | 1.00; 3; 1.00 (2.00) |",
    ):
        assert line in text.splitlines()
    for fact in ("torchsnapshot: it is from 2023", "3 rounds", "2.00 to 2.00 GB", "torchsnapshot 0.1"):
        assert fact in text


def test_the_table_says_which_bars_were_met() -> None:
    seconds = {**SECONDS, "holdfast": (1.0 / 0.85, 1.2 / 0.85, 1.1 / 0.85)}
    parts = (load_part(seconds), load_part(seconds, name="same", title="same rows"))
    assert {what: bar.text() for what, bar in LOADS.judged(Result("load", parts)).items()} == {
        "rows -> columns, of raw": "0.85 (at least 0.8): met",
        "rows -> columns, extra memory of a rank": "3 MB (at most 134 MB): met",
        "same rows, of raw": "0.85 (at least 0.9): missed",
        "same rows, CPU seconds per GB": "1.00 (at most 0.35): missed",
        "same rows, extra memory of a rank": "3 MB (at most 134 MB): met",
    }


@pytest.mark.slow
def test_a_run_leaves_a_result_that_its_tables_can_be_made_from(tmp_path: Path) -> None:
    measure(LOADS, Options(scale=0, rounds=1, contenders=TORCH_ONLY, folder=tmp_path), ["fsdp-tp"], tmp_path)
    found = read_result("load", tmp_path)
    (only,) = found.parts
    assert [contender.name for contender in only.able] == [RAW, "dcp", "holdfast"]
    assert list(only.not_possible) == ["torch.save"]
    assert "| torch.save | not possible |" in LOADS.render(found)
    assert not list(tmp_path.glob("bench-*"))
