"""Files of events are read as far as they can be read."""

from __future__ import annotations

from pathlib import Path

from holdfast.store.base import Location
from holdfast.telemetry.event_files import folder_beside, no_events, read_events
from tests.support.recorded_job import recorded_job, write_records


def test_what_was_written_is_read(tmp_path: Path) -> None:
    records = recorded_job()
    write_records(tmp_path, records)
    assert read_events(tmp_path) == (records, 0, 0)


def test_a_line_that_a_kill_tore_is_left_out(tmp_path: Path) -> None:
    records = recorded_job(num_ranks=1)
    write_records(tmp_path, records)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    assert read_events(tmp_path) == (records[:-1], 0, 0)


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    records = recorded_job(num_ranks=1)
    write_records(tmp_path, records)
    (path,) = tmp_path.iterdir()
    brackets = b'{"extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    path.write_bytes(b'{"event": 3}\n\xff\xfe\n' + brackets + b"\n" + path.read_bytes())
    assert read_events(tmp_path) == (records, 3, 0)


def test_of_large_files_the_newest_part_is_read(tmp_path: Path) -> None:
    records = recorded_job(num_ranks=1, num_saves=300)
    write_records(tmp_path, records)
    found = read_events(tmp_path, most_nbytes=70_000)
    assert 0 < len(found.records) < len(records)
    assert found.records == records[-len(found.records) :]
    assert (found.num_damaged, found.num_cut) == (0, 1)


def test_the_files_of_the_first_rank_get_half_of_what_is_read(tmp_path: Path) -> None:
    records = recorded_job(num_ranks=8, num_saves=40)
    write_records(tmp_path, records)
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    found = read_events(tmp_path, most_nbytes=2 * sizes[0])
    assert [each for each in found.records if each.rank == 0] == [each for each in records if each.rank == 0]
    assert 0 < sum(each.rank == 1 for each in found.records) < sum(each.rank == 1 for each in records)
    assert found.num_cut == 7


def test_small_files_leave_what_they_do_not_need_to_large_ones(tmp_path: Path) -> None:
    records = recorded_job(num_ranks=1, num_saves=40)
    write_records(tmp_path, records)
    (path,) = tmp_path.iterdir()
    for number in range(9):
        (tmp_path / f"rank-00000-{number}.jsonl").write_bytes(b"")
    assert read_events(tmp_path, most_nbytes=path.stat().st_size + 9 * 4096) == (records, 0, 0)


def test_no_folder_holds_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none") == ([], 0, 0)


def test_events_lie_beside_a_run_that_is_a_folder() -> None:
    assert folder_beside(Location("/shared/runs/gpt")) == Path("/shared/runs/gpt.events")
    assert folder_beside(Location("memory://gpt")) is None


def test_the_files_of_the_first_rank_can_be_read_alone(tmp_path: Path) -> None:
    records = recorded_job(num_ranks=8, num_saves=40)
    write_records(tmp_path, records)
    of_first = [each for each in records if each.rank == 0]
    assert read_events(tmp_path, of_first_rank_only=True) == (of_first, 0, 0)
    assert read_events(tmp_path, most_nbytes=30_000, of_first_rank_only=True).num_cut == 1


def test_a_run_in_a_bucket_without_events_is_told_to_name_a_folder() -> None:
    assert "JsonLines('/shared/events')" in no_events(None, "s3://bucket/run").action
