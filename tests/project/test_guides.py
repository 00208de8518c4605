"""The examples of the guides run and print what the guides say."""

from __future__ import annotations

import ast
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

import holdfast
from tests.project.torchrun import run_torchrun
from tests.support.bound import bits
from tests.support.models import start_new_job
from tests.support.rank_worker import HOST, environment_of
from tests.support.ranks import run_processes

ALL_GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))
#: Their examples import libraries that take seconds, and which ask torchrun's environment.
OF_FRAMEWORKS = [guide for guide in ALL_GUIDES if guide.stem in ("accelerate", "fabric", "lightning", "transformers")]
#: These have environments of their own: `test_deepspeed_engines`, `test_megatron_jobs`, `test_quantised`,
#: `test_ray_train` and `test_torchtitan_jobs` run their examples there. `test_object_runs` has a server for its guide.
APART = ("deepspeed", "megatron", "object_storage", "quantised", "ray", "torchtitan")
GUIDES = [guide for guide in ALL_GUIDES if guide not in OF_FRAMEWORKS and guide.stem not in APART]

pytestmark = pytest.mark.usefixtures("memory_is_given_back")


class Call(NamedTuple):
    """A command of a guide and the lines it prints, sorted: ranks print in any order."""

    num_ranks: int
    arguments: list[str]
    output: list[str]
    is_plain: bool = False  # started without torchrun


def example(guide: Path) -> tuple[str, list[Call]]:
    """The script of a guide, and how it is run."""
    text = guide.read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (console,) = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    calls = []
    for call in console.split("$ ")[1:]:
        command, *output = call.splitlines()
        match shlex.split(command):
            case ["torchrun", number, "train.py", *arguments]:
                calls.append(Call(int(number.removeprefix("--nproc_per_node=")), arguments, sorted(output)))
            case ["python", "train.py", *arguments]:
                calls.append(Call(1, arguments, sorted(output), is_plain=True))
            case _:
                raise AssertionError(f"{guide.name} starts its script in a way that no test knows: {command}")
    return script, calls


def run_warm(folder: Path, call: Call) -> list[str]:
    """Run the script in `folder` on warm ranks, and return the lines that they print, sorted."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # no other process can take its port
    return sorted("".join(run_processes(call.num_ranks, run_script, str(folder), call, store.port)).splitlines())


def run_script(rank: int, folder: str, call: Call, port: int) -> str:
    """Run the script as its launcher would, and return what it prints."""
    os.chdir(folder)
    torchrun = environment_of(rank, call.num_ranks, port)
    if call.is_plain:
        for name in torchrun:
            os.environ.pop(name, None)
    else:
        os.environ.update(torchrun)
    start_new_job()
    sys.argv = ["train.py", *call.arguments]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("train.py", run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_example_of_a_guide_prints_what_the_guide_says(guide: Path, tmp_path: Path) -> None:
    script, calls = example(guide)
    (tmp_path / "train.py").write_text(script)
    # Each guide resumes on another world, but for the one that is about one process.
    assert len({call.num_ranks for call in calls}) >= 2 or all(call.is_plain for call in calls)
    for call in calls:
        assert run_warm(tmp_path, call) == call.output


def run_as_started(folder: Path, call: Call) -> list[str]:
    """Run the script in `folder` with its launcher, and return the lines that its ranks print, sorted."""
    if call.is_plain:
        plain = [sys.executable, "train.py", *call.arguments]
        done = subprocess.run(plain, cwd=folder, check=True, timeout=200, stdout=subprocess.PIPE, text=True)
        return sorted(done.stdout.splitlines())
    status, lines = run_torchrun(folder, call.num_ranks, *call.arguments)
    assert status == 0
    return lines


@pytest.mark.slow
@pytest.mark.timeout(400)  # torchrun imports torch anew in each process
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_example_of_a_guide_runs_under_torchrun(guide: Path, tmp_path: Path) -> None:
    script, calls = example(guide)
    (tmp_path / "train.py").write_text(script)
    for call in calls:
        assert run_as_started(tmp_path, call) == call.output


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("guide", OF_FRAMEWORKS, ids=lambda guide: guide.stem)
def test_the_example_of_a_framework_goes_on_as_its_guide_says(guide: Path, tmp_path: Path) -> None:
    script, calls = example(guide)
    (tmp_path / "train.py").write_text(script)
    assert len({call.num_ranks for call in calls}) >= 2
    for call in calls:
        printed = run_as_started(tmp_path, call)  # the frameworks print lines of their own
        assert [line for line in printed if line in call.output] == call.output


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_the_example_of_a_framework_goes_on_bit_for_bit_on_as_many_ranks(name: str, tmp_path: Path) -> None:
    (guide,) = (guide for guide in OF_FRAMEWORKS if guide.stem == name)
    script, (call, *_) = example(guide)
    last = int(call.arguments[0])
    found: list[dict[str, bytes | str]] = []
    for folder, stops in (("whole", [last]), ("parts", [last - 1, last])):  # in the middle of a later epoch
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(script)
        for stop in stops:
            run_as_started(tmp_path / folder, call._replace(arguments=[str(stop)]))
        (run,) = (tmp_path / folder / "runs").iterdir()
        view = holdfast.open(run)
        assert view.step == last - 1
        tensors = {name: bits(view[name][...]) for name in view.names()}
        values = {name: repr(view.value(name)) for name in view.value_names()}
        found.append({**tensors, **values})
    whole, parts = found
    assert whole == parts


@pytest.mark.parametrize("guide", ALL_GUIDES, ids=lambda guide: guide.stem)
def test_examples_fit_on_one_screen(guide: Path) -> None:
    assert len(example(guide)[0].splitlines()) <= 45


@pytest.mark.parametrize("guide", ALL_GUIDES, ids=lambda guide: guide.stem)
def test_an_example_that_is_started_again_after_its_last_step_has_no_name_error(guide: Path) -> None:
    script = ast.parse(example(guide)[0])
    loops = [node for node in ast.walk(script) if isinstance(node, ast.For) and ".steps(" in ast.unparse(node.iter)]
    for loop in loops:
        after = [
            node for node in ast.walk(script) if isinstance(node, ast.Name) and node.lineno > (loop.end_lineno or 0)
        ]
        assert ast.unparse(loop.target) not in {node.id for node in after}, "no step may be left for the loop"
