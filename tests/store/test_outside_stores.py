"""Stores of other packages: registered by their scheme, opened with options, known to the keeper's process too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import ConfigurationError
from holdfast.run.paths import parse
from holdfast.store import urls
from holdfast.store.posix import PosixStore

#: A package of somebody else's: what begins with box:// lies below the folder that is given as an option.
PACKAGE = """
from pathlib import Path
from holdfast.store.posix import PosixStore

class BoxStore(PosixStore):
    def __init__(self, location):
        super().__init__(str(Path(dict(location.options)["inside"], location.url.removeprefix("box://"))))
        self.location = location
"""

JOB = """
import sys, torch, holdfast
inside, node_dir = sys.argv[1:]
run = holdfast.Location("box://runs/a", (("inside", inside),))
state = {"w": torch.arange(4.0)}
with holdfast.Checkpointer(run, state, memory=holdfast.Memory(node_dir=node_dir)) as checkpointer:
    checkpointer.save(1)
state["w"].zero_()
at_one = holdfast.Location("box://runs/a@step=1", run.options)
assert holdfast.load(at_one, state).step == 1 and state["w"].tolist() == [0, 1, 2, 3]
print(holdfast.open(run).step)
"""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> holdfast.Location:
    monkeypatch.setattr(urls, "_openers", {})
    urls.register_store("box", lambda location: PosixStore(str(tmp_path / location.url.removeprefix("box://"))))
    return holdfast.Location("box://runs/a")


def test_a_store_from_outside_is_opened_by_its_scheme(tmp_path: Path, box: holdfast.Location) -> None:
    state = {"w": torch.arange(4.0)}
    holdfast.save("box://runs/a/", state, 1)
    state["w"].zero_()
    assert holdfast.load("box://runs/a@step=1", state).step == 1
    assert state["w"].tolist() == [0, 1, 2, 3]
    assert (tmp_path / "runs/a/holdfast.json").is_file()
    assert parse("box://runs/a@step=1") == parse(holdfast.Location("box://runs/a@step=1"))


def test_a_scheme_has_one_store(box: holdfast.Location) -> None:
    for scheme in ("box", "BOX", "file"):
        with pytest.raises(ValueError, match="another store already opens"):
            urls.register_store(scheme, lambda location: PosixStore(location.url))


def test_a_scheme_that_no_store_has_is_refused(box: holdfast.Location) -> None:
    with pytest.raises(ConfigurationError) as caught:
        holdfast.open("crate://runs/a")
    assert caught.value.code == "config.scheme"


def test_the_keeper_opens_a_store_of_an_installed_package_with_the_trainers_options(tmp_path: Path) -> None:
    packages, node_dir = tmp_path / "packages", tmp_path / "node"
    node_dir.mkdir()
    info = packages / "box_store-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "box_store.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: box-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[holdfast.stores]\nbox = box_store:BoxStore\n")
    known = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), *sys.path])}
    command = [sys.executable, "-c", JOB, str(tmp_path / "inside"), str(node_dir)]
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert (tmp_path / "inside/runs/a/holdfast.json").is_file()
