"""The rules by which ``bench load`` measures loads across layouts. No test depends on a time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

from bench.contenders import LATER, LOAD_NAMES
from bench.errors import RawLimitError, SetupError
from bench.load import load
from bench.load_table import bars, render_load
from bench.meter import Meter
from bench.order import Order
from bench.placing import mesh_shape
from bench.raw import RAW_WAYS
from bench.results import LOAD_ONLY, RAW, raw_name, read_load
from bench.scenarios import PACKAGES, SCENARIOS, chosen, why_not
from bench.state import LlamaLike, State, as_bytes, content, parameter_shapes, width_for
from bench.statistics import spread
from tests.bench_results import SECONDS, load_result

TORCH_ONLY = ("torch.save", "dcp", "holdfast")


# What is loaded


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
    (replicas,) = chosen(["replicas"])
    shapes = parameter_shapes(width_for(2 << 30, replicas.num_layers), replicas.num_layers)
    assert min(4 * shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2) >= 8 << 20


def test_fsdp_over_tensor_parallelism_has_a_mesh_of_two_axes() -> None:
    assert (mesh_shape("fsdp-tp", 4), mesh_shape("columns", 4)) == ((2, 2), (4,))


# Who takes part


def test_scenarios_are_chosen_by_name_and_an_unknown_one_is_refused_with_the_known_ones() -> None:
    assert [scenario.name for scenario in chosen(["replicas", "same"])] == ["same", "replicas"]
    assert chosen(None) == SCENARIOS
    with pytest.raises(SetupError, match=r"no scenario up.*same, columns, grow, shrink, fsdp-tp, replicas"):
        chosen(["up"])


def test_torch_load_takes_part_only_where_the_same_ranks_load() -> None:
    possible = [scenario.name for scenario in SCENARIOS if why_not("torch.save", scenario) is None]
    assert possible == ["same", "replicas"]


def test_a_package_that_is_not_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.scenarios.find_spec", lambda name: None)
    reasons = [why_not(name, SCENARIOS[0]) for name in PACKAGES]
    assert reasons == ["it is not installed; `make bench` installs it"] * len(PACKAGES)


def test_all_contenders_take_part_but_the_one_that_only_saves_otherwise() -> None:
    assert LOAD_NAMES[0] == RAW
    assert LATER not in LOAD_NAMES
    assert {*PACKAGES, *TORCH_ONLY} < {*LOAD_NAMES}


def test_a_run_that_only_loads_finds_what_another_kept_in_every_round(tmp_path: Path) -> None:
    order = Order(2, 3, LlamaLike(1), (RAW, "dcp"), measures=LOAD_ONLY, kept=(raw_name("1 x 16 MiB"),))
    assert {order.folder_of("dcp", number, tmp_path) for number in range(3)} == {tmp_path / "dcp"}
    assert order.num_turns() == 4 * (len(RAW_WAYS) + 1)


def test_a_run_without_a_round_is_refused() -> None:
    with pytest.raises(SetupError, match="at least one round"):
        load(rounds=0)


# Figures


def test_the_meter_counts_what_read_calls_return(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    meter = Meter()
    path.read_bytes()
    assert 1 << 20 <= meter.stop().asked_nbytes < 2 << 20


def test_bytes_are_those_of_all_ranks_per_byte_of_the_state() -> None:
    summary = load_result(SECONDS).scenarios[0].summary("dcp")
    assert summary.device_of_needed is not None
    assert summary.asked_of_needed is not None
    assert (summary.device_of_needed.median, summary.asked_of_needed.median) == (1.0, 2.0)


def test_the_tables_have_shares_and_costs_and_name_what_is_not_possible_with_its_reason() -> None:
    text = render_load(load_result(SECONDS))
    for line in (
        "| raw limit, GB/s | 1.82 (1.67 to 2.00) |",
        "| dcp | 0.50 (0.25 to 0.50) |",
        "| torchsnapshot | not possible |",
        "| dcp | 1.00; 3; 1.00 (2.00) |",
    ):
        assert line in text.splitlines()
    for fact in ("torchsnapshot: it is from 2023", "3 interleaved rounds", "2.00 to 2.00 GB", "torchsnapshot 0.1"):
        assert fact in text


def test_the_table_says_which_bars_were_met() -> None:
    found = load_result(SECONDS)
    (scenario,) = found.scenarios
    dcp = scenario.summary("dcp")
    ours = msgspec.structs.replace(dcp, contender="holdfast", share_of_raw=spread([0.85]))
    scenario = msgspec.structs.replace(scenario, summaries=(*scenario.summaries, ours))
    found = msgspec.structs.replace(found, scenarios=(scenario, msgspec.structs.replace(scenario, name="same")))
    assert dict(bars(found)) == {
        "rows -> columns, of raw: 0.85 (at least 0.8)": True,
        "rows -> columns, of raw: 0.85 (at least 0.9)": False,
        "CPU seconds per GB: 1.00 (at most 0.35)": False,
        "extra memory of a rank: 3 MB (at most 134)": True,
    }


@pytest.mark.slow
def test_a_run_leaves_a_result_that_its_tables_can_be_made_from(tmp_path: Path) -> None:
    # Of a state this small no share means anything; the file is there before it is judged.
    with suppress(RawLimitError):
        load(
            gib=0.001,
            rounds=1,
            scenario=["fsdp-tp"],
            contender=[*TORCH_ONLY],
            folder=tmp_path,
            results=tmp_path,
        )
    found = read_load(tmp_path / "load.json")
    (only,) = found.scenarios
    assert (only.saved, only.loaded) == ("rows, 4 ranks", "fsdp-tp, 4 ranks")
    assert [summary.contender for summary in only.summaries] == [RAW, "dcp", "holdfast"]
    assert [absent.contender for absent in only.not_possible] == ["torch.save"]
    assert "| torch.load | not possible |" in render_load(found)
    assert not list(tmp_path.glob("bench-*"))
