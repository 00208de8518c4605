"""``holdfast prune`` says what it deletes and why the rest stays, asks first, and deletes; ``pin`` and ``unpin``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.format.records import Place
from holdfast.run.history import Run
from holdfast.run.holds import create_lease
from holdfast.store.urls import location_of, open_store
from tests.support.command_line import INTERRUPT, at_terminal, folder_of, holdfast_command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 to 5, whose loss falls and then rises."""
    path = tmp_path / "gpt"
    for step, loss in enumerate((5.0, 3.0, 1.0, 2.0, 4.0), 1):
        holdfast.save(path, {"w": torch.arange(step * 10.0)}, step, metrics={"loss": loss})
    return path


def steps(run: Path) -> list[int]:
    return [each.step for each in holdfast.ls(run)]


def test_a_dry_run_says_what_would_go_and_why_the_rest_stays_and_changes_nothing(run: Path) -> None:
    before = sorted(path for path in run.rglob("*") if path.is_file())
    done = holdfast_command("prune", run, "--keep-last", "2", "--keep-best", "loss", "--dry-run")
    assert done.status == 0
    assert done.lines[0].startswith(f"{run}: would delete 2 checkpoints, ")
    said = {line.split()[1]: line for line in done.lines if line.startswith(("keep ", "delete "))}
    assert {place: line.split()[0] for place, line in said.items()} == {
        "1.5": "keep",
        "1.4": "keep",
        "1.3": "keep",
        "1.2": "delete",
        "1.1": "delete",
    }
    assert "it is the head; it is the newest checkpoint that was verified; it is one of the last 2" in said["1.5"]
    assert "it has the smallest loss" in said["1.3"]
    assert sorted(path for path in run.rglob("*") if path.is_file()) == before


def test_it_deletes_what_no_policy_keeps(run: Path) -> None:
    done = holdfast_command("prune", run, "--keep-last", "1", "--keep-every", "2", "--yes")
    assert (done.status, steps(run)) == (0, [5, 4, 2])
    assert done.lines[-1].startswith("deleted 2 checkpoints, ")
    assert done.lines[-1].endswith("the head is step 5 at 1.5")


def test_what_is_not_confirmed_is_told_as_what_would_happen(run: Path) -> None:
    """A log said "deletes 4 checkpoints", although nothing was deleted for want of --yes."""
    done = holdfast_command("prune", run, "--keep-last", "1")
    assert (done.status, len(steps(run))) == (2, 5)
    assert done.lines[0].startswith(f"{run}: would delete 4 checkpoints, ")
    assert holdfast_command("prune", run, "--keep-last", "1", "--yes").lines[0].startswith(f"{run}: deletes 4 ")


def test_bytes_that_may_be_more_are_not_told_as_all(tmp_path: Path) -> None:
    """ "deleted 2 checkpoints, 24 KiB" was said, although 6 MiB of a frozen base went with them."""
    run, base = tmp_path / "lora", torch.arange(1 << 18)
    for step in range(3):
        holdfast.save(run, {"base": holdfast.Still(base), "w": torch.arange(10.0) + step}, step)
    holdfast.compact(run)
    assert not list(run.glob("references/*0000000002*"))
    before = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
    done = holdfast_command("prune", run, "--keep-last", "1", "--yes")
    assert before - sum(path.stat().st_size for path in run.rglob("*.safetensors")) > base.nbytes
    assert done.lines[-1].startswith("deleted 2 checkpoints, at least ")


@pytest.mark.parametrize("option", ["--keep-last", "--keep-for"])
def test_an_option_that_contradicts_itself_is_refused(run: Path, option: str) -> None:
    """The last one was taken silently."""
    values = ("1h", "2h") if option == "--keep-for" else ("1", "2")
    done = holdfast_command("prune", run, option, values[0], option, values[1], "--yes")
    assert (done.status, len(steps(run))) == (2, 5)
    assert "contradict each other" in done.err
    assert holdfast_command("prune", run, "--keep-every", "4", "--keep-every", "3", "--yes").status == 0
    assert steps(run) == [5, 4, 3]


@pytest.mark.parametrize(("answer", "left"), [("y\n", [5]), ("n\n", [5, 4, 3, 2, 1])])
@pytest.mark.few(1)
def test_it_asks_first(run: Path, answer: str, left: list[int]) -> None:
    done = at_terminal("prune", run, "--keep-last", "1", answer=answer)
    assert "Delete 4 checkpoints? This cannot be undone." in done.out
    assert (done.status == 0) == (left == [5])
    assert steps(run) == left


def test_an_interrupt_at_the_question_changes_nothing(run: Path) -> None:
    assert at_terminal("prune", run, "--keep-last", "1", answer=INTERRUPT).status == 130
    assert len(steps(run)) == 5


def test_as_json_it_is_one_document(run: Path) -> None:
    holdfast.pin(f"{run}@step=1")
    found = holdfast_command("prune", run, "--keep-best", "loss:2:max", "--yes", "--json").json
    assert (found["run"], found["dry_run"], found["head"]["step"]) == (str(run), False, 5)
    assert [row["step"] for row in found["deleted"]] == [4, 3, 2]
    assert {row["step"]: row["reasons"] for row in found["kept"]} == {
        5: [
            "it is the head",
            "it is the newest checkpoint that was verified",
            "it has one of the 2 greatest loss values",
        ],
        1: ["it is pinned", "it has one of the 2 greatest loss values"],
    }
    assert found["deleted_nbytes"] == sum(row["nbytes"] for row in found["deleted"])
    again = holdfast_command("prune", run, "--keep-best", "loss:2:max", "--dry-run", "--json").json
    assert (again["dry_run"], again["deleted"]) == (True, [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing says which checkpoints to keep"),
        (["--keep-best", "los"], "no checkpoint has the metric 'los' (they have 'loss')"),
        (
            ["--keep-best", "loss:2:maximum"],
            "--keep-best loss:2, or --keep-best accuracy:2:max",
        ),
        (["--keep-best", "loss", "--keep-best", "loss:1:max"], "contradict each other"),
        (["--keep-best", ""], "not an empty text"),
        (["--keep-for", "soon"], "--keep-for has 'soon', which is no such time"),
        (["--keep-for", "0h"], "--keep-for has '0h', which is no such time"),
    ],
)
def test_bad_policies_are_refused_and_nothing_is_deleted(run: Path, options: list[str], said: str) -> None:
    done = holdfast_command("prune", run, *options, "--yes")
    assert (done.status, steps(run)) == (2, [5, 4, 3, 2, 1])
    assert said in done.err


def test_young_checkpoints_are_kept_for_a_time(run: Path) -> None:
    assert holdfast_command("prune", run, "--keep-for", "2h", "--yes").status == 0
    assert len(steps(run)) == 5


def test_it_finishes_what_a_killed_deletion_left(run: Path) -> None:
    folder = folder_of(run, 2)
    manifest = (folder / "manifest.hfm").read_bytes()
    holdfast.remove(f"{run}@step=2")
    folder.mkdir(exist_ok=True)
    (folder / "manifest.hfm").write_bytes(manifest)
    done = holdfast_command("prune", run, "--keep-last", "9", "--yes")
    assert done.status == 0
    assert "finishes 1 deletion that was interrupted" in done.out
    assert not folder.exists()


class TestPin:
    def test_a_pinned_checkpoint_stays_and_ls_says_so(self, run: Path) -> None:
        done = holdfast_command("pin", f"{run}@1.2", f"{run}@step=3")
        assert (done.status, done.lines[0]) == (0, f"{run}: step 2 at 1.2 is pinned")
        assert holdfast_command("pin", f"{run}@1.2").lines == [f"{run}: step 2 at 1.2 was pinned already"]
        holdfast_command("prune", run, "--keep-last", "1", "--yes")
        assert steps(run) == [5, 3, 2]
        assert ["pinned" in line for line in holdfast_command("ls", run).lines[2:]] == [False, True, True]
        assert [each.pinned for each in holdfast.ls(run)] == [False, True, True]

    def test_rm_refuses_it_until_it_is_unpinned(self, run: Path) -> None:
        holdfast.pin(f"{run}@1.2")
        done = holdfast_command("rm", f"{run}@1.2", "--yes")
        assert (done.status, len(steps(run))) == (2, 5)
        assert "config.pinned" in done.err
        assert f"holdfast unpin '{run}@1.2'" in done.err
        assert holdfast_command("unpin", f"{run}@1.2").lines == [f"{run}: step 2 at 1.2 is not pinned any more"]
        assert holdfast_command("unpin", f"{run}@1.2").lines == [f"{run}: step 2 at 1.2 was not pinned"]
        assert holdfast_command("rm", f"{run}@1.2", "--yes").status == 0
        assert steps(run) == [5, 4, 3, 1]

    def test_a_run_stands_for_its_head(self, run: Path) -> None:
        found = holdfast_command("pin", run, "--json").json["checkpoints"]
        assert found == [{"run": str(run), "place": "1.5", "step": 5, "by_run": True, "pinned": True, "changed": True}]

    def test_a_pin_of_a_run_says_which_checkpoint_it_has_pinned_and_that_later_ones_are_not(self, run: Path) -> None:
        later = "Later checkpoints of the run are not pinned with it; RUN@PLACE names another one."
        assert holdfast_command("pin", run).lines == [f"{run}: step 5 at 1.5, the head now, is pinned", later]
        lines = holdfast_command("pin", run, f"{run}@1.2").lines
        assert lines == [
            f"{run}: step 5 at 1.5, the head now, was pinned already",
            f"{run}: step 2 at 1.2 is pinned",
            later,
        ]
        assert holdfast_command("unpin", run).lines == [f"{run}: step 5 at 1.5, the head now, is not pinned any more"]

    def test_nothing_is_pinned_where_one_path_is_wrong(self, run: Path) -> None:
        done = holdfast_command("pin", f"{run}@1.2", f"{run}@1.9")
        assert done.status == 3
        assert not any(each.pinned for each in holdfast.ls(run))


class TestFunctions:
    def test_ls_tells_what_the_command_tells(self, run: Path) -> None:
        found = holdfast.ls(run)
        assert [(each.place, each.head, each.abandoned) for each in found][:2] == [
            ("1.5", True, ""),
            ("1.4", False, ""),
        ]
        assert found[2].metrics == {"loss": 1.0}
        assert found[2].nbytes > 0

    def test_remove_deletes_one_checkpoint_and_refuses_what_is_needed(self, run: Path) -> None:
        holdfast.remove(f"{run}@step=3")
        assert steps(run) == [5, 4, 2, 1]
        with pytest.raises(holdfast.ConfigurationError, match="it is the head") as caught:
            holdfast.remove(f"{run}@step=5")
        assert caught.value.code == "config.needed"
        with pytest.raises(holdfast.ConfigurationError, match="does not name a checkpoint"):
            holdfast.remove(run)

    def test_remove_says_until_when_a_reader_uses_a_checkpoint(self, run: Path) -> None:
        found = Run.open(open_store(location_of(str(run))))
        create_lease(found.storage, Place(1, 2), lasting_s=60.0)
        with pytest.raises(
            holdfast.ConfigurationError, match=r"a reader uses it, until .* UTC at the latest"
        ) as caught:
            holdfast.remove(f"{run}@1.2")
        assert caught.value.code == "config.in_use"

    def test_pin_and_unpin_say_whether_they_changed_anything(self, run: Path) -> None:
        path = f"{run}@step=2"
        assert [holdfast.pin(path), holdfast.pin(path)] == [True, False]
        assert [holdfast.unpin(path), holdfast.unpin(path)] == [True, False]
