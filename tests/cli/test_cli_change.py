"""``holdfast rollback`` and ``holdfast rm`` ask before they change a run, and name the old head and the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from tests.support.command_line import INTERRUPT, Done, at_terminal, folder_of, holdfast_command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 to 3."""
    path = tmp_path / "gpt"
    for step in (1, 2, 3):
        holdfast.save(path, {"w": torch.arange(step * 10.0)}, step)
    return path


def head(run: Path) -> int:
    return holdfast.open(run).step


@pytest.mark.parametrize("to", ["1.1", "step=1"])
def test_a_rollback_makes_an_older_checkpoint_the_head(run: Path, to: str) -> None:
    done = holdfast_command("rollback", run, "--to", to, "--yes")
    assert (done.status, head(run)) == (0, 1)
    assert done.lines[0] == f"{run}: the head is step 3 at 1.3"
    assert "abandons      1.3, 1.2 (kept" in done.out
    assert done.lines[-1] == "the head was step 3 at 1.3 and is step 1 at 1.1"


def test_a_rollback_to_the_head_says_that_it_stays(run: Path) -> None:
    done = holdfast_command("rollback", run, "--to", "1.3", "--yes")
    assert (done.status, done.lines[-1]) == (0, "the head is still step 3 at 1.3")


def test_a_rollback_can_be_taken_back(run: Path) -> None:
    holdfast_command("rollback", run, "--to", "1.1", "--yes")
    assert holdfast_command("rollback", run, "--to", "1.3", "--yes").status == 0
    assert head(run) == 3


def test_a_rollback_to_an_abandoned_checkpoint_names_exactly_what_it_abandons(run: Path) -> None:
    holdfast_command("rollback", run, "--to", "1.2", "--yes")
    state = {"w": torch.zeros(20)}
    holdfast.load(run, state)
    place = holdfast.save(run, state, 7).place
    before = {row.place for row in holdfast.ls(run) if row.abandoned}
    done = holdfast_command("rollback", run, "--to", "1.3", "--yes")
    after = {row.place for row in holdfast.ls(run) if row.abandoned}
    assert (before, after) == ({"1.3"}, {place})
    assert f"abandons      {place} (kept" in done.out


def test_a_rollback_as_json_says_both_heads(run: Path) -> None:
    assert holdfast_command("rollback", run, "--to", "1.2", "--yes", "--json").json == {
        "run": str(run),
        "place": "1.2",
        "step": 2,
        "head_before": {"place": "1.3", "step": 3, "damage": None},
        "head": {"place": "1.2", "step": 2, "damage": None},
    }


def test_a_rollback_to_what_cannot_be_loaded_is_refused(run: Path) -> None:
    (folder_of(run, 1) / "data-00000.safetensors").unlink()
    done = holdfast_command("rollback", run, "--to", "1.1", "--yes")
    assert (done.status, head(run)) == (3, 3)
    assert "corrupt.incomplete" in done.err


@pytest.mark.parametrize(("answer", "status", "step"), [("y\n", 0, 1), ("n\n", 3, 3), ("\n", 3, 3), ("\x04", 3, 3)])
def test_a_rollback_asks_first(run: Path, answer: str, status: int, step: int) -> None:
    done = at_terminal("rollback", str(run), "--to", "1.1", answer=answer)
    assert (done.status, head(run)) == (status, step)
    assert "Go back? [y/N]" in done.out
    assert ("Nothing was changed." in done.out) == bool(status)


def test_an_interrupt_at_the_question_changes_nothing(run: Path) -> None:
    done = at_terminal("rm", f"{run}@1.1", answer=INTERRUPT)
    assert done.status == 130
    assert folder_of(run, 1).exists()


@pytest.mark.parametrize("command", [["rollback", "{run}", "--to", "1.1"], ["rm", "{run}@1.1"]])
def test_without_a_terminal_a_change_needs_yes(run: Path, command: list[str]) -> None:
    done = holdfast_command(*(argument.format(run=run) for argument in command))
    assert (done.status, head(run), "--yes" in done.err) == (2, 3, True)
    assert len(removed_and_kept(run)) == 3


def test_a_rollback_to_the_head_does_not_say_that_the_run_goes_back(run: Path) -> None:
    done = holdfast_command("rollback", run, "--to", "1.3", "--yes")
    assert (done.status, "stays at" in done.out, "goes back to" in done.out) == (0, True, False)
    assert done.lines[-1] == "the head is still step 3 at 1.3"


@pytest.mark.parametrize("which", ["1.2", "step=2"])
def test_rm_deletes_one_checkpoint_and_says_so(run: Path, which: str) -> None:
    done = holdfast_command("rm", f"{run}@{which}", "--yes")
    assert done.status == 0
    assert done.lines[-1] == "deleted step 2 at 1.2; the head is still step 3 at 1.3"
    assert removed_and_kept(run) == ["1.3", "1.1"]
    assert not [*run.glob("checkpoints/step-0000000002-*/*")]
    assert holdfast_command("doctor", "--deep", run).status == 0


def removed_and_kept(run: Path) -> list[str]:
    return [row["place"] for row in holdfast_command("ls", "--json", run).json["lineage"]]


def test_rm_refuses_the_head_and_not_what_an_epoch_with_checkpoints_began_from(run: Path) -> None:
    assert refused(holdfast_command("rm", f"{run}@1.3", "--yes"))
    assert refused(holdfast_command("rm", f"{run}@1.3")), "before anybody is asked"
    holdfast_command("rollback", run, "--to", "1.1", "--yes")
    assert refused(holdfast_command("rm", f"{run}@1.1", "--yes")), "it is the head of the new epoch"
    holdfast.load(run, into={"w": torch.zeros(10)}, continues=True)
    holdfast.save(run, {"w": torch.zeros(10)}, 4)
    assert holdfast_command("rm", f"{run}@1.1", "--yes").status == 0
    assert holdfast_command("rm", f"{run}@1.3", "--yes").status == 0
    assert removed_and_kept(run) == ["3.1"]
    assert head(run) == 4


def refused(done: Done) -> bool:
    return done.status == 2 and "config.needed" in done.err


def test_rm_as_json(run: Path) -> None:
    (change,) = holdfast_command("rm", f"{run}@1.1", "--yes", "--json").json["deleted"]
    assert (change["place"], change["head_before"], change["head"]["step"]) == ("1.1", change["head"], 3)


def test_rm_deletes_several_after_one_question(run: Path) -> None:
    done = at_terminal("rm", f"{run}@1.1", f"{run}@step=2", f"{run}@1.2", answer="y\n")
    assert (done.status, done.out.count("[y/N]")) == (0, 1)
    assert "Delete these 2 checkpoints?" in done.out
    assert removed_and_kept(run) == ["1.3"]


def test_rm_of_several_deletes_nothing_where_one_of_them_is_needed(run: Path) -> None:
    done = holdfast_command("rm", f"{run}@1.1", f"{run}@1.3", "--yes")
    assert (done.status, "config.needed" in done.err) == (2, True)
    assert removed_and_kept(run) == ["1.3", "1.2", "1.1"]
