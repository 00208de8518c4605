"""The guide to events: its pieces of code run, and the commands print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import sys
from operator import methodcaller
from pathlib import Path
from typing import get_args

import pytest
import torch

import holdfast
from holdfast.observing import EventListener, JsonLines
from holdfast.telemetry.goodput_ledger import JobEnd, Part
from holdfast.telemetry.time_tables import ENDS
from tests.observing.heard import FAILED_SAVE, tell
from tests.support.command_line import holdfast_command

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "observability.md"
#: All of them run here.
SNIPPETS = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
Names = dict[str, object]


def snippet(part: str) -> str:
    (found,) = (each for each in SNIPPETS if part in each)
    return str(found)


def listener_of(names: Names) -> EventListener:
    listeners = names["listeners"]
    assert isinstance(listeners, list)
    (listener,) = listeners
    return listener  # type: ignore[no-any-return]  # a snippet made it


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with its events, as the script of the guide makes it."""
    monkeypatch.chdir(tmp_path)
    with holdfast.Checkpointer("runs/gpt", {"w": torch.ones(4)}, memory=None, listeners=[JsonLines()]) as checkpointer:
        checkpointer.save(19)


@pytest.mark.usefixtures("recorded")
def test_the_commands_print_what_the_guide_shows() -> None:
    screens = re.findall(r"```text\n\$ holdfast (.*?)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert [command.split()[0] for command, _ in screens] == ["report", "trace"]
    for command, output in screens:
        assert holdfast_command(*shlex.split(command)).lines == output.splitlines()


@pytest.mark.usefixtures("recorded")
def test_the_recorded_events_can_be_read_as_the_guide_does(capsys: pytest.CaptureFixture[str]) -> None:
    exec(snippet("pathlib"), {})
    rank, step, blocked_s = capsys.readouterr().out.split()
    assert (rank, step) == ("0", "19")
    assert float(blocked_s) > 0


@pytest.mark.usefixtures("recorded")
def test_the_ledger_can_be_read_as_the_guide_does(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    exec(snippet("GOODPUT"), {})
    share, *wastes = capfd.readouterr().out.split()
    assert 0 <= float(share) < 1
    assert wastes == ["None", "None"]


def test_the_guide_defines_every_part_of_the_ledger() -> None:
    assert re.findall(r"^\| `([A-Z_]+)` \|", GUIDE.read_text(), re.MULTILINE) == list(Part)


def test_the_listeners_for_metrics_are_made_as_the_guide_does(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry")
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for part in ("prometheus_client", "OpenTelemetryMetrics", "OpenTelemetryTraces", "TensorBoard"):
            names: Names = {"writer": writer}
            exec(snippet(part), names)
            tell(listener_of(names))
            if part == "prometheus_client":
                sample = methodcaller("get_sample_value", "holdfast_durable_step", {"rank": "0"})
                assert sample(names["registry"]) == 99


def test_a_listener_of_ones_own_hears_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    names: Names = {"holdfast": holdfast}
    exec(snippet("PageSomebody"), names)
    tell(listener_of(names), FAILED_SAVE)
    assert capsys.readouterr().out.startswith("step 199 of /runs/gpt is not saved: ")


def test_no_piece_of_code_is_left_out() -> None:
    assert len(SNIPPETS) == len(
        (
            *("pathlib", "GOODPUT", "prometheus_client", "OpenTelemetryMetrics", "OpenTelemetryTraces", "TensorBoard"),
            "PageSomebody",
        )
    )


def test_the_guide_explains_each_end_of_a_job_in_the_words_of_the_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| [^|]*\|$", GUIDE.read_text(), re.MULTILINE)
    ends = {end: words.split(";")[0] for end, words in rows if end in get_args(JobEnd)}
    assert ends == dict(ENDS)
