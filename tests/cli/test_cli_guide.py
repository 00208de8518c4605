"""The guides show what the commands print."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.project.test_guides import example, run_warm
from tests.support.command_line import holdfast_command

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
GUIDE = GUIDES / "command_line.md"

#: Patterns of text that is another in every run, and the text that stands for it.
VARIABLE = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-11-21 20:00:00"),
    (r"in \d+\.\d\d s\b", "in 0.10 s"),
    (r"\b(now|\d+ (s|min))( ago)?(?=\s|\)|$)", "1 min"),
    (r"step-(\d{10})-[0-9a-f]{16}", r"step-\1-00000000"),
    (r"in \d+\.\d s, [\d.]+ [KMG]iB/s", "in 0.1 s, 1.0 GiB/s"),
    (r"(?<![\w.])/\S*/(?=runs/|copy/|model;)", "/shared/"),
    (r" +", " "),
)


class Call(NamedTuple):
    """A command of the guide, and the lines that the guide says it prints."""

    command: str
    output: list[str]


def calls(guide: Path) -> list[Call]:
    blocks = re.findall(r"```text\n(.*?)```", guide.read_text(), re.DOTALL)
    found = [call.splitlines() for block in blocks for call in block.split("$ ")[1:]]
    return [Call(command, output) for command, *output in found]


def normalized(lines: list[str]) -> list[str]:
    text = "\n".join(lines)
    for pattern, stands_for in VARIABLE:
        text = re.sub(pattern, stands_for, text)
    return [line.strip() for line in text.splitlines()]


def trained(guide: Path, folder: Path) -> None:
    """Run the script of a guide in `folder` as the guide does."""
    script, trainings = example(guide)
    (folder / "train.py").write_text(script)
    for training in trainings:
        run_warm(folder, training)


@pytest.mark.parametrize("guide", [GUIDE, GUIDES / "single-process.md"], ids=lambda guide: guide.stem)
def test_the_screens_of_a_guide_are_what_the_commands_print(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(guide, tmp_path)
    for layout in re.findall(r"```toml\n(.*?)```", guide.read_text(), re.DOTALL):
        (tmp_path / "layout.toml").write_text(layout)
    monkeypatch.chdir(tmp_path)
    for call in calls(guide):
        name, *arguments = shlex.split(call.command)
        if name == "holdfast":
            assert normalized(holdfast_command(*arguments).lines) == normalized(call.output), call.command
        else:
            subprocess.run(["sh", "-c", call.command], check=True)


def test_the_guide_shows_every_command() -> None:
    shown = {shlex.split(call.command)[1] for call in calls(GUIDE) if call.command.startswith("holdfast")}
    commands = {"ls", "show", "verify", "diff", "plan", "advise", "rollback", "rm", "doctor", "request-save"}
    commands |= {"prune", "pin", "unpin", "release", "compact", "export", "gc"}
    assert shown == commands
