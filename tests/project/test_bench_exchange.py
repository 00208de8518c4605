"""``bench exchange``: conversions from and to other systems, and their bars. No test depends on a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import holdfast
from bench.__main__ import measure
from bench.benchmark import Options, require_bars
from bench.converters import CONVERSIONS, HUB, PLAIN, RAW_COPIES, write_inputs
from bench.exchange import EXCHANGE, LOAD, take
from bench.hub import HubLike
from bench.raw import RAW_WAYS, RawWay, copy_file
from bench.schema import OURS, RAW, WARM_UP, BenchError, read_result
from bench.state import content, parameter_shapes
from tests.project.bench_results import exchange_result

SMALLEST = HubLike(1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs that one process writes for the smallest model."""
    folder = tmp_path_factory.mktemp("inputs")
    assert write_inputs(folder, SMALLEST._replace(model_only=True), frozenset({HUB})) == [HUB, PLAIN]
    return folder


# The inputs


def test_a_folder_has_the_model_alone_in_several_files(inputs: Path) -> None:
    names = holdfast.open(inputs / HUB).names()
    assert sorted(f"model.{name}" for name in names) == sorted(SMALLEST._replace(model_only=True).contents())
    assert len(list((inputs / HUB).glob("*.safetensors"))) == 4
    assert (inputs / PLAIN).stat().st_size == sum(
        4 * torch.Size(shape).numel() for shape in parameter_shapes(SMALLEST.width).values()
    )


# Turns


@pytest.mark.parametrize("nbytes", [1, 4096, (5 << 20) + 4097])
def test_a_raw_copy_has_exactly_the_bytes_of_its_source(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "source").write_bytes(os.urandom(nbytes))
    copy_file(tmp_path / "source", tmp_path / "target", RawWay(3, 1 << 20))
    assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()


@pytest.mark.parametrize("name", [f"{RAW} {next(iter(RAW_WAYS))}", OURS])
def test_a_turn_compares_what_it_wrote_and_leaves_nothing(
    name: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.exchange.settle", lambda folder: None)  # other tests run beside this one
    recipe, before = SMALLEST._replace(model_only=True), sorted(path.name for path in inputs.iterdir())
    converter = (RAW_COPIES | dict(CONVERSIONS["hf-import"].entrants))[name]
    found = take(name, converter, WARM_UP, inputs, recipe)
    assert found["seconds"] > 0
    assert found["peak_extra_nbytes"] >= 0
    assert sorted(path.name for path in inputs.iterdir()) == before
    other = converter._replace(read=lambda _: lambda key, shape: content(f"other/{key}", shape))
    with pytest.raises(BenchError, match=f"{name} loaded other bytes"):
        take(name, other, WARM_UP, inputs, recipe)


# Figures


def test_a_bar_is_met_or_missed_by_the_median() -> None:
    title = CONVERSIONS["dcp-import"].title
    assert {what: bar.met for what, bar in EXCHANGE.judged(exchange_result()).items()} == {
        f"{title}, read of needed": True,
        f"{title}, written of needed": True,
        f"{title}, of raw": True,
        f"{title}, extra memory": True,
        "onto FSDP2, read of needed": True,
        "onto FSDP2, time of from_pretrained + fully_shard": True,
        "onto FSDP2, memory of from_pretrained + fully_shard": True,
    }
    worse = EXCHANGE.judged(exchange_result(seconds=2.0, peak_mb=600, load_s=1.1))
    assert [what for what, bar in worse.items() if not bar.met] == [
        f"{title}, of raw",
        f"{title}, extra memory",
        "onto FSDP2, time of from_pretrained + fully_shard",
    ]
    with pytest.raises(BenchError, match=r"of raw 0\.50 \(at least 0\.7\): missed"):
        require_bars(worse.values())


def test_the_tables_have_costs_shares_and_bars() -> None:
    lines = EXCHANGE.render(exchange_result()).splitlines()
    for line in (
        "| raw limit | 1.00 (1.00 to 1.00) | 1 | 1.01 | 1.00 | 3 |",
        "| dcp_to_torch_save | 4.00 (4.00 to 4.00) | 0.25 (0.25 to 0.25) | 1.01 | 1.00 | 3 |",
        "| holdfast | 1.25 (1.25 to 1.25) | 0.80 (0.80 to 0.80) | 1.01 | 1.00 | 42 |",
        "| onto FSDP2 | s | of raw | read of needed | extra memory per rank, MB |",
        "| holdfast | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) | 1.00 | 3 |",
    ):
        assert line in lines
    assert any("Not possible for zero_to_fp32: it is not installed." in line for line in lines)


@pytest.mark.slow
def test_a_run_leaves_a_result_that_its_tables_can_be_made_from(tmp_path: Path) -> None:
    measure(EXCHANGE, Options(scale=0, rounds=1, folder=tmp_path), None, tmp_path)
    found = read_result("exchange", tmp_path)
    assert [part.scenario.name for part in found.parts] == [*CONVERSIONS, LOAD]
    for name, conversion in CONVERSIONS.items():
        part = found.part(name)
        able = {each for each in conversion.entrants if each not in part.not_possible}
        assert {sample.contender for sample in part.samples} == {*RAW_COPIES, *able}
        assert OURS in able
    assert EXCHANGE.render(found)
    assert not list(tmp_path.glob("bench-*"))
