"""``holdfast node``: the snapshots in the memory of this node, and how to free them."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from holdfast.cli.screen import Listing, age, console, print_json, say
from holdfast.errors import printable
from holdfast.node_memory.inventory import LOG_NAME, FreedMemory, HeldSlot, RunMemory, give_way, name_of, node_memory
from holdfast.node_memory.keeper_lock import end_keeper
from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR, NodeFolder, not_a_folder
from holdfast.node_memory.slots import SlotKind
from holdfast.reports import size
from holdfast.run.by_path import open_run, parse_run
from holdfast.store.urls import absolute
from holdfast.wording import count

_UNKNOWN = "an unknown run (no keeper has started for it)"
_HOLDS: Final = {SlotKind.SNAPSHOT: "own snapshot", SlotKind.COPY: "copy for another node", SlotKind.PARITY: "parity"}


class SlotRow(msgspec.Struct, frozen=True):
    """A slot, as ``--json`` prints it.

    `kind` is "slot" for a snapshot of a rank of this node, "copy" for that of a rank of another node, and "parity" for
    a row of parity, whose number is `rank`. `is_protected` says whether the checkpoint survives the loss of nodes, as
    the policy of its job promises. `step` is null where the slot is empty; `state` is null where it is damaged or of
    another version. `owner` is "trainer" where a trainer of this rank lives, else "keeper" where a keeper runs, else
    "nobody". Where it `is_durable`, storage has all that is in it. Where it `is_freeable`, ``--free`` may remove it: it
    is durable, or it was given up (`fenced`) and never becomes durable.
    """

    rank: int
    step: int | None
    state: str | None
    nbytes: int
    age_s: float
    owner: str
    is_durable: bool
    is_freeable: bool
    kind: SlotKind
    is_protected: bool


class RunRow(msgspec.Struct, frozen=True):
    """The memory of one run on this node.

    `run` is null where no keeper has written down which run it is. `keeper_pid` is the keeper's process id in its own
    PID namespace, or null where no keeper runs.
    """

    run: str | None
    folder: str
    keeper_pid: int | None
    slots: list[SlotRow]


class FreedRow(msgspec.Struct, frozen=True):
    """The memory of one run that ``--free`` freed. `run` and `folder` are as in the rows of runs."""

    run: str | None
    folder: str
    nbytes: int


class NodeDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints: the memory after the command, and how many bytes it freed, of which runs.

    `ended` and `not_ended` are the folders of the keepers that were asked to end, and have or have not done so.
    """

    node_dir: str
    runs: list[RunRow]
    freed_nbytes: int
    ended: list[str]
    not_ended: list[str]
    freed: list[FreedRow]


def node(run: str, *, node_dir: str, free: bool, stop: bool, grace_s: float, as_json: bool) -> bool:
    """Print the snapshots that this user's runs have in the memory of this node; only those of `run`, unless empty.

    Before that, ends keepers with `stop`, and frees snapshots with `free`. Returns False where a keeper did not end.
    Raises `NotFoundError` where neither this node nor storage has a run at `run`.
    """
    where = Path(absolute(node_dir))
    try:
        os.scandir(where).close()
    except OSError as error:
        raise not_a_folder(where, error) from error
    uri = name_of(parse_run(run).location) if run else None
    if uri and not _of(uri, where):
        open_run(run)  # its memory may be empty, but the run itself must be there
    ended: list[RunMemory] = []
    not_ended: list[RunMemory] = []
    if stop:
        for found in _of(uri, where):
            if found.is_kept:
                with NodeFolder.at(found.path) as folder:
                    (ended if end_keeper(folder, timeout_s=grace_s) else not_ended).append(found)
    freed = give_way(where, run=uri) if free else []
    runs = [_row(found) for found in _of(uri, where)]
    if as_json:
        folders = [str(found.path) for found in ended], [str(found.path) for found in not_ended]
        rows = [FreedRow(each.run, str(each.path), each.nbytes) for each in freed]
        print_json(NodeDocument(str(where), runs, sum(each.nbytes for each in freed), *folders, rows))
        return not not_ended
    screen = console()
    _show_ends(screen, ended, not_ended)
    if free:
        _show_freed(screen, freed)
    if uri and not runs:
        say(screen, f"{printable(str(where))}: no snapshots of {printable(uri)}")
    else:
        _show(screen, where, runs, to_free=_freeing(run, node_dir))
    return not not_ended


def _freeing(run: str, node_dir: str) -> str:
    """The command that frees what this one has listed: of the same run, in the same folder."""
    names = (*([run] if run else []), *(["--node-dir", node_dir] if Path(node_dir) != DEFAULT_NODE_DIR else []))
    return printable(shlex.join(("holdfast", "node", *names, "--free")))


def _of(uri: str | None, node_dir: Path) -> list[RunMemory]:
    return [found for found in node_memory(node_dir) if uri in (None, found.run)]


def _row(found: RunMemory) -> RunRow:
    slots = [_slot(held, is_kept=found.is_kept) for held in found.slots]
    return RunRow(found.run, str(found.path), found.keeper_pid, slots)


def _slot(held: HeldSlot, *, is_kept: bool) -> SlotRow:
    owner = "trainer" if held.has_trainer else "keeper" if is_kept else "nobody"
    state = None if held.state is None else held.state.name.lower()
    age_s = max(time.time() - held.since, 0.0)
    return SlotRow(
        rank=held.rank,
        step=held.step,
        state=state,
        nbytes=held.nbytes,
        age_s=age_s,
        owner=owner,
        is_durable=held.is_durable,
        is_freeable=held.is_freeable,
        kind=held.kind,
        is_protected=held.is_protected,
    )


def _show_ends(screen: Console, ended: list[RunMemory], not_ended: list[RunMemory]) -> None:
    for found in ended:
        say(screen, f"{printable(found.run or _UNKNOWN)}: its keeper has ended")
    for found in not_ended:
        log = printable(str(found.path / LOG_NAME))
        say(screen, f"{printable(found.run or _UNKNOWN)}: its keeper has not ended yet; '{log}' says what it is doing")


def _show_freed(screen: Console, freed: Sequence[FreedMemory]) -> None:
    """Print what was freed of each run: most of these runs have no memory left, so that no later line names them."""
    for each in freed:
        say(screen, f"{printable(each.run or _UNKNOWN)}: freed {size(each.nbytes)}")
    if len(freed) != 1:
        say(screen, f"freed {size(sum(each.nbytes for each in freed))}")


def _show(screen: Console, node_dir: Path, runs: list[RunRow], *, to_free: str) -> None:
    slots = [slot for row in runs for slot in row.slots]
    total = f"{count(len(runs), 'run')}, {size(sum(slot.nbytes for slot in slots))}"
    say(screen, f"{printable(str(node_dir))}: {total}")
    for row in runs:
        kept = "no keeper" if row.keeper_pid is None else f"keeper {row.keeper_pid}"
        say(screen, f"\n{printable(row.run or _UNKNOWN)}: {kept}; {printable(row.folder)}")
        if row.slots:
            screen.print(_table(row.slots))
    idle = [slot for slot in slots if slot.is_freeable and slot.owner != "trainer"]
    if idle:
        what = "durable" if all(slot.is_durable for slot in idle) else "durable or given up"
        nbytes = size(sum(slot.nbytes for slot in idle))
        say(screen, f"\n{nbytes} are {what}, and their trainers have ended; {to_free} frees them")


def _table(slots: list[SlotRow]) -> Listing:
    """The slots of a run. Where other nodes have a part in it, it says for whom each slot is, and what is protected."""
    is_shared = any(slot.is_protected or slot.kind is not SlotKind.SNAPSHOT for slot in slots)
    names = ("rank", "step", "state", "size", "age", "owner", *(("protected", "holds") if is_shared else ()))
    made = Listing(*names, right=("rank", "step", "size", "age"))
    for slot in slots:
        step = "" if slot.step is None else str(slot.step)
        state = slot.state or "unreadable"
        rank = "" if slot.kind is SlotKind.PARITY else str(slot.rank)
        protected = "yes" if slot.is_protected else "no" if slot.step is not None else ""
        cells = (rank, step, state, size(slot.nbytes), age(slot.age_s), slot.owner, protected, _HOLDS[slot.kind])
        made.add_row(*cells[: len(names)])
    return made
