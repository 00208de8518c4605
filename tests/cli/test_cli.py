"""The `holdfast` command: its start, its mistakes, and the list of a run's checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import holdfast
from holdfast.cli.screen import age
from holdfast.errors import printable
from holdfast.format.records import Epoch, Place
from holdfast.reports import size
from tests.support.command_line import (
    ENVIRONMENT,
    Stored,
    at_terminal,
    damage,
    holdfast_command,
    publish_step,
    screen_lines,
    start,
    stored_run,
)
from tests.support.published import EPOCHS, RUN_ID, begin, put

ONE = Stored("uint8", np.zeros(2, np.uint8))
#: The second epoch of this run went back to 1.1.
ROLLED_BACK = Epoch(
    epoch=2, opened_from=Place(1, 1), why="rollback", created=1.7e9, world_size=2, incarnation="22" * 16
)
#: A job went on from there after that, before anything was saved.
RESUMED = msgspec.structs.replace(ROLLED_BACK, epoch=3, why="resume")
HEAVY = ("torch", "matplotlib", "safetensors", "ml_dtypes", "asyncio", "unittest")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints: steps 1 to 3."""
    path = tmp_path_factory.mktemp("runs") / "gpt"
    for step in (1, 2, 3):
        holdfast.save(path, {"weight": torch.arange(step * 1000.0), "epoch": step}, step, metrics={"loss": 1 / step})
    return path


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """A run that was rolled back from 1.3 to 1.1, and went on to 2.1."""
    storage = begin(RUN_ID, EPOCHS[0], ROLLED_BACK)
    for place in (Place(1, 1), Place(1, 2), Place(1, 3), Place(2, 1)):
        publish_step(storage, place, {"w": ONE})
    return put(storage.objects, tmp_path / "run")


def test_ls_shows_the_lineage_newest_first(run: Path) -> None:
    done = holdfast_command("ls", run)
    assert done.status == 0
    assert done.lines[0] == f"{run}: 3 checkpoints, {size(sum(f.stat().st_size for f in run.rglob('*.safetensors')))}"
    assert [line.split()[:2] for line in done.lines[2:]] == [["head", "1.3"], ["1.2", "2"], ["1.1", "1"]]
    assert done.lines[2].endswith("loss=0.3333")


def test_ls_as_json_is_one_document(run: Path) -> None:
    document = holdfast_command("ls", "--json", run).json
    assert [(row["place"], row["step"], row["head"]) for row in document["lineage"]] == [
        ("1.3", 3, True),
        ("1.2", 2, False),
        ("1.1", 1, False),
    ]
    assert document["abandoned"] == document["findings"] == []


def test_ls_shows_what_was_abandoned_apart_and_why(abandoned: Path) -> None:
    lines = holdfast_command("ls", abandoned).lines
    assert [line.split()[:2] for line in lines[2:4]] == [["head", "2.1"], ["1.1", "101"]]
    assert lines[5].startswith("abandoned when epoch 2 went on from 1.1 (rollback): 2 checkpoints")
    assert [line.split()[0] for line in lines[7:]] == ["1.3", "1.2"]
    document = holdfast_command("ls", "--json", abandoned).json
    assert [row["place"] for row in document["lineage"]] == ["2.1", "1.1"]
    assert [row["place"] for row in document["abandoned"]] == ["1.3", "1.2"]


def test_ls_names_the_rollback_and_not_the_job_that_resumed_from_there(tmp_path: Path) -> None:
    storage = begin(RUN_ID, EPOCHS[0], ROLLED_BACK, RESUMED)
    for place in (Place(1, 1), Place(1, 2), Place(3, 1)):
        publish_step(storage, place, {"w": ONE})
    run = put(storage.objects, tmp_path / "resumed")
    (row,) = holdfast_command("ls", "--json", run).json["abandoned"]
    assert (row["place"], row["abandoned"]) == ("1.2", "epoch 2 went on from 1.1 (rollback)")
    damage(run / "epochs" / "9999999997.json")
    (row,) = holdfast_command("ls", "--json", run).json["abandoned"]
    assert row["abandoned"] == "epoch 3 went on from 1.1 (resume)", "all that can be read"


def test_ls_shows_what_it_can_of_a_damaged_history(abandoned: Path) -> None:
    record = abandoned / "history" / "9999999998-9999999998.json"
    damage(record)
    done = holdfast_command("ls", abandoned)
    assert done.status == 1
    assert [line.split()[:2] for line in done.lines[2:3]] == [["head", "2.1"]]
    assert "1.3" in done.out
    assert str(record) in done.out
    assert [fault["path"] for fault in holdfast_command("ls", "--json", abandoned).json["findings"]] == [str(record)]


def test_ls_does_not_guess_where_an_epoch_that_cannot_be_read_began(abandoned: Path) -> None:
    damage(abandoned / "epochs" / "9999999997.json")
    done = holdfast_command("ls", abandoned)
    assert done.status == 1
    assert "unknown whether the head descends from these: 3 checkpoints" in done.out
    assert "abandoned when" not in done.out


def test_ls_shows_which_tensors_diverged(tmp_path: Path) -> None:
    storage = begin(RUN_ID, *EPOCHS[:1])
    names = ["model/[bias]", "model/scale", "model/weight"]
    for seq, diverged in enumerate(([], names[:1], names), start=1):
        publish_step(storage, Place(1, seq), dict.fromkeys(names, ONE), diverged=diverged)
    run = put(storage.objects, tmp_path / "run")
    lines = holdfast_command("ls", run).lines
    assert lines[1].split()[-1] == "diverged"
    assert lines[2].endswith("model/[bias] and 2 more")
    assert lines[3].endswith("model/[bias]")
    assert "model" not in lines[4]
    assert [row["diverged"] for row in holdfast_command("ls", "--json", run).json["lineage"]] == [
        {"num_tensors": 3, "names": names},
        {"num_tensors": 1, "names": names[:1]},
        {"num_tensors": 0, "names": []},
    ]


def test_ls_of_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    done = holdfast_command("ls", put(begin(RUN_ID).objects, tmp_path / "run"))
    assert (done.status, done.out.count("no checkpoint has been committed yet")) == (0, 1)


def test_a_line_is_not_broken_where_no_terminal_has_a_width(run: Path) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "holdfast.cli", "ls", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert len(done.stdout.splitlines()) == 5
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["ls", "{run}x"], 3, "Did you mean 'gpt', in the same folder?"),
        (["ls", "no-such-run"], 3, "no such folder"),
        (["ls", "{run}@1.1"], 2, "Name the run alone"),
        (["ls", "{folder}"], 2, "Name {run}."),
        (["verify", "{run}@step=99"], 3, "Choose one of its steps: 3, 2, 1."),
        (["verify", "{run}@step=x"], 2, "RUN@step=700"),
        (["verify", "--all", "{run}@1.1"], 2, "Name the run alone"),
        (["plan", "{run}", "--on", "99999999999"], 2, "less than or equal to"),
        (["show", "{run}", "--names", "weigth"], 3, "Did you mean 'weight'?"),
        (["diff", "{run}", "{run}@9.9"], 3, "Choose one of its places: 1.3, 1.2, 1.1."),
        (["ls", "floppy://bucket/run"], 2, "which no installed package opens"),
        (["rollback", "{run}", "--to", "1"], 2, "Write --to 3.12"),
        (["rollback", "{run}"], 2, "Missing option '--to'"),
        (["rm", "{run}"], 2, "@PLACE"),
        (["doctor", "{run}", "--force"], 2, "--remove"),
        (["lss"], 2, "Did you mean 'ls'?"),
        (["node", "{run}@step=1"], 2, "Name the run alone: {run}."),
        (["keeper", "{run}@1.1"], 2, "Name the run alone: {run}."),
    ],
)
def test_mistakes_say_what_to_do(run: Path, arguments: list[str], status: int, said: str) -> None:
    (folder,) = run.glob("checkpoints/step-0000000001-*")
    done = holdfast_command(*(argument.format(run=run, folder=folder) for argument in arguments))
    assert (done.status, done.out) == (status, "")
    assert said.format(run=run) in done.err


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["ls", "no-such-run"], 3, "not_found.run"),
        (["verify", "{run}@step=x"], 2, "config.path"),
        (["rollback", "{run}"], 2, "config.usage"),
        (["rm", "{run}@1.1"], 2, "config.confirmation"),
    ],
)
def test_an_error_as_json_is_the_one_document(run: Path, arguments: list[str], status: int, code: str) -> None:
    done = holdfast_command(*(argument.format(run=run) for argument in arguments), "--json")
    assert (done.status, done.err) == (status, "")
    error = done.json["error"]
    assert (error["code"], error["kind"]) == (code, "NotFoundError" if status == 3 else "ConfigurationError")
    assert error["message"]
    assert error["action"]


def test_a_defect_of_ours_is_json_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, *, as_json: bool) -> bool:
        raise ZeroDivisionError(path)

    monkeypatch.setattr("holdfast.cli.ls.ls", fail)
    done = holdfast_command("ls", "--json", run)
    assert (done.status, done.json["error"]["code"]) == (3, "unexpected")
    assert "ZeroDivisionError" in done.json["error"]["message"]


def test_json_holds_nothing_that_a_terminal_would_obey(tmp_path: Path) -> None:
    name = "a\x1b[2J\x7f\x9b\u202e\u2603"
    run = stored_run(tmp_path / "run", {name: ONE})
    for arguments in (["show", "--json"], ["show", "--json", "--names", "*"], ["verify", "--json"]):
        done = holdfast_command(*arguments, run)
        assert done.out.rstrip("\n").isascii()
        assert done.out.rstrip("\n").isprintable()
    assert [tensor["name"] for tensor in holdfast_command("show", "--json", run).json["tensors"]] == [name]
    missing = holdfast_command("ls", "--json", f"{tmp_path}/{name}")
    assert (missing.status, missing.out.rstrip("\n").isprintable()) == (3, True)
    assert name in missing.json["error"]["message"]


def test_an_error_holds_nothing_that_a_terminal_would_obey(tmp_path: Path) -> None:
    path = f"{tmp_path}/evil\x1b[2J\r\nname\u202e"
    with pytest.raises(holdfast.NotFoundError) as caught:
        holdfast.load(path, into={"w": torch.zeros(1)})
    assert str(caught.value).isprintable()
    assert r"evil\x1b[2J\r\nname\u202e" in str(caught.value)
    assert caught.value.path == path


@pytest.mark.parametrize("module", ["holdfast", "holdfast.cli"])
def test_the_version_is_printed(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"holdfast {holdfast.__version__}\n"


def test_a_file_url_names_a_run(run: Path) -> None:
    assert holdfast_command("ls", "--json", f"file://{run}").json == holdfast_command("ls", "--json", run).json


@pytest.mark.parametrize(
    ("names", "target", "said"),
    [
        (["config.json", "model.safetensors"], "", "it is a Hugging Face model folder. It is not a run, but"),
        (["adapter_config.json", "adapter_model.safetensors"], "", "it is a folder of PEFT adapters"),
        ([".metadata", "__0_0.distcp"], "", "it is a checkpoint of torch.distributed.checkpoint"),
        (["latest", "global_step10"], "", "it is a DeepSpeed checkpoint folder"),
        (["model.safetensors"], "model.safetensors", "it is a safetensors file. It is not a run, but"),
        (
            ["model.pt"],
            "model.pt",
            "holdfast.load and holdfast.open read it, and holdfast import makes a run of it",
        ),
        (["config.json"], "config.json", "one file of a checkpoint of another system. Name its folder"),
        (["notes"], "notes", "it is a file. Name the folder of a run; of other files, those are read that end with"),
    ],
)
def test_what_is_no_run_is_said_to_be_what_it_is(tmp_path: Path, names: list[str], target: str, said: str) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    for command in ("ls", "show", "verify"):
        done = holdfast_command(command, tmp_path / target)
        assert (done.status, said in done.err.replace("\n", " ")) == (3, True), done.err


def test_a_file_of_a_checkpoint_leads_to_its_folder(run: Path) -> None:
    (folder,) = run.glob("checkpoints/step-0000000001-*")
    for name in ("manifest.hfm", "seal.json", "data-00000.safetensors"):
        assert f"Name its folder: {folder}." in holdfast_command("show", folder / name).err
    assert f"Name the folder: {run}." in holdfast_command("ls", run / "holdfast.json").err


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize(
    "arguments", [["ls", "{run}"], ["show", "{run}"], ["show", "{run}", "--values"], ["plan", "{run}", "--on", "4"]]
)
def test_tables_fit_the_terminal(tmp_path: Path, arguments: list[str], columns: int) -> None:
    state = {
        "model": {f"layers.{n}.self_attention.query_key_value.weight": torch.zeros(8, 4) for n in range(3)},
        "progress": {"samples": 123456789},
    }
    run = tmp_path / "a-run-with-a-name"
    for step in (1_000_000, 2_000_000):
        holdfast.save(run, state, step, metrics={"loss": 1 / step, "validation_loss": 0.25})
    done = at_terminal(*(argument.format(run=run) for argument in arguments), columns=columns)
    lines = [line for line in screen_lines(done) if str(tmp_path) not in line]  # a path is not broken
    start = next(at for at, line in enumerate(lines) if "size" in line or "least" in line)
    table = lines[start : next((at for at, line in enumerate(lines) if at > start and not line), len(lines))]
    assert max(map(len, table)) <= columns
    shown = "".join("".join(table).split())
    if arguments[0] == "ls":
        assert all(word in shown for word in ("1.2", "2000000", "1.1", "1000000", "5e-07", "validation_loss=0.25"))
    hidden = [line for line in table if line.startswith("(too narrow to show: ")]
    assert len(hidden) <= (columns < 120)


@pytest.mark.parametrize("columns", ["20", "50"])
def test_a_line_is_not_broken_in_a_pipe_whatever_columns_says(run: Path, columns: str) -> None:
    done = start("ls", str(run), COLUMNS=columns)
    assert [line.split()[-1] for line in done.lines[2:]] == ["loss=0.3333", "loss=0.5", "loss=1"]
    assert len(done.lines) == 5


def test_a_defect_of_ours_is_a_failure_and_not_a_finding(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, *, as_json: bool) -> bool:
        raise ZeroDivisionError(path)

    monkeypatch.setattr("holdfast.cli.ls.ls", fail)
    done = holdfast_command("ls", run)
    assert done.status == 3
    assert "ZeroDivisionError" in done.err


def test_what_breaks_after_an_interrupt_is_no_failure(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(path: str, *, as_json: bool) -> bool:
        try:
            raise KeyboardInterrupt
        finally:
            raise ZeroDivisionError(path)

    monkeypatch.setattr("holdfast.cli.ls.ls", break_off)
    done = holdfast_command("ls", run)
    assert (done.status, done.err) == (130, "")


def test_nothing_that_a_terminal_would_obey_is_printed(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", {"evil\x1b[2J\r\nname": ONE, "plain": ONE})
    damage(next(run.rglob("data-00000.safetensors")), at=0.999)
    for arguments in (["show"], ["show", "--names", "*"], ["verify", "--deep"]):
        done = holdfast_command(*arguments, run)
        assert (r"evil\x1b[2J\r\nname" if "--deep" in arguments else "evil%1B[2J%0D%0Aname") in done.out
        assert "\x1b" not in done.out + done.err


def test_text_that_a_terminal_cannot_express_is_escaped() -> None:
    assert printable("caf\u00e9 \u2603") == "caf\u00e9 \u2603"
    assert printable("a\x1bb\udcff") == r"a\x1bb\udcff"


def test_an_output_of_few_characters_gets_escapes(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", {"snow\u2603": ONE})
    done = start("show", str(run), PYTHONIOENCODING="ascii")
    assert (done.status, r"snow\u2603" in done.out) == (0, True)


def test_sizes_and_ages_are_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 << 30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB"]
    assert [age(s) for s in (-5, 59, 60, 3600, 90000, 8e7)] == ["now", "59 s", "1 min", "1 h", "1 d", "2 y"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "{run}"],
        ["show", "--values", "{run}"],
        ["verify", "--deep", "{run}"],
        ["diff", "{run}@1.2", "{run}"],
        ["doctor", "{run}"],
        ["pin", "{run}"],
        ["unpin", "{run}"],
        ["release", "{run}"],
        ["prune", "{run}", "--keep-last", "1", "--dry-run"],
        ["advise", "--durable", "3s,3min,5min", "--mttf", "3h"],
        ["--help"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_no_command_imports_torch_or_anything_else_that_is_heavy(run: Path, arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from holdfast.cli import run\n"
        "try: run(sys.argv[2:])\n"
        "finally: print([name for name in sys.argv[1].split(',') if name in sys.modules], file=sys.stderr)"
    )
    heavy = (*HEAVY, "numpy") if arguments[0] in ("ls", "pin", "unpin", "release", "advise", "--help") else HEAVY
    command = [sys.executable, "-c", code, ",".join(heavy), *(a.format(run=run) for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == "[]\n"


def test_the_command_starts_soon() -> None:
    """Within 0.3 s on an idle machine (measured); what is asserted leaves room for a busy one."""

    def seconds(*command: str) -> float:
        started = time.monotonic()
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
        return time.monotonic() - started

    python = min(seconds("-c", "pass") for _ in range(3))
    assert min(seconds("-m", "holdfast.cli", "--help") for _ in range(3)) < python + 3


def test_completion_prints_a_script_and_completes_commands() -> None:
    script = start("--show-completion", SHELL="/bin/bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert script.status == 2, "without detection the shell must be named"
    script = start("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert (script.status, script.lines[-1]) == (0, "complete -o default -F _holdfast_completion holdfast")
    completed = start(_HOLDFAST_COMPLETE="complete_bash", COMP_WORDS="holdfast ro", COMP_CWORD="1")
    assert completed.lines == ["rollback"]


def test_completion_is_installed_for_a_shell(tmp_path: Path) -> None:
    done = start("--install-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert (done.status, "completion installed" in done.out) == (0, True)
    (script,) = tmp_path.rglob("holdfast.sh")
    assert str(script) in (tmp_path / ".bashrc").read_text()


def test_a_reader_that_has_enough_ends_the_command_quietly(run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "holdfast.cli", "show", "--json", str(run)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (-13, b"")


def prose_words(text: str) -> set[str]:
    """The words outside of tables, whose columns stand apart and are folded or left out, and without ages."""
    lines = (line for line in text.splitlines() if "  " not in line.strip())
    return {word for line in lines for word in re.sub(r"\(.*ago\)|\(now\)", "", line).split() if len(word) > 1}


def test_prose_at_a_narrow_terminal_breaks_between_words_and_leaves_paths_whole(run: Path) -> None:
    commands = [[name, str(run)] for name in ("doctor", "show", "verify", "ls")]
    for command in (*commands, ["ls", f"{run}-is-not-there"]):
        piped = start(*command)
        words = prose_words(piped.out + piped.err)
        lines = screen_lines(at_terminal(*command, columns=50))
        assert words, command
        assert words - {word for line in lines for word in line.split()} == set(), command
        too_long = [line for line in lines if len(line) > 50 and len(line.split()) > 1]
        assert all(line.strip().startswith("holdfast ") for line in too_long), too_long  # commands are copied whole
