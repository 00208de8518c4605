"""``holdfast doctor``: the findings in a run, what they mean, and the repair of those that can be repaired."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

import msgspec
from rich.padding import Padding
from rich.text import Text

from holdfast.cli.runs import RunHead
from holdfast.cli.screen import confirmed, console, counting, explain, print_json, say
from holdfast.errors import ConfigurationError, CorruptError, HoldfastError, printable
from holdfast.run import diagnosis as core
from holdfast.run.by_path import open_run, parse_run
from holdfast.run.diagnosis import Finding
from holdfast.run.history import Run
from holdfast.run.lost_marker import unmarked_run
from holdfast.store.urls import open_store
from holdfast.wording import count

_STYLES = {"finish": "bold green", "remove": "bold yellow", "wait": "bold yellow", "by hand": "bold red"}


class DoctorDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints: all findings, the paths of the repaired ones, and the findings left."""

    run: str
    head_before: RunHead
    head: RunHead
    findings: list[Finding]
    finished: list[str]
    removed: list[str]
    left: list[Finding]


def doctor(run: str, *, deep: bool, finish: bool, remove: bool, force: bool, yes: bool, as_json: bool) -> bool:
    """Print the findings in a run, and repair those that the options ask for. Returns True where none is left."""
    if force and not remove:
        raise ConfigurationError(
            "--force works only with --remove.", code="config.option", action="Add --remove, or leave --force out."
        )
    found = _opened(run)
    head_before = RunHead.of(found)
    findings = core.examine(found, deep=deep, watch=lambda place, n: counting(f"verifying {place}", n, quiet=as_json))
    if not as_json:
        _show(found.storage.location.url, head_before, findings, deep=deep)
    finished: list[Finding] = []
    if finish:
        complete = [finding for finding in findings if finding.remedy == "finish"]
        finished = _each(complete, lambda finding: core.repair(found, finding), "finished", as_json=as_json)
    removed: list[Finding] = []
    if remove:
        removable = ("remove", "wait") if force else ("remove",)
        doomed = [finding for finding in findings if _label(finding) in removable]
        if doomed and confirmed(f"Delete {count(len(doomed), 'thing')}? This cannot be undone.", yes=yes):
            removed = _each(
                doomed, lambda finding: core.remove(found, finding, force=force), "removed", as_json=as_json
            )
        elif not doomed and not as_json and any(_label(finding) == "wait" for finding in findings):
            say(console(), "\nremoved nothing: a save may still be in progress, and the findings say for how long")
    left = [finding for finding in findings if finding not in finished and finding not in removed]
    head = RunHead.of(found)
    if as_json:
        root = found.storage.location.url
        print_json(DoctorDocument(root, head_before, head, findings, _paths(finished), _paths(removed), left))
    else:
        _conclude(run, head_before, head, left)
        if remark := found.storage.capabilities.unlisted_remains:
            say(console(), f"\n{remark}")
    return not left


def _opened(path: str) -> Run:
    """The run at `path`, even if its marker is lost or damaged."""
    try:
        return open_run(path)
    except CorruptError:
        return unmarked_run(open_store(parse_run(path).location))


def _paths(findings: list[Finding]) -> list[str]:
    return [finding.path for finding in findings]


def _each(findings: list[Finding], repair: Callable[[Finding], object], done: str, *, as_json: bool) -> list[Finding]:
    """Repair `findings`, and return those that could be repaired. Prints the error of each other one."""
    repaired: list[Finding] = []
    for finding in findings:
        try:
            with counting("repairing", None, quiet=as_json):
                repair(finding)
        except HoldfastError as error:
            explain(error)
            continue
        if not as_json:
            words = "" if repaired else "\n", (f"{done} ", "bold green"), printable(finding.path)
            say(console(), Text.assemble(*words))
        repaired.append(finding)
    return repaired


def _show(run: str, head: RunHead, findings: list[Finding], *, deep: bool) -> None:
    screen = console()
    nothing = "nothing is wrong" if deep else "nothing is wrong in records, names and sizes (--deep reads the data)"
    verdict = count(len(findings), "finding") if findings else nothing
    say(screen, f"{printable(run)}: {verdict}; the head is {head}")
    for finding in findings:
        label = _label(finding)
        screen.print(Text.assemble("\n", (label, _STYLES[label]), (f"  {finding.code}", "dim")))
        screen.print(Padding(printable(finding.text), (0, 0, 0, 2), expand=False))


def _label(finding: Finding) -> str:
    """The remedy of a finding, in a word or two."""
    if finding.remedy != "none":
        return finding.remedy
    return "wait" if finding.code.endswith(".in_progress") else "by hand"


def _conclude(run: str, head_before: RunHead, head: RunHead, left: list[Finding]) -> None:
    """Print whether the head changed, and the commands for the findings left."""
    screen = console()
    if head != head_before:
        say(screen, f"\nthe head was {head_before} and is {head}")
    hints = [*_hints(run, {_label(finding) for finding in left})]
    width = max((len(command) for command, _ in hints), default=0)
    for number, (command, what) in enumerate(hints):
        if not number:
            screen.print()
        line = f"  {command:{width}}  {what}"
        if screen.is_terminal and len(line) > screen.width:  # a command is copied whole, so it has a line of its own
            screen.print(f"  {command}", soft_wrap=True)
            line = f"    {what}"
        say(screen, line)


def _hints(run: str, labels: set[str]) -> Iterator[tuple[str, str]]:
    """Commands for the findings left, each with its effect."""
    command = f"holdfast doctor {printable(shlex.quote(run))}"
    if "finish" in labels:
        yield f"{command} --finish", "commits complete checkpoints"
    if "remove" in labels:
        yield f"{command} --remove", "deletes leftovers that cannot be finished; asks first"
    if "wait" in labels:
        yield f"{command} --remove --force", "also deletes saves that may be in progress"
