"""The rules by which the benchmarks judge their own results. No test depends on a time."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.spawn import start_processes

import tests.support.ranks  # noqa: F401 - its fork server has torch
from bench import runner
from bench.__main__ import BENCHMARKS, CHART, NAMES, PLANNING, README, TABLES, documents, measure, publish
from bench.agreement import AGREEMENT
from bench.benchmark import RESULTS, Options, chosen, require_bars, require_raw_limit
from bench.contenders import LATER, MANY
from bench.costs import Watch
from bench.emulated_nodes import NODES
from bench.front import render_chart, render_front
from bench.lost_nodes import LOST_NODES
from bench.markdown import markers, replace_part, text
from bench.markdown import table as lines_of
from bench.pacing import PACING
from bench.parity import PARITY
from bench.plan import PLAN
from bench.prune import PRUNE
from bench.raw import RAW_WAYS, RawImage, RawWay
from bench.runner import messages, require_same
from bench.save_load import IO, MEASURES
from bench.schema import OURS, RAW, WARM_UP, BenchError, Result, paired_ratios, read_result, rotated, write_result
from bench.small import SAVES as SMALL_SAVES
from bench.small import SMALL
from bench.state import parameter_shapes, width_for
from tests.project.bench_results import (
    SECONDS,
    agreement_result,
    data_result,
    engine_result,
    events_result,
    exchange_result,
    history_result,
    io_result,
    load_part,
    load_result,
    lost_nodes_result,
    nodes_result,
    objects_result,
    pacing_result,
    parity_result,
    part,
    peers_result,
    plan_result,
    prune_result,
    sample,
    small_result,
    step_result,
    view_result,
)

ROOT = Path(__file__).parents[2]
START, END = markers("bench")
LOADS = Result("load", (load_part(SECONDS), load_part(SECONDS, name="fsdp-tp", title="FSDP onto TP")))
FOUND = {
    result.name: result
    for result in (
        io_result(SECONDS),
        LOADS,
        exchange_result(),
        engine_result(),
        small_result(),
        view_result(),
        plan_result(),
        agreement_result(),
        history_result(),
        step_result(),
        prune_result(),
        data_result(),
        events_result(),
        objects_result(),
        parity_result(),
        nodes_result(),
        lost_nodes_result(),
        peers_result(),
        pacing_result(),
    )
}


# Statistics


def test_an_agreement_is_judged_in_the_largest_world_by_its_time_and_its_memory() -> None:
    assert {what: bar.met for what, bar in AGREEMENT.judged(agreement_result(seconds=1.25)).items()} == {
        "agreement of a save": False,
        "memory of the coordinator": True,
    }
    assert "| 8,960 | 0.75 | 0.25 | 0.25 | 0.75 | 0.25 | 0.25 | 0.25 | 0 | 30 |" in AGREEMENT.render(agreement_result())


def test_the_bar_of_deletions_is_the_delay_of_the_longest_step() -> None:
    ((what, met),) = PRUNE.judged(prune_result()).items()
    assert what == "the longest step is longer while 1,000 checkpoints are deleted, by"
    assert met.text() == "2.5 ms (at most 5 ms): met"
    (missed,) = PRUNE.judged(prune_result(busy_max_s=0.0151)).values()
    assert not missed.met
    assert "| 1,000 checkpoints | 5.10 | 7.00 | 12.50 |" in PRUNE.render(prune_result())


def test_protection_and_restores_are_judged_by_a_plain_copy_and_a_restore_by_what_it_moves() -> None:
    assert all(bar.met for bar in NODES.judged(nodes_result()).values())
    slow = NODES.judged(nodes_result(ours_s=1.2, moved_mib=1.1))
    assert {what: bar.met for what, bar in slow.items()} == {
        "protection, 2 nodes, of a plain copy": False,
        "protection at the default pace, 2 nodes, of a plain copy": False,
        "memory beyond snapshots and copies, 2 nodes": True,
        "restore of a lost node, 4 nodes, 2 Gbit/s, of a plain copy": True,
        "bytes moved / bytes lost, 8 nodes": False,
        "restore of a lost node, 4 nodes, 2 Gbit/s, parity, of a plain copy": True,
        "bytes moved / bytes lost, 8 nodes, parity": True,
    }
    assert "| 8 nodes, parity | 1 | 0.90 | - | 1.00 | 0.90 | 1.00 |" in NODES.render(nodes_result())


def test_copies_beside_training_may_make_a_step_3_percent_longer() -> None:
    assert all(bar.met for bar in PACING.judged(pacing_result()).values())
    ((what, slow),) = PACING.judged(pacing_result(ours_s=0.176)).items()
    assert what == "a step beside copies, 2 nodes, of one without"
    assert slow.text() == "1.035 (at most 1.03): missed"
    assert "| 2 nodes, unpaced copies | 204.0 | 1.20 | 210.0 | 1.50 | 1.00 |" in PACING.render(pacing_result())


def test_parity_for_two_losses_may_be_made_at_half_the_speed_of_that_for_one() -> None:
    assert all(bar.met for bar in PARITY.judged(parity_result()).values())
    slow = PARITY.judged(parity_result(encode_s=0.25))
    assert {what: bar.met for what, bar in slow.items()} == {
        "parity of 3+1, of memcpy": False,
        "parity of 4+2, of memcpy": True,
    }
    assert "| 3+1 | 20.0 | 0.50 | 0.80 | - |" in PARITY.render(parity_result())


def test_the_choice_after_losses_may_take_a_second() -> None:
    assert all(bar.met for bar in LOST_NODES.judged(lost_nodes_result()).values())
    assert not any(bar.met for bar in LOST_NODES.judged(lost_nodes_result(choose_s=1.25)).values())
    assert "| 2,048 nodes | 8,960 | 18.0 | 0.25 | 0.50 |" in LOST_NODES.render(lost_nodes_result())


def test_of_a_series_the_median_and_the_extremes_are_shown() -> None:
    assert median([3.0, 1.0, 10.0]) == 3.0
    assert text([3.0, 1.0, 10.0]) == "3.00 (1.00 to 10.00)"
    assert text([0.003, 0.001], 1, scale=1e3) == "2.0 (1.0 to 3.0)"


def test_an_empty_series_is_shown_as_a_dash_and_one_figure_without_extremes() -> None:
    assert (text([]), text([2.0])) == ("-", "2.00")


def test_ratios_are_paired_by_round_and_not_taken_from_medians() -> None:
    assert paired_ratios([1.0, 4.0], [2.0, 4.0]) == [0.5, 1.0]


def test_series_of_different_length_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        paired_ratios([1.0], [1.0, 2.0])


@given(st.integers(1, 9))
def test_over_as_many_rounds_as_entrants_each_takes_each_turn_once(number: int) -> None:
    items = tuple(range(number))
    orders = [rotated(items, turn) for turn in range(number)]
    assert all(sorted(column) == list(items) for column in zip(*orders, strict=True))


def test_the_fastest_way_of_the_raw_limit_is_the_one_with_the_lowest_median_not_the_lowest_sample() -> None:
    (found,) = io_result(SECONDS).parts
    assert min(found.series(f"{RAW} other", measure="save")) < min(found.series(f"{RAW} fast", measure="save"))
    assert found.raw_way("save") == f"{RAW} fast"


# Summaries and the rule of the raw limit


def test_the_raw_limit_is_the_best_of_its_ways_and_says_which() -> None:
    (found,) = io_result(SECONDS).parts
    assert (found.raw_way("save"), found.median(RAW, measure="save")) == (f"{RAW} fast", 1.1)
    assert found.shares(RAW, measure="save") == [1.0, 1.0, 1.0]


def test_a_contender_has_the_paired_share_and_the_cost_of_all_ranks() -> None:
    (found,) = io_result(SECONDS).parts
    assert found.shares("dcp", measure="load") == pytest.approx([0.25, 0.5, 0.5])
    assert 1e9 * found.per_byte("dcp", "cpu_s", measure="load") == pytest.approx(1.0)
    assert found.peak_nbytes("dcp", "load") == 3_000_000


def test_a_contender_that_beats_the_raw_limit_is_an_error_of_the_harness() -> None:
    beaten = io_result(SECONDS | {"dcp": (0.9, 1.1, 1.0)})
    with pytest.raises(
        BenchError, match=r"dcp .* raw limit was not reached by the raw loop.*Add a way to .*, or rounds"
    ):
        require_raw_limit(beaten)


def test_a_contender_within_the_noise_of_the_raw_limit_is_none() -> None:
    noisy = io_result(SECONDS | {"dcp": (0.97, 1.17, 1.08)})
    assert median(noisy.part("io").shares("dcp", measure="save")) > 1
    require_raw_limit(noisy)


# Errors of a run


def test_a_contender_that_loads_other_bytes_is_an_error_that_names_it_and_the_tensor() -> None:
    with pytest.raises(BenchError, match=r"dcp loaded other bytes.*1 of 2 parts differ, the first is b"):
        require_same({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, name="dcp")


def test_a_tensor_that_vanished_in_a_load_is_an_error() -> None:
    with pytest.raises(BenchError, match="the first is a"):
        require_same({"a": "1"}, {}, name="dcp")


def test_what_is_asked_for_is_chosen_in_the_known_order() -> None:
    assert chosen(["c", "a"], ("a", "b", "c"), kind="letter") == ("a", "c")
    assert chosen(None, ("a", "b"), kind="letter") == ("a", "b")


def say(queue: Any) -> None:
    queue.put(f"rank {dist.get_rank()}")


def die(queue: Any) -> None:
    os._exit(3 * dist.get_rank())


def fail_while_another_waits(queue: Any) -> None:
    if dist.get_rank() == 0:
        raise BenchError("other bytes")
    time.sleep(600)


def stay(queue: Any) -> None:
    queue.put(dist.get_rank())
    queue.put(None)
    time.sleep(600)


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start in a moment: the fork server of `tests.support.ranks` has torch."""
    monkeypatch.setattr(runner, "start_processes", partial(start_processes, start_method="forkserver"))


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.slow
def test_what_ranks_send_is_collected_until_all_have_ended_or_said_that_they_are_to_be_killed() -> None:
    assert sorted(messages(say, world=2)) == ["rank 0", "rank 1"]
    assert sorted(messages(stay, world=2)) == [0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_dies_without_a_word_is_an_error_with_its_status() -> None:
    with pytest.raises(BenchError, match="process 1 terminated with exit code 3"):
        list(messages(die, world=2))


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.slow
def test_what_ended_a_rank_is_reported_at_once_though_other_ranks_still_run() -> None:
    with pytest.raises(BenchError, match=r"A rank failed(?s:.*)BenchError: other bytes"):
        list(messages(fail_while_another_waits, world=2))


def test_the_warm_up_counts_for_memory_alone() -> None:
    warm_up = sample("load", "dcp", WARM_UP, 100.0, peak_extra_nbytes=(5, 7))
    found = part("io", [warm_up, sample("load", "dcp", 1, 2.0, peak_extra_nbytes=())])
    assert (found.series("dcp", measure="load"), found.peak_nbytes("dcp", "load")) == ([2.0], 7)


def test_memory_is_watched_from_before_until_the_end() -> None:
    watch = Watch()
    own = bytearray(b"x") * (64 << 20)
    time.sleep(0.5)
    del own
    assert 56 << 20 < watch.stop() < 80 << 20


# The raw loop and the state


@pytest.mark.parametrize("way", RAW_WAYS.values(), ids=RAW_WAYS)
@pytest.mark.parametrize("nbytes", [1, 4096, (32 << 20) + 4097])
def test_the_raw_loop_reads_back_exactly_the_bytes_it_wrote(tmp_path: Path, way: RawWay, nbytes: int) -> None:
    data = b"\1" + os.urandom(nbytes - 1)  # differs from a cleared image even where it is one byte
    image = RawImage([memoryview(data[: nbytes // 3]), memoryview(data[nbytes // 3 :])])
    image.write(tmp_path / "file", way)
    saved = image.digests()
    image.clear()
    cleared = image.digests()
    image.read(tmp_path / "file", way)
    assert (tmp_path / "file").read_bytes() == data
    assert image.digests() == saved != cleared


def test_a_raw_file_that_was_cut_is_an_error_and_no_short_read(tmp_path: Path) -> None:
    image, way = RawImage([memoryview(bytes(10_000))]), RawWay(1, 16 << 20)
    image.write(tmp_path / "file", way)
    os.truncate(tmp_path / "file", 4096)
    with pytest.raises(OSError, match="ended at byte 4096 of 10000"):
        image.read(tmp_path / "file", way)


@given(st.integers(1, 1 << 36))
def test_the_state_is_at_least_as_large_as_asked_and_has_a_few_hundred_tensors(nbytes: int) -> None:
    shapes = parameter_shapes(width_for(nbytes))
    elements = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes.values())
    assert 3 * 4 * elements >= nbytes
    assert 200 <= 3 * len(shapes) <= 500


def test_a_state_of_no_bytes_is_refused() -> None:
    with pytest.raises(BenchError, match="more than 0 GiB"):
        width_for(0)


# Many small tensors


def test_a_bar_is_met_or_missed_by_the_median() -> None:
    every = SMALL.judged(small_result(save_s=1.1, later_walk_s=0.011))
    assert {what: bar.met for what, bar in every.items()} == {
        "save holdfast": False,
        f"save {LATER}": True,
        "load holdfast": False,
        f"load {LATER}": True,
        "later walk, plain": False,
        "later walk, fsdp2": False,
    }
    with pytest.raises(BenchError, match=r"save holdfast 1\.1 s \(at most 1 s\): missed; load holdfast 1\.1 s"):
        require_bars(every.values())
    assert [bar.met for bar in PLAN.judged(plan_result()).values()] == [True] * 5


def test_a_scenario_is_of_full_size_with_all_its_state_and_rounds() -> None:
    every = (Options(), Options(rounds=7), Options(rounds=6), Options(scale=0.9))
    assert [options.scenario("io", rounds=7).is_full for options in every] == [True, True, False, False]


def test_the_small_tables_have_medians_extremes_and_bars() -> None:
    text = SMALL.render(small_result())
    later = "0.60 (0.50 to 0.70)"
    for line in (
        "| dcp | 40.00 | 40.00 | 2.0, 2.0 |",
        f"| holdfast-later | {later} | {later} | 2.0, 2.0 |",
        "| dcp `get_state_dict` | 90.0 | 90.0 |",
        "| save holdfast-later | 0.6 s (at most 1 s): met |",
    ):
        assert line in text.splitlines()
    for fact in ("8 ranks", "3,000 tensors"):
        assert fact in text


@pytest.mark.slow
def test_a_run_of_small_tensors_leaves_a_result_that_its_table_can_be_made_from(tmp_path: Path) -> None:
    measure(SMALL, Options(scale=0, rounds=2, folder=tmp_path), None, tmp_path)
    found = read_result("small", tmp_path)
    saves = found.part(SMALL_SAVES)
    assert {each.round for each in saves.samples if each.contender == LATER} == {0, 1, 2}
    assert {len(saves.series(name, measure=measure)) for measure in MEASURES for name in MANY} == {2}
    assert (saves.scenario.state.num_tensors, saves.scenario.state.nbytes) == (20, 20 * 4 * 16 * 4)
    assert len(found.parts) == 3
    assert "| 20 tensors |" in SMALL.render(found)


@pytest.mark.slow
def test_a_run_of_agreements_counts_the_messages_of_real_channels(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    options = Options(scale=0.15, rounds=2, folder=tmp_path, memory=tmp_path / "memory")
    measure(AGREEMENT, options, ["512", "2048"], tmp_path)
    found = read_result("agreement", tmp_path)
    assert [part.scenario.world for part in found.parts] == [77, 307]
    for each in found.parts:
        assert [sample.round for sample in each.samples] == [WARM_UP, 1, 2]
        assert each.median(OURS, "requests") < 200
        assert each.median(OURS) >= each.median(OURS, "memory_s") > 0
    assert not AGREEMENT.judged(found)
    assert not list((tmp_path / "memory").iterdir())


# Result file and table


@pytest.mark.parametrize("result", [io_result(SECONDS), small_result(), LOADS, engine_result()])
def test_a_result_file_reads_back_equal(result: Result, tmp_path: Path) -> None:
    write_result(result, tmp_path / "new")
    assert read_result(result.name, tmp_path / "new") == result


@pytest.mark.parametrize("name", ["small", "view"])
def test_a_missing_or_foreign_result_file_says_how_to_make_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "view.json").write_text("{}")
    with pytest.raises(BenchError, match=f"python -m bench {name}"):
        read_result(name, tmp_path)


def test_a_table_has_a_line_for_each_row_and_an_empty_head_for_an_empty_title() -> None:
    columns = (("double", lambda number: f"{2 * number}"), ("half", lambda number: f"{number / 2}"))
    assert lines_of("", {"one": 1, "two": 2}, *columns).splitlines() == [
        "| | double | half |",
        "|---|---|---|",
        "| one | 2 | 0.5 |",
        "| two | 4 | 1.0 |",
    ]


def test_the_table_has_a_row_per_contender_with_medians_and_extremes() -> None:
    lines = IO.render(io_result(SECONDS)).splitlines()
    assert lines[2] == "| raw limit | 1.10 (1.00 to 1.20) | 1 | 1.10 (1.00 to 1.20) | 1 | 1.00, 1.00 | 3, 3 |"
    dcp = "2.40 (2.20 to 4.00) | 0.50 (0.25 to 0.50)"
    assert lines[3] == f"| dcp | {dcp} | {dcp} | 1.00, 1.00 | 3, 3 |"


def test_the_table_says_how_it_was_measured() -> None:
    text = IO.render(io_result(SECONDS))
    for fact in (
        "2.00 GB, 300 tensors",
        "2 ranks",
        "3 rounds",
        "save, fast; load, fast",
        "0123456789ab",
        "2030-01-02",
    ):
        assert fact in text


@given(st.text(alphabet="ab\n"), st.text(alphabet="ab\n"), st.text(alphabet="ab\n"))
def test_only_what_stands_between_the_markers_is_replaced(before: str, old: str, after: str) -> None:
    once = replace_part(f"{before}{START}{old}{END}{after}", "bench", "new", where=README)
    assert once == f"{before}{START}\nnew\n{END}{after}"
    assert replace_part(once, "bench", "new", where=README) == once


@pytest.mark.parametrize("text", ["", START, END, f"{END}{START}", f"{START}{START}{END}"])
def test_a_file_without_its_place_for_the_table_is_an_error(text: str) -> None:
    with pytest.raises(BenchError, match=r"README\.md needs one line"):
        replace_part(text, "bench", "new", where=README)


def test_a_missing_document_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no .*benchmarks\.md"):
        documents(tmp_path, {})


def test_the_table_command_rewrites_the_tables_and_draws_the_charts(tmp_path: Path) -> None:
    write_all(tmp_path)
    publish(tmp_path)
    rendered = {each.name: each.render(FOUND[each.name]) for each in BENCHMARKS}
    assert (tmp_path / TABLES).read_text() == page(rendered)
    front = render_front(FOUND["io"], FOUND["engine"], FOUND["small"], FOUND["nodes"])
    assert (tmp_path / README).read_text() == place("front", front)
    assert (tmp_path / CHART).read_text() == render_chart(FOUND["io"], LOADS)
    assert (tmp_path / PLANNING).read_bytes().startswith(b"\x89PNG")


def test_the_short_table_takes_its_figures_from_all_benchmarks() -> None:
    lines = render_front(io_result(SECONDS), engine_result(), small_result(), FOUND["nodes"]).splitlines()
    assert lines[2].startswith("| background save, ms: the call + what the next step waits | 10 + ")
    assert lines[3] == "| save of 10,000 small tensors, 8 ranks, s | 0.90 | 40.00 | - |"
    lost = "one of 2 nodes is lost: restore from the others, of a plain copy over TCP"
    assert lines[4] == f"| {lost} | 0.90 | - | - |"
    assert lines[5] == "| CPU of a save + a load, s per GB | - + - | 1.00 + 1.00 | - + - |"
    assert lines[6] == "| extra memory of a rank in a save + in a load, MB | - + - | 3 + 3 | - + - |"


def test_the_chart_and_the_short_table_of_the_readme_are_those_of_the_results() -> None:
    names = ("io", "load", "engine", "small", "nodes")
    saves, loads, engine, small, nodes = (read_result(name, ROOT / RESULTS) for name in names)
    readme, (start, end) = (ROOT / README).read_text(), markers("front")
    advice = "run `make tables`"
    assert f"{start}\n{render_front(saves, engine, small, nodes)}\n{end}" in readme, advice
    assert (ROOT / CHART).read_text() == render_chart(saves, loads), advice


def test_the_tables_of_the_benchmarks_are_those_of_the_results() -> None:
    page = (ROOT / TABLES).read_text()
    for each in BENCHMARKS:
        table = place(each.name, each.render(read_result(each.name, ROOT / RESULTS)))
        assert table in page, f"the table {each.name} is another one: run `make tables`"


def test_the_chart_says_who_cannot_take_part_and_has_colours_for_dark_pages() -> None:
    chart = render_chart(io_result(SECONDS), LOADS)
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", chart)
    assert texts.count("0.50") == 3
    assert texts.count("not possible") == 6
    assert {"save", "load", "load FSDP onto TP", "PyTorch DCP"} <= set(texts)
    assert "prefers-color-scheme: dark" in chart


@pytest.mark.parametrize("name", ["io", "load"])
def test_no_table_is_written_from_a_run_that_did_not_reach_the_raw_limit(name: str, tmp_path: Path) -> None:
    beaten = SECONDS | {"dcp": (0.9, 1.1, 1.0)}
    write_all(tmp_path, io_result(beaten) if name == "io" else load_result(beaten))
    with pytest.raises(BenchError):
        publish(tmp_path)
    assert (tmp_path / TABLES).read_text() == page()


@pytest.mark.parametrize("missing", NAMES)
def test_where_one_table_has_no_place_no_table_is_written(tmp_path: Path, missing: str) -> None:
    write_all(tmp_path)
    before = page().replace(place(missing), "")
    (tmp_path / TABLES).write_text(before)
    with pytest.raises(BenchError, match=f"{missing}:start"):
        publish(tmp_path)
    assert (tmp_path / TABLES).read_text() == before
    assert (tmp_path / README).read_text() == place("front")


def place(name: str, content: str = "") -> str:
    """The place of a table, with its content."""
    return "\n".join((markers(name)[0], content, markers(name)[1]))


def page(rendered: Mapping[str, str] | None = None) -> str:
    """A document with places for all tables, and what was rendered in them."""
    return "# Title\n" + "\nMiddle\n".join(place(name, (rendered or {}).get(name, "")) for name in NAMES)


def write_all(root: Path, *others: Result) -> None:
    """A repository with results of all benchmarks, some of them others than those of `FOUND`, and empty documents."""
    for result in (*FOUND.values(), *others):
        write_result(result, root / RESULTS)
    (root / TABLES).parent.mkdir()
    (root / TABLES).write_text(page())
    (root / README).write_text(place("front"))
