"""The packages that users install: sdist and wheel build, and the wheel works in an otherwise empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

USE = """
import sys
import torch
import holdfast

run, version = sys.argv[1:]
assert holdfast.__version__ == version
weights = torch.arange(1000.0)
holdfast.save(run, {"w": weights}, 7)
into = {"w": torch.zeros(1000)}
assert holdfast.load(run, into).next_step == 8
assert torch.equal(into["w"], weights)
with holdfast.Checkpointer(run, into) as checkpointer:
    checkpointer.restore()
    checkpointer.save(8)
print("used")
"""


def environment(folder: Path) -> Path:
    """An empty virtual environment; its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(*command: object, cwd: Path) -> str:
    """Run a command away from this checkout; what it prints."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built of what git tracks."""
    folder = tmp_path_factory.mktemp("package")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    python = environment(folder / "builder")
    run(python, "-m", "pip", "install", "-q", "hatchling", cwd=folder)
    run(python, "-m", "hatchling", "build", "-d", folder / "dist", cwd=folder / "tree")
    return folder / "dist"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_works_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = environment(tmp_path / "user")
    torch = re.findall(r"^torch==.*$", (ROOT / "constraints" / "core.txt").read_text(), re.MULTILINE)
    run(python, "-m", "pip", "install", "-q", *torch, cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints" / "core.txt", wheel, cwd=tmp_path)
    assert PROJECT["version"] in run(python.with_name("holdfast"), "--version", cwd=tmp_path)
    assert run(python, "-c", USE, tmp_path / "run", PROJECT["version"], cwd=tmp_path).endswith("used\n")
    assert "8" in run(python.with_name("holdfast"), "ls", tmp_path / "run", cwd=tmp_path)
    run(python.with_name("holdfast"), "node", tmp_path / "run", "--stop", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sdist_has_all_of_the_package_and_its_tests_and_the_wheel_the_package_alone(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        in_wheel = {name for name in file.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as tar:
        in_sdist = {name.partition("/")[2] for name in tar.getnames()}
    assert {f"src/{name}" for name in in_wheel} <= in_sdist
    assert all(name.startswith("holdfast/") for name in in_wheel)
    assert "holdfast/py.typed" in in_wheel
    assert {"tests/project/test_package.py", "docs/SPEC.md", "README.md", "LICENSE", "pyproject.toml"} <= in_sdist


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_metadata_is_complete(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        found = message_from_bytes(file.read(name))
    for field in ("Summary", "License-Expression", "License-File", "Requires-Python", "Author", "Keywords"):
        assert found[field], field
    assert found["Version"] == PROJECT["version"]
    assert str(found.get_payload()).startswith("# Holdfast")


def test_the_version_stands_in_one_place() -> None:
    places = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "Makefile", *(ROOT / "src").rglob("*.py")]
    places += [*(ROOT / "tools").rglob("*"), *(ROOT / "docs" / "guides").glob("*.md")]
    stated = [path.name for path in places if path.is_file() and PROJECT["version"] in path.read_text()]
    assert stated == ["pyproject.toml"]
