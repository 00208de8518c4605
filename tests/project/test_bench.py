"""The rules by which the benchmarks judge their own results. No test depends on a time."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contenders import LATER
from bench.environment import filesystem
from bench.errors import BenchError, MarkersError, RankFailedError, RawLimitError, SetupError, WrongBytesError
from bench.front import render_front
from bench.io import render_io
from bench.markdown import table as lines_of
from bench.marked import CHART, README, TABLES, markers, read_marked, replace_part
from bench.meter import Meter
from bench.plan import bars as plan_bars
from bench.plot import render_chart
from bench.raw import RAW_WAYS, RawFile, RawImage, RawWay, takes_direct
from bench.runner import Failure, Found, Span, collect, require_same, together
from bench.save_load import MEASURES, SaveLoad
from bench.schema import (
    RAW,
    RESULTS,
    WARM_UP,
    Result,
    Sample,
    StateSize,
    chosen,
    read_result,
    require_bars,
    require_raw_limit,
    write_result,
)
from bench.small import NAMES as SMALL_NAMES
from bench.small import SAVES as SMALL_SAVES
from bench.small import bars as small_bars
from bench.small import render_small, small
from bench.state import LlamaLike, ManySmall, parameter_shapes, width_for
from bench.statistics import fastest, median, paired_ratios, rotated, text
from bench.table import TABLES_OF, table
from tests.project.bench_results import (
    SECONDS,
    engine_result,
    history_result,
    io_result,
    load_part,
    load_result,
    part,
    plan_result,
    sample,
    small_result,
    view_result,
)

ROOT = Path(__file__).parents[2]
START, END = markers("bench")
LOADS = load_result(SECONDS)
PLACES = tuple(place for place, _ in TABLES_OF.values())


# Statistics


def test_of_a_series_the_median_and_the_extremes_are_shown() -> None:
    assert median([3.0, 1.0, 10.0]) == 3.0
    assert text([3.0, 1.0, 10.0]) == "3.00 (1.00 to 10.00)"
    assert text([0.003, 0.001], 1, scale=1e3) == "2.0 (1.0 to 3.0)"


def test_an_empty_series_has_no_median_and_is_shown_as_a_dash() -> None:
    assert text([]) == "-"
    with pytest.raises(ValueError, match="at least one sample"):
        median([])


def test_ratios_are_paired_by_round_and_not_taken_from_medians() -> None:
    assert paired_ratios([1.0, 4.0], [2.0, 4.0]) == [0.5, 1.0]


def test_series_of_different_length_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_ratios([1.0], [1.0, 2.0])


@given(st.integers(1, 9))
def test_over_as_many_rounds_as_entrants_each_takes_each_turn_once(number: int) -> None:
    items = tuple(range(number))
    orders = [rotated(items, turn) for turn in range(number)]
    assert all(sorted(column) == list(items) for column in zip(*orders, strict=True))


def test_the_fastest_series_is_the_one_with_the_lowest_median_not_the_lowest_sample() -> None:
    assert fastest({"a": (2.0, 2.0, 2.0), "b": (1.0, 1.1, 1.2), "c": (0.1, 1.5, 1.5)}) == "b"


# Summaries and the rule of the raw limit


def test_the_raw_limit_is_the_best_of_its_ways_and_says_which() -> None:
    (found,) = io_result(SECONDS).parts
    assert (found.raw_way("save"), median(found.series(RAW, measure="save"))) == ("fast", 1.1)
    assert found.shares(RAW, measure="save") == [1.0, 1.0, 1.0]


def test_a_contender_has_the_paired_share_and_the_cost_of_all_ranks() -> None:
    (found,) = io_result(SECONDS).parts
    assert found.shares("dcp", measure="load") == pytest.approx([0.25, 0.5, 0.5])
    assert found.cpu_s_per_gb("dcp", measure="load") == pytest.approx(1.0)
    assert found.peak_nbytes("dcp", "load") == 3_000_000


def test_a_contender_that_beats_the_raw_limit_is_an_error_of_the_harness() -> None:
    (beaten,) = io_result(SECONDS | {"dcp": (0.9, 1.1, 1.0)}).parts
    with pytest.raises(
        RawLimitError, match=r"dcp .* raw limit was not reached by the raw loop.*Add a way to .*, or rounds"
    ):
        require_raw_limit(beaten, *MEASURES)


def test_a_contender_within_the_noise_of_the_raw_limit_is_none() -> None:
    (noisy,) = io_result(SECONDS | {"dcp": (0.97, 1.17, 1.08)}).parts
    assert median(noisy.shares("dcp", measure="save")) > 1
    require_raw_limit(noisy, *MEASURES)


# Errors of a run


def test_a_contender_that_loads_other_bytes_is_an_error_that_names_it_and_the_tensor() -> None:
    with pytest.raises(WrongBytesError, match=r"dcp loaded other bytes.*1 of 2 parts differ, the first is b"):
        require_same({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, name="dcp")


def test_a_tensor_that_vanished_in_a_load_is_an_error() -> None:
    with pytest.raises(WrongBytesError, match="the first is a"):
        require_same({"a": "1"}, {}, name="dcp")


def test_an_unknown_contender_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SetupError, match=r"no contender zip.*raw, torch.save, dcp, .*holdfast"):
        SaveLoad(world=2, rounds=7, recipe=LlamaLike(1), contenders=("zip",)).num_samples()


def test_what_is_asked_for_is_chosen_in_the_known_order() -> None:
    assert chosen(["c", "a"], ("a", "b", "c"), kind="letter") == ("a", "c")
    assert chosen(None, ("a", "b"), kind="letter") == ("a", "b")


def test_a_run_that_does_not_fit_on_the_disk_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="smaller state"):
        SaveLoad(world=2, rounds=7, recipe=LlamaLike(1 << 60), contenders=("raw",)).require_space(tmp_path)


@pytest.mark.parametrize(("peer_rounds", "walk_rounds", "layers"), [(0, 1, 1), (6, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_run_of_small_tensors_without_all_of_its_parts_is_refused(
    peer_rounds: int, walk_rounds: int, layers: int
) -> None:
    with pytest.raises(SetupError, match="at least one"):
        small(rounds=5, peer_rounds=peer_rounds, walk_rounds=walk_rounds, layers=layers)


def test_a_rank_that_dies_without_a_word_is_an_error_with_its_status() -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=os._exit, args=(3,), name="rank")
    process.start()
    sender.close()
    with pytest.raises(RankFailedError, match="rank ended with status 3"):
        collect({receiver: process}, on_sample=lambda _: None)


def test_what_ended_a_rank_is_reported_at_once_though_other_ranks_still_run() -> None:
    context = multiprocessing.get_context("spawn")
    failing, silent = context.Pipe(duplex=False), context.Pipe(duplex=False)
    failing[1].send(Failure(text="no space"))
    processes = {failing[0]: context.Process(name="rank 0"), silent[0]: context.Process(name="rank 1")}
    with pytest.raises(RankFailedError, match="rank 0 failed: no space"):
        collect(processes, on_sample=lambda _: None)


def test_the_warm_up_counts_for_memory_alone() -> None:
    warm_up = sample("load", "dcp", WARM_UP, 100.0, peak_extra_nbytes=(5, 7))
    found = part("io", [warm_up, sample("load", "dcp", 1, 2.0, peak_extra_nbytes=())])
    assert (found.series("dcp", measure="load"), found.peak_nbytes("dcp", "load")) == ([2.0], 7)


def test_of_several_ranks_spans_become_one_and_numbers_stay_apart() -> None:
    found: list[Found] = [{"seconds": Span(1.0, 3.0), "cpu_s": 0.5}, {"seconds": Span(2.0, 5.0), "cpu_s": 0.25}]
    assert together(found) == {"seconds": (4.0,), "cpu_s": (0.5, 0.25)}


def test_the_meter_watches_memory_where_it_is_asked_to() -> None:
    meter = Meter(watch_memory=True)
    own = bytearray(64 << 20)
    time.sleep(0.5)
    del own
    peak = meter.stop()["peak_extra_nbytes"]
    assert 63 << 20 < peak < 80 << 20
    assert "peak_extra_nbytes" not in Meter().stop()


def test_what_ranks_send_is_collected_and_seen() -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=int)
    process.start()
    size = StateSize(nbytes=1, num_tensors=1, num_values=0)
    sent = [sample("save", "dcp", number, 1.0) for number in (WARM_UP, 1)]
    for message in (size, *sent):
        sender.send(message)
    sender.close()
    seen: list[Sample] = []
    assert collect({receiver: process}, on_sample=seen.append) == (size, tuple(sent))
    assert seen == sent


# The raw loop and the state


@pytest.mark.parametrize("way", RAW_WAYS.values(), ids=RAW_WAYS)
@pytest.mark.parametrize("nbytes", [1, 4096, (32 << 20) + 4097])
@pytest.mark.parametrize("direct", [False, True])
def test_the_raw_loop_reads_back_exactly_the_bytes_it_wrote(
    tmp_path: Path, way: RawWay, nbytes: int, direct: bool
) -> None:
    if direct and not takes_direct(tmp_path):
        pytest.skip("this filesystem refuses O_DIRECT")
    data = b"\1" + os.urandom(nbytes - 1)  # differs from a cleared image even where it is one byte
    image = RawImage([memoryview(data[: nbytes // 3]), memoryview(data[nbytes // 3 :])])
    file = RawFile(image, way, direct=direct)
    file.write(tmp_path / "file")
    saved = image.digests()
    image.clear()
    cleared = image.digests()
    file.read(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data
    assert image.digests() == saved != cleared


def test_a_raw_file_that_was_cut_is_an_error_and_no_short_read(tmp_path: Path) -> None:
    file = RawFile(RawImage([memoryview(bytes(10_000))]), RawWay(1, 16 << 20), direct=False)
    file.write(tmp_path / "file")
    os.truncate(tmp_path / "file", 5000)
    with pytest.raises(OSError, match="ended at byte 5000 of 10000"):
        file.read(tmp_path / "file")


@given(st.integers(1, 1 << 36))
def test_the_state_is_at_least_as_large_as_asked_and_has_a_few_hundred_tensors(nbytes: int) -> None:
    shapes = parameter_shapes(width_for(nbytes))
    elements = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes.values())
    assert 3 * 4 * elements >= nbytes
    assert 200 <= 3 * len(shapes) <= 500


def test_a_state_of_no_bytes_is_refused() -> None:
    with pytest.raises(SetupError, match="more than 0 GiB"):
        width_for(0)


def test_the_filesystem_of_a_folder_is_that_of_the_innermost_mount() -> None:
    assert filesystem(Path("/proc/self")) == "proc"


# Many small tensors


def test_a_contender_that_is_limited_takes_part_in_the_first_rounds_and_has_no_warm_up() -> None:
    job = SaveLoad(world=8, rounds=3, recipe=ManySmall(20), contenders=SMALL_NAMES, at_most={"dcp": 2})
    others = ("holdfast", LATER)
    assert [job.entrants(number) for number in range(4)] == [others, SMALL_NAMES, SMALL_NAMES, others]
    assert job.num_samples() == 2 * (2 + 3 + 3 + 2)


def test_later_saves_go_into_one_run_and_all_others_into_new_folders(tmp_path: Path) -> None:
    job = SaveLoad(world=8, rounds=3, recipe=ManySmall(20), contenders=SMALL_NAMES)
    folders = {name: {job.folder_of(name, number, tmp_path) for number in range(3)} for name in SMALL_NAMES}
    assert {name: len(of_name) for name, of_name in folders.items()} == {"dcp": 3, "holdfast": 3, LATER: 1}


def test_a_bar_is_met_or_missed_by_the_median() -> None:
    every = tuple(small_bars(small_result(save_s=1.1, later_walk_s=0.011)))
    assert {bar.what: bar.met for bar in every} == {
        "save holdfast": False,
        f"save {LATER}": True,
        "load holdfast": False,
        f"load {LATER}": True,
        "later walk, plain": False,
        "later walk, fsdp2": False,
    }
    with pytest.raises(BenchError, match=r"save holdfast 1\.10 s: missed; load holdfast 1\.10 s: missed; later walk"):
        require_bars(every)
    assert [bar.met for bar in plan_bars(plan_result())] == [True] * 5


def test_the_bars_hold_only_for_a_run_of_full_size() -> None:
    assert [bar.what for bar in small_bars(small_result(num_tensors=20))] == ["later walk, plain", "later walk, fsdp2"]


def test_the_small_tables_have_medians_extremes_and_how_often_the_peer_ran() -> None:
    text = render_small(small_result())
    later = "0.60 (0.50 to 0.70)"
    for line in (
        "| dcp | 40.00 | 40.00 | 2.0, 2.0 |",
        f"| holdfast, later saves into one run (loads verified) | {later} | {later} | 2.0, 2.0 |",
        "| dcp `get_state_dict` | 90.0 (90.0 to 90.0) | 90.0 (90.0 to 90.0) |",
    ):
        assert line in text.splitlines()
    for fact in ("16 x 16", "8 ranks", "takes part in 1 of", "save holdfast-later 0.60 s: met", "3,000 tensors"):
        assert fact in text


@pytest.mark.slow
def test_a_run_of_small_tensors_leaves_a_result_that_its_table_can_be_made_from(tmp_path: Path) -> None:
    small(tensors=20, world=2, rounds=1, layers=1, walk_rounds=1, folder=tmp_path, results=tmp_path)
    found = read_result(tmp_path / "small.json", command="small")
    saves = found.part(SMALL_SAVES)
    assert [len(saves.series(name, measure=measure)) for measure in MEASURES for name in SMALL_NAMES] == [1] * 6
    assert (saves.scenario.state.num_tensors, saves.scenario.state.nbytes) == (20, 20 * 4 * 16 * 4)
    assert len(found.parts) == 3
    assert "| 20 tensors |" in render_small(found)


# Result file and table


@pytest.mark.parametrize("result", [io_result(SECONDS), small_result(), LOADS, engine_result()])
def test_a_result_file_reads_back_equal(result: Result, tmp_path: Path) -> None:
    assert read_result(write_result(result, tmp_path / "new"), command=result.name) == result


@pytest.mark.parametrize("name", ["missing.json", "foreign.json"])
def test_a_missing_or_foreign_result_file_says_how_to_make_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "foreign.json").write_text("{}")
    with pytest.raises(SetupError, match="python -m bench small"):
        read_result(tmp_path / name, command="small")


def test_a_table_has_a_line_for_each_row_and_a_cell_for_each_column() -> None:
    columns = [("double", lambda key: str(2 * key)), ("half", lambda key: str(key / 2))]
    assert lines_of("", {1: "one", 2: "two"}, columns) == [
        "| | double | half |",
        "|---|---|---|",
        "| one | 2 | 0.5 |",
        "| two | 4 | 1.0 |",
    ]


def test_the_table_has_a_row_per_contender_with_medians_and_extremes() -> None:
    lines = render_io(io_result(SECONDS)).splitlines()
    assert lines[2] == "| raw limit | 1.10 (1.00 to 1.20) | 1 | 1.10 (1.00 to 1.20) | 1 | 1.00, 1.00 | 3, 3 |"
    dcp = "2.40 (2.20 to 4.00) | 0.50 (0.25 to 0.50)"
    assert lines[3] == f"| dcp | {dcp} | {dcp} | 1.00, 1.00 | 3, 3 |"


def test_the_table_says_how_it_was_measured() -> None:
    text = render_io(io_result(SECONDS))
    for fact in (
        "2.00 GB (300 tensors)",
        "2 ranks",
        "3 interleaved rounds",
        "(save fast, load fast)",
        "0123456789ab",
        "2030-01-02",
    ):
        assert fact in text


@given(st.text(alphabet="ab\n"), st.text(alphabet="ab\n"), st.text(alphabet="ab\n"))
def test_only_what_stands_between_the_markers_is_replaced(before: str, old: str, after: str) -> None:
    once = replace_part(f"{before}{START}{old}{END}{after}", "bench", "new", where="README.md")
    assert once == f"{before}{START}\nnew\n{END}{after}"
    assert replace_part(once, "bench", "new", where="README.md") == once


@pytest.mark.parametrize("text", ["", START, END, f"{END}{START}", f"{START}{START}{END}"])
def test_a_file_without_its_place_for_the_table_is_an_error_and_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(MarkersError, match=r"README\.md needs one line"):
        run_table(io_result(SECONDS), readme)
    assert readme.read_text() == text


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(MarkersError, match=r"no .*README\.md"):
        read_marked(tmp_path / "README.md", "bench")


def test_the_table_command_rewrites_the_tables_and_draws_the_chart(tmp_path: Path) -> None:
    document, chart = tmp_path / "benchmarks.md", tmp_path / "figures" / "speed.svg"
    document.write_text("# Title\n" + "\n".join(f"{place(name)}\nMiddle" for name in PLACES))
    front = run_table(io_result(SECONDS), document, chart=chart)
    results = (
        io_result(SECONDS),
        LOADS,
        engine_result(),
        small_result(),
        view_result(),
        plan_result(),
        history_result(),
    )
    rendered = {name: render(found) for (name, render), found in zip(TABLES_OF.values(), results, strict=True)}
    assert document.read_text() == "# Title\n" + "\n".join(f"{place(name, rendered[name])}\nMiddle" for name in PLACES)
    assert front == render_front(io_result(SECONDS), engine_result(), small_result())
    assert chart.read_text() == render_chart(io_result(SECONDS), LOADS)


def test_the_short_table_takes_its_figures_from_all_benchmarks() -> None:
    lines = render_front(io_result(SECONDS), engine_result(), small_result()).splitlines()
    assert lines[2].startswith("| background save, ms: the call + what the next step waits | 10 + ")
    assert lines[3] == "| save of 10,000 small tensors, 8 ranks, s | 0.90 | 40.00 | - |"
    assert lines[4] == "| CPU of a save + a load, s per GB | - + - | 1.00 + 1.00 | - + - |"
    assert lines[5] == "| extra memory of a rank in a save + in a load, MB | - + - | 3 + 3 | - + - |"


def test_the_chart_and_the_short_table_of_the_readme_are_those_of_the_results() -> None:
    saves, loads, engine, small = (committed(name) for name in ("io", "load", "engine", "small"))
    readme, (start, end) = (ROOT / README).read_text(), markers("front")
    advice = "run `make tables`"
    assert f"{start}\n{render_front(saves, engine, small)}\n{end}" in readme, advice
    assert (ROOT / CHART).read_text() == render_chart(saves, loads), advice


def test_the_tables_of_the_benchmarks_are_those_of_the_results() -> None:
    page = (ROOT / TABLES).read_text()
    for name, (where, render) in TABLES_OF.items():
        assert place(where, render(committed(name))) in page, f"the table {name} is another one: run `make tables`"


def test_the_chart_says_who_cannot_take_part_and_has_colours_for_dark_pages() -> None:
    moved = load_part(SECONDS, name="fsdp-tp", title="FSDP onto TP")
    chart = render_chart(io_result(SECONDS), Result("load", (moved,)))
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", chart)
    assert texts.count("0.50") == 3
    assert texts.count("not possible") == 6
    assert {"save", "load", "load FSDP onto TP", "PyTorch DCP"} <= set(texts)
    assert "prefers-color-scheme: dark" in chart


def test_no_table_is_written_from_a_run_that_did_not_reach_the_raw_limit(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(place(name, "old") for name in PLACES))
    beaten = SECONDS | {"dcp": (0.9, 1.1, 1.0)}
    with pytest.raises(RawLimitError):
        run_table(io_result(beaten), readme)
    with pytest.raises(RawLimitError):
        run_table(io_result(SECONDS), readme, loads=load_result(beaten))
    assert "old" in readme.read_text()


@pytest.mark.parametrize("missing", PLACES)
def test_where_one_table_has_no_place_no_table_is_written(tmp_path: Path, missing: str) -> None:
    readme = tmp_path / "README.md"
    before = "\n".join(place(name, "old") for name in PLACES if name != missing)
    readme.write_text(before)
    with pytest.raises(MarkersError, match=f"{missing}:start"):
        run_table(io_result(SECONDS), readme)
    assert readme.read_text() == before


def place(name: str, content: str = "") -> str:
    """The place of a table, with its content."""
    return "\n".join((markers(name)[0], content, markers(name)[1]))


def committed(name: str) -> Result:
    """The result of a benchmark in this repository."""
    return read_result(ROOT / RESULTS / f"{name}.json", command=name)


def run_table(figures: Result, document: Path, *, chart: Path | None = None, loads: Result = LOADS) -> str:
    """`bench table` of `figures`, of `loads`, and of runs of the other benchmarks. Return the short table."""
    folder = document.parent / "results"
    readme, (start, end) = document.with_name("front.md"), markers("front")
    readme.write_text(f"{start}\n{end}\n")
    others = (small_result(), engine_result(), view_result(), plan_result(), history_result())
    for result in (figures, loads, *others):
        write_result(result, folder)
    table(results=folder, document=document, readme=readme, chart=chart or folder / "speed.svg")
    return readme.read_text().removeprefix(f"{start}\n").removesuffix(f"\n{end}\n")
