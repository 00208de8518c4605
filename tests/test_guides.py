"""The examples of the guides run and print what the guides say."""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.keeper.node_folder import DEFAULT_NODE_DIR
from tests.models import start_new_job
from tests.rank_worker import HOST
from tests.ranks import run_processes
from tests.test_keeper import keeper_of

GUIDES = sorted((Path(__file__).parent.parent / "docs" / "guides").glob("*.md"))


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """End the keepers that an example has started, and remove what is in memory."""
    user = DEFAULT_NODE_DIR / f"holdfast-{os.geteuid()}"
    before = set(user.glob("*"))
    yield
    for folder in set(user.glob("*")) - before:
        os.kill(keeper_of(folder), signal.SIGKILL)
        shutil.rmtree(folder)


class Call(NamedTuple):
    """A command of a guide and the lines it prints, sorted: ranks print in any order."""

    num_ranks: int
    arguments: list[str]
    output: list[str]


def example(guide: Path) -> tuple[str, list[Call]]:
    """The script of a guide, and how it is run."""
    text = guide.read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (console,) = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    calls = []
    for call in console.split("$ ")[1:]:
        command, *output = call.splitlines()
        launcher, number, name, *arguments = shlex.split(command)
        assert (launcher, name) == ("torchrun", "train.py")
        calls.append(Call(int(number.removeprefix("--nproc_per_node=")), arguments, sorted(output)))
    return script, calls


def run_script(rank: int, folder: str, call: Call, port: int) -> str:
    """Run the script as torchrun would, and return what it prints."""
    os.chdir(folder)
    size = str(call.num_ranks)
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size)
    start_new_job()
    sys.argv = ["train.py", *call.arguments]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("train.py", run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_example_of_a_guide_prints_what_the_guide_says(guide: Path, tmp_path: Path) -> None:
    script, calls = example(guide)
    (tmp_path / "train.py").write_text(script)
    assert len({call.num_ranks for call in calls}) >= 2  # each guide resumes on another world
    for call in calls:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        printed = run_processes(call.num_ranks, run_script, str(tmp_path), call, port)
        assert sorted("".join(printed).splitlines()) == call.output


@pytest.mark.slow
@pytest.mark.timeout(400)  # torchrun imports torch anew in each process
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_example_of_a_guide_runs_under_torchrun(guide: Path, tmp_path: Path) -> None:
    script, calls = example(guide)
    (tmp_path / "train.py").write_text(script)
    for number, call in enumerate(calls):
        # A file per rank: what ranks write into one pipe at the same time may come out mixed.
        logs = tmp_path / f"logs-{number}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects=1", f"--log-dir={logs}"]
        command = [*torchrun, f"--nproc_per_node={call.num_ranks}", "train.py", *call.arguments]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
        printed = [path.read_text() for path in logs.rglob("stdout.log")]
        assert sorted("".join(printed).splitlines()) == call.output


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_examples_fit_on_one_screen(guide: Path) -> None:
    assert len(example(guide)[0].splitlines()) <= 45
