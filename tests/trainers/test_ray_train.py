"""Jobs of Ray Train: the guide's example, a worker that is killed, and a node that is drained.

``make test-ray`` runs these, with real clusters of Ray on this machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.project.test_guides import Call, example

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "ray.md"
#: Colours, and what Ray puts before a line of a worker.
_COLOUR, _TELLER = re.compile(r"\x1b\[\d+m"), re.compile(r"^\(RayTrainWorker pid=\d+\) ")
_NUM_STEPS = 600

DRAIN = """
import pathlib, subprocess, sys, threading, time
import ray, ray.train, torch
from ray.cluster_utils import Cluster
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
import holdfast


def train(config):
    w = torch.zeros(4)
    with holdfast.Checkpointer(config["run"], {"w": w}, save=holdfast.EverySteps(10_000)) as checkpointer:
        for step in checkpointer.steps(1500):
            time.sleep(0.01)
            w += 1
            checkpointer.step(step)
            if step == 0:
                pathlib.Path(config["run"] + ".begun").touch()
            SNIPPET


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
node = cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
ray.init(address=cluster.address)
ray_command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test", "--deadline-remaining-seconds", "60"]


def drain():
    while not pathlib.Path(sys.argv[1] + ".begun").exists():
        time.sleep(0.1)
    subprocess.run([*ray_command, "--node-id", node.node_id, *reason], check=True)


threading.Thread(target=drain, daemon=True).start()
TorchTrainer(train, train_loop_config={"run": sys.argv[1]}, scaling_config=ScalingConfig(num_workers=3)).fit()
ray.shutdown()
cluster.shutdown()
"""


def environment() -> dict[str, str]:
    return os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}


def printed_by(folder: Path, call: Call) -> list[str]:
    """Run the script in `folder`, and return the lines of its first worker, once each."""
    done = subprocess.run(
        [sys.executable, "train.py", *call.arguments],
        cwd=folder,
        check=True,
        timeout=200,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    lines = dict.fromkeys(_TELLER.sub("", _COLOUR.sub("", line)).strip() for line in done.stdout.splitlines())
    return [line for line in lines if "workers end" in line]


def test_the_example_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    script, calls = example(GUIDE)
    (tmp_path / "train.py").write_text(script)
    assert len({call.arguments[0] for call in calls}) == 2
    for call in calls:
        assert printed_by(tmp_path, call) == [_TELLER.sub("", line) for line in call.output]
    assert [item.step for item in holdfast.ls(str(tmp_path / "runs" / "ray"))] == [11, 10, 6, 5]


def test_workers_go_on_after_one_of_them_was_killed(tmp_path: Path) -> None:
    script, _ = example(GUIDE)
    begin = "    torch.manual_seed(0)\n"
    note = '    Path(config["run"] + f".pid{get_context().get_world_rank()}").write_text(str(os.getpid()))\n'
    slow = "            checkpointer.step(step)\n"
    assert begin in script
    assert slow in script
    script = script.replace(begin, begin + note).replace(slow, slow + "            time.sleep(0.02)\n")
    (tmp_path / "train.py").write_text("import os\nimport time\n" + script)
    run, pid_file = str(tmp_path / "runs" / "ray"), tmp_path / "runs" / "ray.pid1"
    pid_file.parent.mkdir()
    command = [sys.executable, "train.py", "3", str(_NUM_STEPS)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environment()) as job,
    ):
        await_step(run, 20)
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        assert job.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
    newest, *earlier = holdfast.ls(run)
    assert newest.step == _NUM_STEPS - 1
    epochs = {item.place.partition(".")[0] for item in (newest, *earlier)}
    assert epochs == {"1", "2"}, "Ray started the workers again once"
    view = holdfast.open(run)
    tree: Any = view.tree()
    # No step was left out or trained twice on the way to the last one.
    assert tree["data"]["position"] == _NUM_STEPS * 12
    steps = {float(view[name].numpy()) for name in view.names() if name.endswith("/step")}
    assert steps == {float(_NUM_STEPS)}


def test_all_workers_save_when_ray_drains_the_node_of_one(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    (snippet,) = re.findall(r"```py\n(.*?)\n```", GUIDE.read_text(), re.DOTALL)
    script = DRAIN.replace("SNIPPET", textwrap.indent(snippet, 12 * " ").strip())
    (tmp_path / "drain.py").write_text(script)
    command = [sys.executable, "drain.py", run]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=200, stdout=subprocess.DEVNULL, env=environment())
    last, *noticed = holdfast.ls(run)
    assert last.step == 1499
    assert noticed, "no worker heard of it"
    for item in noticed:
        assert item.step % 50 == 0
        tree: Any = holdfast.open(f"{run}@step={item.step}").tree()
        assert tree["w"].tolist() == [item.step + 1.0] * 4


def await_step(run: str, step: int) -> None:
    """Return when a step of the run that is not before `step` is in storage."""
    end_s = time.monotonic() + 200
    while time.monotonic() < end_s:
        if Path(run).is_dir() and any(item.step >= step for item in holdfast.ls(run)):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not saved")
