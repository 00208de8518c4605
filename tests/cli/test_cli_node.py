"""``holdfast node`` lists the contents of this node's memory, and frees them on request."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.node_memory.claims import Claim
from holdfast.node_memory.generations import mark_protected
from holdfast.node_memory.inventory import write_run
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotKind, SlotState
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.keeper import test_keeper
from tests.keeper.test_keeper import states
from tests.keeper.test_persist import Saved, assert_loads
from tests.node_memory.test_node_memory import MIB, fill_memory, kept
from tests.node_memory.test_slots import filled
from tests.support.command_line import holdfast_command
from tests.support.nursery import until

run, folder, saved = test_keeper.run, test_keeper.folder, test_keeper.saved


def test_the_command_lists_what_lies_in_memory_frees_what_is_durable_and_ends_keepers(
    run: Run, saved: Saved, folder: NodeFolder
) -> None:
    options = ("--node-dir", folder.node_dir)
    with kept(folder, run.storage.location.url) as process:
        until(lambda: states(saved) == {SlotState.COMMITTED})
        with Claim(folder, 0):
            (row,) = holdfast_command("node", *options, "--json").json["runs"]
            assert (row["run"], row["keeper_pid"]) == (run.storage.location.url, process.pid)
            found = [(slot["rank"], slot["step"], slot["state"], slot["owner"]) for slot in row["slots"]]
            assert found == [(0, 7, "committed", "trainer"), (1, 7, "committed", "keeper")]
            assert all(0 <= slot["age_s"] < 60 and slot["nbytes"] > MIB for slot in row["slots"])
            text = holdfast_command("node", *options)
            assert text.status == 0
            assert f"{run.storage.location.url}: keeper {process.pid}; {folder.path}" in text.out
            to_free = f"holdfast node --node-dir {folder.node_dir} --free"
            assert f"are durable, and their trainers have ended; {to_free} frees them" in text.out
            done = holdfast_command("node", run.storage.location.url, *options, "--free", "--json").json
            assert done["freed_nbytes"] > MIB
            freed = {"run": run.storage.location.url, "folder": str(folder.path), "nbytes": done["freed_nbytes"]}
            assert done["freed"] == [freed]
            assert [slot["rank"] for slot in done["runs"][0]["slots"]] == [0]
            other = Run.create(open_store(Location(f"{run.storage.location}2"))).storage.location.url
            assert holdfast_command("node", other, *options, "--free", "--json").json["runs"] == []
        done = holdfast_command("node", *options, "--stop", "--json").json
        assert done["ended"] == [str(folder.path)]
        assert process.wait(30) == 0
    assert done["runs"] == []
    assert not folder.path.exists()
    assert_loads(run, saved)


def test_the_command_tells_copies_and_parity_from_own_snapshots_and_says_what_is_protected(tmp_path: Path) -> None:
    checkpoint_id = ""
    with NodeFolder("run", node_dir=tmp_path) as folder:
        for kind, rank in ((SlotKind.SNAPSHOT, 3), (SlotKind.COPY, 1), (SlotKind.PARITY, 0)):
            with Slot.create(folder, rank=rank, nbytes=MIB, kind=kind) as slot:
                contents = filled(slot, SlotState.HELD).record.contents
                assert contents is not None
                checkpoint_id = contents.checkpoint_id
        (row,) = holdfast_command("node", "--node-dir", tmp_path, "--json").json["runs"]
        found = [(slot["kind"], slot["rank"], slot["is_protected"]) for slot in row["slots"]]
        assert found == [("slot", 3, False), ("copy", 1, False), ("parity", 0, False)]
        mark_protected(folder, checkpoint_id)
    (row,) = holdfast_command("node", "--node-dir", tmp_path, "--json").json["runs"]
    assert all(slot["is_protected"] for slot in row["slots"])
    lines = holdfast_command("node", "--node-dir", tmp_path).out.splitlines()
    assert [line.partition("nobody")[2].split(maxsplit=1) for line in lines[-3:]] == [
        ["yes", "own snapshot"],
        ["yes", "copy for another node"],
        ["yes", "parity"],
    ]


def test_free_names_each_run_whose_memory_it_frees_though_nothing_is_left_of_it(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with NodeFolder(name, node_dir=tmp_path) as folder:
            write_run(folder, f"/runs/{name}")
            fill_memory(folder, SlotState.COMMITTED)
    done = holdfast_command("node", "--node-dir", tmp_path, "--free").out.splitlines()
    assert done == [
        "/runs/first: freed 40.0 MiB",
        "/runs/second: freed 40.0 MiB",
        "freed 80.0 MiB",
        f"{tmp_path}: 0 runs, 0 B",
    ]
    again = holdfast_command("node", "--node-dir", tmp_path, "--free").out
    assert again.startswith("freed 0 B\n")


def test_the_command_that_frees_names_the_folder_and_the_run_that_were_listed(tmp_path: Path) -> None:
    with NodeFolder("one", node_dir=tmp_path) as folder:
        write_run(folder, "/runs/one run")
        fill_memory(folder, SlotState.COMMITTED)
    listed = holdfast_command("node", "--node-dir", tmp_path).out
    assert f"; holdfast node --node-dir {tmp_path} --free frees them" in listed
    listed = holdfast_command("node", "/runs/one run", "--node-dir", tmp_path).out
    assert f"; holdfast node '/runs/one run' --node-dir {tmp_path} --free frees them" in listed


def test_a_snapshot_that_was_given_up_is_not_called_durable(run: Run, saved: Saved, folder: NodeFolder) -> None:
    run.open_epoch(after=1, opened_from=None, why="start", world_size=2, incarnation="1" * 32)
    with kept(folder, run.storage.location.url):
        until(lambda: states(saved) == {SlotState.FENCED})
    (row,) = holdfast_command("node", "--node-dir", folder.node_dir, "--json").json["runs"]
    assert [(each["state"], each["is_durable"], each["is_freeable"]) for each in row["slots"]] == [
        ("fenced", False, True)
    ] * 2
    text = holdfast_command("node", "--node-dir", folder.node_dir).out
    assert "are durable or given up, and their trainers have ended" in text


def test_the_command_says_which_keeper_does_not_end(run: Run, folder: NodeFolder) -> None:
    with kept(folder, run.storage.location.url) as process:
        process.send_signal(signal.SIGSTOP)
        done = holdfast_command("node", "--node-dir", folder.node_dir, "--stop", "--grace-s", "0.2")
        process.send_signal(signal.SIGCONT)
        assert done.status == 3
        assert f"{run.storage.location.url}: its keeper has not ended yet" in done.out
        assert process.poll() is None, "a request ends with whoever made it"


def test_the_command_makes_nothing_where_nothing_is(tmp_path: Path) -> None:
    assert "0 runs" in holdfast_command("node", "--node-dir", tmp_path).out
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_nowhere_is_not_found_and_not_zero_runs(tmp_path: Path) -> None:
    for more in ((), ("--free",), ("--stop",)):
        done = holdfast_command("node", tmp_path / "NOSUCH", "--node-dir", tmp_path, "--json", *more)
        assert done.status == 3
        assert done.json["error"]["code"] == "not_found.run"


def test_a_run_without_memory_is_named_and_not_counted_as_zero_runs(tmp_path: Path) -> None:
    Run.create(open_store(Location(str(tmp_path / "run"))))
    done = holdfast_command("node", tmp_path / "run", "--node-dir", tmp_path)
    assert done.out == f"{tmp_path}: no snapshots of {tmp_path / 'run'}\n"


def test_a_node_dir_that_is_not_there_is_an_error_and_not_an_empty_node(tmp_path: Path) -> None:
    done = holdfast_command("node", "--node-dir", tmp_path / "typo")
    assert done.status == 2
    assert "[config.node_dir]" in done.err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
@pytest.mark.parametrize("command", ["keeper --idle-s", "keeper --grace-s", "node --grace-s"])
def test_what_is_no_number_of_seconds_is_refused(tmp_path: Path, command: str, seconds: str) -> None:
    name, option = command.split()
    done = holdfast_command(name, tmp_path / "run", option, seconds, "--node-dir", tmp_path)
    assert done.status == 2
    assert f"{float(seconds)} is not a number of seconds" in done.err
