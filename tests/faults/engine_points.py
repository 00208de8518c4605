"""Named points of the save engine, and deeds that a process does at one: it kills processes, or pauses.

The points lie where slots change their state, where tensors are copied, where a generation gets its name, where blocks
are hashed, and where the engine calls storage (see `crash_points`). `TRAINER` and `KEEPER` list the points
of one save in the order in which trainers and their keeper pass them.

======================  ====================================================================================
``S.asked``, ``S``      a slot is about to go into state S, and has gone there
``copy``                a part of the state is copied
``generation.unnamed``  the generation's file is written, but has no name yet
``generation.named``    the generation's file has its name
``hash``                the first block of a slot is hashed
``data.half``           half of the bytes of one write to a data file are written
``data.write``          all bytes of that write are written
``data.header``         the header of the file is written too
``X.asked`` and so on   as in `crash_points`
``awaits S``            a trainer looks at a slot, and finds it in state S; this may be anywhere
``after P``             trainers have agreed in phase P of a save
``R.asked``, ``R``      a keeper is about to make the request R of a peer, and has its answer
``copy S`` and so on    as above, of a copy of another node's slot; ``parity S``: of a row of parity
======================  ====================================================================================

A `Deed` is done at a point once, by the first process that gets there after the test has armed it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal
from unittest.mock import patch

import torch

from holdfast.control.channel import Channel
from holdfast.format.container import ALIGNMENT
from holdfast.format.digests import DigestKind
from holdfast.io.digest import digest_blocks
from holdfast.keeper import persist
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotKind, SlotRecord
from holdfast.peers.peer_messages import PeerReply, PeerRequest
from holdfast.peers.tcp import TcpConnection
from holdfast.store.base import Bytes
from holdfast.store.posix import PosixWriter
from tests.faults import crash_points

Role = Literal["trainer", "keeper"]


def _record(kind: str) -> list[str]:
    return [f"{kind}.{moment}" for moment in ("asked", "written", "linked", "durable")]


#: The points that trainers pass in a save that fills a slot again.
TRAINER: Final = [
    "WRITING.asked",
    "WRITING",
    "copy",
    "generation.unnamed",
    "generation.named",
    "STAGED.asked",
    "STAGED",
]
#: The points that only the first rank of a node passes, or several ranks that get there at the same time.
BY_ONE: Final = {"generation.unnamed", "generation.named"}
#: The points that their keeper passes.
KEEPER: Final = [
    "hash",
    "SEALED.asked",
    "SEALED",
    *_record("manifest"),
    "data.opened",
    "data.half",
    "data.write",
    "data.header",
    *(f"data.{moment}" for moment in ("written", "linked", "durable")),
    *_record("seal"),
    *_record("commit"),
    "COMMITTED.asked",
    "COMMITTED",
]
#: The points that the keeper of a protected node passes besides, those of a peer that gets the copy, and the last ones
#: of the first node.
PROTECTING: Final = [
    *("OfferCopy.asked", "OfferCopy", "PutGeneration.asked", "PutGeneration", "PutRange.asked", "PutRange"),
    *("Finish.asked", "Finish", "NoteProtected.asked", "NoteProtected"),
]
COPYING: Final = [
    *("copy WRITING.asked", "copy WRITING", "copy STAGED.asked", "copy STAGED", "copy HELD.asked", "copy HELD"),
]
MARKING: Final = ["MarkProtected.asked", "MarkProtected"]


@dataclass(frozen=True)
class Deed:
    """A deed that a process of `role` (and of `rank`, if given) does when it gets to `point`. Trainers do it in save
    number `nth` since they were armed. The process kills all processes named in `kills`, itself last if it is one of
    them; or it `stalls`, that is, waits for a sign.

    Processes are called "rank-0", "rank-1", ..., and "keeper", or "keeper-0", "keeper-1", ... where each node has one;
    `rank` is the number of the keeper's node then.
    """

    role: Role
    point: str
    rank: int | None = None
    nth: int = 0
    kills: tuple[str, ...] = ()
    stalls: bool = False


class Log:
    """A folder in which the processes of a test log events, line by line, and find signs from the test, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tell(self, who: str, event: str, **more: object) -> None:
        """Log an event of a process, in one write: the line is whole even if the process dies."""
        line = json.dumps({"event": event, "at": round(time.time(), 3), **more}) + "\n"
        descriptor = os.open(self.folder / f"{who}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def told(self, who: str, event: str) -> list[dict[str, Any]]:
        """All events with that name that a process has logged, in order."""
        path = self.folder / f"{who}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    def let(self, sign: str) -> None:
        """Give a sign."""
        (self.folder / sign).touch()

    def may(self, sign: str) -> bool:
        """Whether a sign was given."""
        return (self.folder / sign).exists()

    def wait_for(self, sign: str) -> None:
        """Wait until a sign is given."""
        while not self.may(sign):
            time.sleep(0.005)

    def enter(self, who: str) -> None:
        """Record the pid of this process, which is called `who`."""
        new = self.folder / f"{who}.pid.new"
        new.write_text(str(os.getpid()))
        new.rename(self.folder / f"{who}.pid")

    def kill(self, who: str) -> None:
        """Kill `who`, and return when it is dead, unless it is this process."""
        pid = int((self.folder / f"{who}.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        while _is_alive(pid):
            time.sleep(0.001)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class _Points(crash_points.Trace):
    """Tells the points that this process passes, from when it is armed, and does what is to be done there."""

    def __init__(self, log: Log, who: str, deeds: Sequence[Deed]) -> None:
        self._here = threading.local()  # several objects may be made at the same time
        super().__init__()
        self._log = log
        self._who = who
        self._role: Role = "keeper" if who.startswith("keeper") else "trainer"
        self._deeds = [deed for deed in deeds if deed.role == self._role and deed.rank in (None, self._rank)]
        self._num_saves = 0

    @property
    def _object(self) -> str | None:
        return getattr(self._here, "object", None)

    @_object.setter
    def _object(self, kind: str | None) -> None:
        self._here.object = kind

    @property
    def _linked(self) -> bool:
        return getattr(self._here, "linked", False)

    @_linked.setter
    def _linked(self, is_linked: bool) -> None:
        self._here.linked = is_linked

    @property
    def _rank(self) -> int | None:
        number = self._who.partition("-")[2]
        return int(number) if number else None

    def reach(self, point: str) -> None:
        if not self._log.may(f"armed-{self._role}"):
            return
        point = "data.write" if point.startswith("data.write-") else point
        self._num_saves += point == "WRITING.asked"
        if not point.startswith(("awaits ", "after ")):
            self._log.tell(self._who, "passed", point=point)
        for deed in self._deeds:
            if deed.point == point and deed.nth < max(self._num_saves, 1) and self._is_first(deed):
                self._do(deed)

    def _is_first(self, deed: Deed) -> bool:
        try:
            os.close(os.open(self._log.folder / f"done-{deed.role}-{deed.rank}-{deed.point}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _do(self, deed: Deed) -> None:
        if deed.stalls:
            self._log.tell(self._who, "stalled", point=deed.point)
            self._log.wait_for(f"go-on-{deed.point}")
        for who in sorted(deed.kills, key=lambda who: who == self._who):
            self._log.kill(who)
        self._log.tell(self._who, "went on", point=deed.point)


@contextmanager
def traced(log: Log, who: str, deeds: Sequence[Deed]) -> Iterator[None]:
    """Within the block this process, called `who`, does its part of `deeds`."""
    points = _Points(log, who, deeds)
    with ExitStack() as stack:
        stack.enter_context(patch.object(Slot, "advance", _advance(points)))
        if who.startswith("keeper"):
            write_at = PosixWriter.write_at
            stack.enter_context(crash_points.traced(points))
            stack.enter_context(patch.object(persist, "digest_blocks", _digest_blocks(points)))
            stack.enter_context(patch.object(PosixWriter, "write_at", _write_at(points, write_at)))
            stack.enter_context(patch.object(TcpConnection, "ask", _request(points, TcpConnection.ask)))
            stack.enter_context(patch.object(TcpConnection, "get", _request(points, TcpConnection.get)))
            stack.enter_context(patch.object(TcpConnection, "put", _request(points, TcpConnection.put)))
        else:
            stack.enter_context(patch.object(Slot, "refresh", _refresh(points)))
            stack.enter_context(patch.object(Channel, "exchange", _exchange(points)))
            stack.enter_context(patch.object(NodeFolder, "rename", _rename(points)))
            stack.enter_context(patch.object(torch, "_foreach_copy_", _foreach_copy(points)))
        yield


def _digest_blocks(points: _Points) -> Callable[[Bytes, DigestKind], bytes]:
    def traced_blocks(data: Bytes, kind: DigestKind) -> bytes:
        def of(block: bytes | memoryview) -> bytes:
            found = kind.of(block)
            points.reach("hash")
            return found

        return digest_blocks(data, replace(kind, of=of))

    return traced_blocks


def _advance(points: _Points) -> Callable[[Slot, SlotRecord], None]:
    advance = Slot.advance

    def traced_advance(self: Slot, record: SlotRecord) -> None:
        kind = "" if self.kind is SlotKind.SNAPSHOT else f"{self.kind} "
        state = f"{kind}{record.state.name}"
        points.reach(f"{state}.asked")
        advance(self, record)
        points.reach(state)

    return traced_advance


def _request(points: _Points, untraced: Callable[..., PeerReply]) -> Callable[..., PeerReply]:
    def traced_request(self: TcpConnection, request: PeerRequest, *data: Any, **options: Any) -> PeerReply:
        kind = type(request).__name__
        points.reach(f"{kind}.asked")
        reply = untraced(self, request, *data, **options)
        points.reach(kind)
        return reply

    return traced_request


def _refresh(points: _Points) -> Callable[[Slot], SlotRecord]:
    refresh = Slot.refresh

    def traced_refresh(self: Slot) -> SlotRecord:
        record = refresh(self)
        points.reach(f"awaits {record.state.name}")
        return record

    return traced_refresh


def _exchange(points: _Points) -> Callable[..., Any]:
    exchange = Channel.exchange

    def traced_exchange(self: Channel, phase: str, *arguments: Any, **kinds: Any) -> Any:
        verdict = exchange(self, phase, *arguments, **kinds)
        points.reach(f"after {phase}")
        return verdict

    return traced_exchange


def _rename(points: _Points) -> Callable[[NodeFolder, str, str], None]:
    rename = NodeFolder.rename

    def traced_rename(self: NodeFolder, name: str, new: str) -> None:
        is_generation = new.startswith("generation-")
        if is_generation:
            points.reach("generation.unnamed")
        rename(self, name, new)
        if is_generation:
            points.reach("generation.named")

    return traced_rename


def _foreach_copy(points: _Points) -> Callable[..., None]:
    copy = torch._foreach_copy_

    def traced_copy(targets: list[torch.Tensor], sources: list[torch.Tensor], **options: Any) -> None:
        for target, source in zip(targets, sources, strict=True):
            halves = [slice(0, len(target) // 2), slice(len(target) // 2, None)] if target.ndim else [...]
            for half in halves:
                copy([target[half]], [source[half]], **options)
                if half is halves[0]:
                    points.reach("copy")

    return traced_copy


def _write_at(points: _Points, untraced: Callable[..., None]) -> Callable[[PosixWriter, int, Any], None]:
    write_at = PosixWriter.write_at

    def traced_write_at(self: PosixWriter, offset: int, data: Any) -> None:
        untraced(self, offset, data[: len(data) // 2 // ALIGNMENT * ALIGNMENT])
        points.reach("data.half")
        write_at(self, offset, data)

    return traced_write_at
