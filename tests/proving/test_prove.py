"""``holdfast prove``: it proves scripts that resume, and names what makes others differ."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer
from holdfast.cli.prove import _temporary_folder
from holdfast.errors import ConfigurationError
from holdfast.proving import proof
from holdfast.proving.rehearsal import Rehearsal
from tests.support.command_line import Done, holdfast_command
from tests.support.models import start_new_job

#: Each attempt of a script starts torchrun and its ranks, and a proof has five of them.
pytestmark = pytest.mark.timeout(600)

#: A script whose pieces the tests take away one by one.
SCRIPT = """
import sys
import torch, torch.distributed as dist
import holdfast

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer, "progress": {"seen": 0}}
state["random"] = holdfast.RandomState()
with holdfast.Checkpointer("runs/mine", state, save=holdfast.EverySteps(100)) as checkpointer:
    for step in checkpointer.steps(int(sys.argv[1])):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 4, generator=generator) + 0.01 * torch.rand(1)
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        state["progress"]["seen"] += 8
        checkpointer.step(step)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def prove(*arguments: object) -> Done:
    return holdfast_command("prove", *map(str, arguments))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.slow
def test_a_script_that_resumes_is_proved(script: Path, tmp_path: Path, num_ranks: int) -> None:
    result = prove("--json", "--nproc", num_ranks, "--kills", 1, "--dir", tmp_path / "proof", script, 6)
    assert result.status == 0, result.err
    assert result.json["proved"]
    assert result.json["num_steps"] == 5
    assert len(result.json["kills"]) == 1
    assert not (tmp_path / "runs").exists()  # the script's own run is left alone


@pytest.mark.slow
def test_state_that_was_forgotten_is_named_with_the_first_step(script: Path, tmp_path: Path) -> None:
    script.write_text(SCRIPT.replace('state["random"] = holdfast.RandomState()\n', ""))
    result = prove(script, 8)
    assert result.status == 1, result.err
    assert "Not proved: the script that was killed goes on with another state." in result.out
    assert "tensor model/bias: " in result.out
    assert "Check that everything a step reads is in the state" in result.out


@pytest.mark.slow
def test_a_resumed_job_that_trains_fewer_steps_is_not_proved(script: Path) -> None:
    """Steps that it did not save were not compared, so the script was said to be proved."""
    wrong = "range(next_step := checkpointer.restore().next_step, int(sys.argv[1]) - 2 * (next_step > 0))"
    script.write_text(
        SCRIPT.replace("checkpointer.steps(int(sys.argv[1]))", wrong).replace("EverySteps(100)", "EverySteps(1)")
    )
    result = prove("--json", "--kills", 1, "--seed", 8, script, 30)
    assert result.status == 1, result.err
    assert not result.json["proved"]
    assert result.json["ends"] == {"undisturbed": 29, "resumed": 27}


@pytest.mark.slow
def test_a_loader_that_draws_once_more_in_a_resumed_job_is_guessed(script: Path) -> None:
    text = SCRIPT.replace(" + 0.01 * torch.rand(1)", "").replace("dist.init", "loader = None\ndist.init")
    loader = "loader = loader or iter(torch.utils.data.DataLoader(range(99)))"
    script.write_text(text.replace("        batch =", f"        {loader}\n        batch ="))
    result = prove("--kills", 1, script, 5)
    assert result.status == 1, result.err
    assert "value random/%rank=0/torch: " in result.out
    assert "Only random generators differ" in result.out
    assert "Check that everything" not in result.out


@pytest.mark.slow
def test_a_script_that_differs_from_itself_is_told_apart(script: Path) -> None:
    script.write_text(SCRIPT.replace("torch.manual_seed(0)", "torch.seed()"))
    result = prove("--kills", 1, script, 4)
    assert result.status == 1, result.err
    assert "the script differs from itself, even when nothing disturbs it" in result.out
    assert "They first differ after step 1, between two undisturbed attempts:" in result.out


@pytest.mark.slow
def test_restarts_may_have_another_number_of_ranks(script: Path) -> None:
    script.write_text(SCRIPT.replace(" + 0.01 * torch.rand(1)", ""))
    result = prove("--nproc", 2, "--then", 3, script, 8)
    assert result.status == 0, result.out + result.err
    assert "on 3 ranks instead of 2" in result.out


@pytest.mark.slow
def test_a_script_that_fails_is_quoted(script: Path, tmp_path: Path) -> None:
    script.write_text("raise ValueError('no data')")
    result = prove("--dir", tmp_path / "proof", script)
    assert result.status == 2
    assert "it fails on 1 ranks" not in result.err
    assert "ValueError: no data" in result.err
    assert (tmp_path / "proof" / "undisturbed.log").exists()


@pytest.mark.slow
def test_the_log_that_the_error_about_a_silent_script_names_is_still_there(script: Path, tmp_path: Path) -> None:
    """It was deleted with the folder of the proof, and nothing was quoted."""
    script.write_text("raise SystemExit(3)")
    result = prove(script)
    assert result.status == 2
    assert "it fails on 1 rank with the exit code 3. It printed nothing." in result.err
    (folder,) = tmp_path.glob("holdfast-proof-*")
    assert str(folder / "undisturbed.log") in result.err.replace("\n", "")
    assert [each.name for each in folder.iterdir()] == ["undisturbed.log"]


@pytest.mark.parametrize(
    ("error", "left"),
    [(ConfigurationError("it fails.", code="config.script", action="See."), ["killed.log"]), (KeyboardInterrupt(), [])],
)
@pytest.mark.usefixtures("script")
def test_the_logs_of_a_proof_stay_only_where_an_error_names_one(
    tmp_path: Path, error: BaseException, left: list[str]
) -> None:
    def fail() -> None:
        with _temporary_folder() as folder:
            (folder / "killed").mkdir()
            (folder / "killed.log").touch()
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [each.name for each in tmp_path.glob("holdfast-proof-*/*")] == left


def test_a_script_whose_attempt_saved_nothing_is_told_so(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "attempt", lambda *_, **__: None)
    result = prove(script)
    assert result.status == 2
    assert "saved 0 steps, too few for 2 kills" in result.err


def pasted(text: str) -> Done:
    """Run the command that a line of `text` prints, or an advice in it names."""
    (line,) = re.findall(r"holdfast prove .*?(?=\. Its output|\n|$)", text)
    return holdfast_command(*shlex.split(line)[1:])


def save_three_steps(script: Sequence[str], rehearsal: Rehearsal, *, num_ranks: int, log: Path) -> None:
    """An attempt of a script that saves three steps, unless it is killed before."""
    start_new_job()
    log.write_text(shlex.join(script))
    state = {"w": torch.zeros(1)}
    with Checkpointer(f"{rehearsal.folder}/run-0", state, memory=None) as checkpointer:
        for step in range(checkpointer.restore().next_step, 3 if rehearsal.dies_after is None else 4):
            if rehearsal.dies_after is not None and step > rehearsal.dies_after:
                break
            state["w"].fill_(step)
            checkpointer.save(step)


def test_an_advice_to_kill_less_often_works_when_it_is_pasted(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It named --kills, which belongs to the script where it stands behind it."""
    monkeypatch.setattr(proof, "attempt", save_three_steps)
    refused = prove("--kills", 3, "--seed", 5, script, "--kills", "an argument of the script")
    assert refused.status == 2
    assert "saved 3 steps, too few for 3 kills" in refused.err
    done = pasted(refused.err.replace("\n", " "))
    assert done.status == 0, done.err
    assert "3 saved steps, killed after 0, 1: bit for bit the same state" in done.out
    again = pasted(done.out)
    assert again.out == done.out


def test_a_script_that_saves_one_step_is_not_told_to_kill_it_less_often(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_one_step(arguments: Sequence[str], rehearsal: Rehearsal, *, num_ranks: int, log: Path) -> None:
        holdfast.save(f"{rehearsal.folder}/run-0", {"w": 1}, 0)

    monkeypatch.setattr(proof, "attempt", save_one_step)
    refused = prove("--every", 2, script)
    assert "saved 1 step, too few for 2 kills" in refused.err
    assert "--kills" not in refused.err
    assert "a smaller --every does" in refused.err


@pytest.mark.slow
def test_a_script_that_saves_nothing_is_told_so(script: Path) -> None:
    script.write_text("print('done')")
    result = prove(script)
    assert result.status == 2
    assert "saved 0 steps, too few for 2 kills" in result.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such-script.py"], "there is no script 'no-such-script.py'"),
        (["--atol", "nan", sys.executable], "--atol nan is no difference"),
        (["--dir", "/proc", sys.executable], "'/proc' is not an empty folder"),
    ],
)
def test_nonsense_is_refused(arguments: list[str], text: str) -> None:
    result = prove(*arguments)
    assert result.status == 2
    assert text in result.err


@pytest.mark.slow
def test_processes_that_the_script_leaves_behind_are_ended(script: Path, tmp_path: Path) -> None:
    """Children of killed ranks, and ranks that ignore SIGTERM, went on after the proof."""
    child = [sys.executable, "-c", f"import time; time.sleep(777)  # {tmp_path}"]
    script.write_text(f"import subprocess\nsubprocess.Popen({child!r}, start_new_session=True)\n{SCRIPT}")
    assert prove("--kills", 1, script, 6).status == 0
    assert not [each for each in Path("/proc").glob("[0-9]*") if _has(each, str(tmp_path), "777")]


def _has(process: Path, *texts: str) -> bool:
    try:
        command = (process / "cmdline").read_text(errors="replace")
    except OSError:  # it has ended
        return False
    return all(text in command for text in texts)


@pytest.mark.slow
def test_the_guide_shows_what_the_command_prints(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "prove.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```text\n\$ holdfast prove train.py\n(.*?)```", text, re.DOTALL)
    script.write_text(code)
    monkeypatch.chdir(script.parent)
    # Whether the save of a step ends before a kill at a random moment is chance, and so is the first step that differs.
    assert _without_numbers(prove("train.py").out) == _without_numbers(printed)


def _without_numbers(text: str) -> str:
    return re.sub(r"after step \d+, between|by up to [\d.e-]+", "", text)
