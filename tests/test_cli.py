"""The `holdfast` command as people run it: a process of its own, its output and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.format.records import Place
from holdfast.format.values import Node, Open
from holdfast.plan.layout import TensorLayout, Whole
from holdfast.plan.save import Identity
from tests.published import EPOCHS, RUN_ID, begin, plan, publish, put

ENVIRONMENT = {"COLUMNS": "100", "PATH": "/usr/bin:/bin"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints: steps 1 to 3."""
    path = tmp_path_factory.mktemp("runs") / "gpt"
    for step in (1, 2, 3):
        holdfast.save(path, {"w": torch.arange(step * 1000.0), "epoch": step}, step, metrics={"loss": 1 / step})
    return path


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def copy_of(run: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(run), str(copy)], check=True)
    return copy


def test_ls_shows_the_lineage_newest_first(run: Path) -> None:
    done = command("ls", str(run))
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert [line.split()[:3] for line in lines[2:3]] == [["head", "1.3", "3"]]
    assert [line.split()[:2] for line in lines[3:5]] == [["1.2", "2"], ["1.1", "1"]]
    assert "loss=0.3333" in lines[2]


def test_ls_as_json_is_one_document(run: Path) -> None:
    rows = json.loads(command("ls", "--json", str(run)).stdout)
    assert [(row["place"], row["step"], row["head"]) for row in rows] == [
        ("1.3", 3, True),
        ("1.2", 2, False),
        ("1.1", 1, False),
    ]


def test_ls_shows_which_tensors_diverged(tmp_path: Path) -> None:
    storage = begin(RUN_ID, *EPOCHS[:1])
    names = ["model/[bias]", "model/scale", "model/weight"]
    layouts = [TensorLayout(name, "uint8", (2,), Whole("compare")) for name in names]
    nodes: dict[str, Node] = {"": Open("dict"), "model": Open("dict")}
    for seq, diverged in enumerate(([], names[:1], names), start=1):
        identity = Identity(f"{seq:016x}", RUN_ID, Place(1, seq), seq, 1.5, {})
        publish(
            storage, plan([layouts], nodes, identity, diverged), dict.fromkeys(names, np.zeros((2, 1), np.uint8)), nodes
        )
    run = str(put(storage.objects, tmp_path / "run"))
    lines = command("ls", run).stdout.splitlines()
    assert lines[1].split()[-1] == "diverged"
    assert lines[2].rstrip().endswith("model/[bias] and 2 more")
    assert lines[3].rstrip().endswith("model/[bias]")
    assert "model" not in lines[4]
    rows = json.loads(command("ls", "--json", run).stdout)
    assert [row["diverged"] for row in rows] == [
        {"num_tensors": 3, "names": names},
        {"num_tensors": 1, "names": names[:1]},
        {"num_tensors": 0, "names": []},
    ]


@pytest.mark.parametrize("suffix", ["", "@step=2", "@1.1"])
def test_verify_finds_a_sound_checkpoint_sound(run: Path, suffix: str) -> None:
    done = command("verify", f"{run}{suffix}")
    assert done.returncode == 0
    assert done.stdout.startswith("sound")


@pytest.mark.parametrize("name", ["data-00000.safetensors", "manifest.hfm", "seal.json"])
def test_verify_names_the_damaged_file_and_exits_with_1(run: Path, tmp_path: Path, name: str) -> None:
    copy = copy_of(run, tmp_path)
    (folder,) = (copy / "checkpoints").glob("step-0000000003-*")
    damage(folder / name)
    done = command("verify", str(copy))
    assert done.returncode == 1
    assert name in done.stdout
    assert "damaged" in done.stdout
    assert command("verify", f"{copy}@step=2").returncode == 0


def test_verify_compares_headers_byte_for_byte(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    (file,) = (copy / "checkpoints").glob("step-0000000003-*/data-00000.safetensors")
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))
    done = command("verify", "--json", str(copy))
    assert done.returncode == 1
    assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["corrupt.header"]


def test_verify_reports_a_missing_data_file(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    (file,) = (copy / "checkpoints").glob("step-0000000003-*/data-00000.safetensors")
    file.unlink()
    done = command("verify", str(copy))
    assert done.returncode == 1
    assert "data-00000.safetensors" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["ls", "no-such-run"], 3, "no such folder"),
        (["verify", "{run}@step=99"], 3, "Choose one of its steps: 3, 2, 1."),
        (["verify", "{run}@step=x"], 2, "RUN@step=700"),
        (["ls", "s3://bucket/run"], 2, "object stores are not supported yet"),
        (["lss"], 2, "No such command"),
    ],
)
def test_mistakes_say_what_to_do(run: Path, arguments: list[str], status: int, said: str) -> None:
    done = command(*(argument.format(run=run) for argument in arguments))
    assert done.returncode == status
    assert said in done.stderr


def test_the_command_line_never_imports_torch(run: Path) -> None:
    code = (
        "import sys; sys.argv = ['holdfast', 'verify', sys.argv[1]]\n"
        "from holdfast.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
