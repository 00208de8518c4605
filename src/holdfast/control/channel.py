"""Collective calls over a key-value store: gather to rank 0, broadcast from it, with deadlines and errors.

One `Channel` serves one operation (one save, one load). All ranks make the same calls in the same order. Every call
has a phase name, which all ranks must agree on and which messages use.

Keys of one channel, and the rank that removes each:

``up/<g>/<rank>``    a rank's contribution to gather ``g``, which rank 0 collects and removes; in a world of several
                     groups, the contributions of the group whose first rank this is, which that rank removes
``group/<g>/<rank>`` the contributions that a group's first rank collected; rank 0 removes them
``down/<b>``         broadcast ``b``; its readers count themselves in ``down/<b>/read``, and the last one removes both;
                     in a world of several groups, rank 0 does
``alarm``            set by a rank that has failed between two exchanges; rank 0 removes it after the next gather
``left``             set by a rank that stopped waiting for rank 0 and goes on to its next operation; never removed

So an operation that succeeds, or fails with an error that a rank reported, leaves no keys behind. (In a world of
several groups, rank 0 removes the last broadcast of an operation in its next one, unless it awaits the readers.) An
operation that ran into a deadline leaves its last messages, so that a late rank still finds rank 0's verdict.

Before its first message, each rank joins the attempt of the job that rank 0 is in (`holdfast.control.attempt`).

Each rank numbers its operations, and the number is part of their keys. A rank that skipped an operation would stay one
number behind for ever, and every later operation would run into its deadline. But the ranks that waited for it have
left a message under the number that it uses next: rank 0's verdict on the skipped operation or, where rank 0 itself
skipped it, the key ``left``. A rank that finds such a message goes on to the next number and meets the others there.
Where the others still wait in an operation of an earlier step, they fail at once, and the rank that is ahead waits for
them under the next number. A verdict on an operation with the same label may also be meant for a rank that is only
late. The late rank raises it, unless rank 0 tries the same operation again: then the rank joins rank 0 there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar, overload

import msgspec

from holdfast.control.broadcasts import Broadcasts, CountedBroadcasts, SharedBroadcasts, await_readers
from holdfast.control.channel_errors import (
    is_ahead,
    late,
    out_of_step,
    told_of,
    what,
    with_local_traceback,
)
from holdfast.control.channel_members import ChannelMembers
from holdfast.control.deadline import Deadline
from holdfast.control.envelopes import (
    Broadcast,
    GroupEnvelope,
    Outcome,
    RankEnvelope,
    decoded,
    encoded,
    encoded_outcome,
    error_wire,
    payload_of,
)
from holdfast.control.inboxes import GatherInbox, GroupInbox, KeyedInbox, without_key
from holdfast.control.key_value_store import KeyValueStore
from holdfast.control.mailbox import Mailbox, packed
from holdfast.control.meeting import Meeting
from holdfast.control.processes import Process
from holdfast.decoding import decode_msgpack
from holdfast.errors import DeadlineError, ErrorWire, HoldfastError, StorageError, from_wire

#: Ranks per group; worlds that are larger gather in two levels.
GROUP_SIZE: Final = 64

#: Wait in an operation's first gather after which a warning names the ranks that have not come.
_PATIENCE_S: Final = 30.0
#: Time within which ranks that try an operation again together all enter it.
_TOGETHER_S: Final = 0.5

#: The key of an alarm, and the interval of looks at it: longer in large jobs.
_ALARM: Final = "alarm"
_ALARM_LOOK_S: Final = 0.5
_MAX_LOOKS_PER_S: Final = 2000

_log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M")
R = TypeVar("R")


class _Awaited(NamedTuple):
    """The `ranks` that a rank waits for in a phase. `tell` stores an error in place of what one of them should have
    stored."""

    phase: str
    ranks: Collection[int]
    tell: Callable[[int, Exception], None]


class _OverError(Exception):
    """The keys under this rank's number belong to an earlier operation; `why` is the error found there. The rank has to
    go on to the next number. Never leaves this module."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Channel:
    """A channel for small messages between the ranks of one operation. Rank 0 is the coordinator.

    `label` names the operation in error texts ("save of step 700"); `step` orders it among others. `meeting` may be
    None in a world of one. A call blocks until this rank's part is done or the deadline has passed, even where the
    store hangs. Payloads may be large: they are sent in chunks. Where a rank of the same node was killed, the ranks
    that wait for it fail at once and name it. `members` has the words for ranks in messages.
    """

    def __init__(
        self,
        meeting: Meeting | None,
        *,
        rank: int,
        world_size: int,
        label: str,
        step: int | None = None,
        group_size: int = GROUP_SIZE,
        members: ChannelMembers | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        if meeting is None and world_size > 1:
            raise ValueError("a world of several ranks needs a store")
        self.rank = rank
        self.world_size = world_size
        self.label = label
        self.members = members or ChannelMembers()
        self._step = step
        self._meeting = meeting
        self._group_size = group_size
        self._has_groups = world_size > group_size
        self._num_gathers = 0
        self._num_broadcasts = 0
        #: Set by the thread that makes the requests, read by the thread that waits for it.
        self._awaited: _Awaited | None = None
        self._found_ended: set[int] = set()
        #: By gather and first rank: the inboxes of other groups in which this rank has told of ranks that are given up.
        self._told: dict[tuple[int, int], GatherInbox] = {}
        #: Whether another channel has announced this operation.
        self._is_second = False
        #: The message that made this rank go on to the next number; empty while it never had to.
        self._strayed_why = ""

    def in_background(self) -> Channel:
        """A second channel of the same operation between the same ranks, for another thread. Call it after all ranks
        have exchanged a message through this channel."""
        meeting = None if self._meeting is None else self._meeting.in_background()
        second = Channel(
            meeting,
            rank=self.rank,
            world_size=self.world_size,
            label=self.label,
            step=self._step,
            group_size=self._group_size,
            members=self.members,
        )
        second._is_second = True
        return second

    def leave(self) -> None:
        """Release the connection for other operations. Call it when the operation is over: the channel must not be used
        afterwards."""
        if self._meeting is not None:
            self._meeting.leave()

    def gather(self, phase: str, payload: bytes, deadline: Deadline) -> list[bytes] | None:
        """Send every rank's `payload` to rank 0, which gets them in rank order. The other ranks get None; only the
        first rank of a group waits, for its group.

        Raises `DeadlineError` on rank 0 when ranks are missing. The others hear of it in their next `broadcast`.
        """
        ups = self._ask(lambda: self._gather(phase, payload, deadline), deadline)
        return None if ups is None else [up.payload for up in ups]

    def broadcast(self, phase: str, outcome: Outcome | None, deadline: Deadline) -> bytes:
        """Send rank 0's `outcome` to every rank (the others pass None). Every rank returns the payload, or raises the
        error. Not for the first message of an operation: ranks join the attempt while rank 0 gathers.

        Raises `DeadlineError` naming rank 0 on ranks that rank 0 did not reach in time.
        """
        if self.rank != 0:
            return payload_of(self._ask(lambda: self._receive_down(phase, deadline), deadline))
        if outcome is None:
            raise ValueError("rank 0 broadcasts a payload or an error")
        self._ask(lambda: self._send_down(phase, outcome), deadline)
        if isinstance(outcome, Exception):
            self.await_readers(deadline)
            raise outcome
        return outcome

    @overload
    def exchange(
        self, phase: str, outcome: Outcome, answer: Callable[[list[bytes]], bytes], deadline: Deadline
    ) -> bytes: ...
    @overload
    def exchange(
        self,
        phase: str,
        outcome: M | Exception,
        answer: Callable[[list[M]], R],
        deadline: Deadline,
        *,
        takes: type[M],
        gives: type[R],
    ) -> R: ...
    @overload
    def exchange(
        self,
        phase: str,
        outcome: M | Exception,
        answer: Callable[[list[M]], R],
        deadline: Deadline,
        *,
        takes: type[M],
        gives: object,
    ) -> R: ...
    def exchange(
        self,
        phase: str,
        outcome: Any,
        answer: Callable[[list[Any]], Any],
        deadline: Deadline,
        *,
        takes: Any = bytes,
        gives: Any = bytes,
    ) -> Any:
        """Send every rank's message to rank 0, and rank 0's `answer` to them back to every rank. Messages have the type
        `takes`, and the answer has the type `gives`, which may be a union. Both travel as MessagePack, except that
        bytes travel unchanged.

        A rank that failed passes its error as `outcome`. Then all ranks raise the error of the lowest rank that failed,
        and the error says how many ranks failed. `answer` runs on rank 0 alone; if it raises, all ranks raise.
        """

        def answer_encoded(payloads: list[bytes]) -> bytes:
            return encoded(answer([decoded(payload, takes) for payload in payloads]))

        return decoded(self._exchange_bytes(phase, encoded_outcome(outcome), answer_encoded, deadline), gives)

    def _exchange_bytes(
        self, phase: str, outcome: Outcome, answer: Callable[[list[bytes]], bytes], deadline: Deadline
    ) -> bytes:
        try:
            while True:
                try:
                    return self._exchange(phase, outcome, answer, deadline)
                except _OverError as over:
                    self._catch_up(over.why)
        except HoldfastError as error:
            if isinstance(error, DeadlineError) and self._strayed_why:
                error.details = (*error.details, f"Earlier, the calls of the ranks did not match: {self._strayed_why}")
            if not isinstance(outcome, Exception) or error is outcome:
                raise
            told = with_local_traceback(error, outcome, rank=self.rank, is_alone=self.world_size == 1)
            raise told from told.__cause__

    def _exchange(
        self, phase: str, outcome: Outcome, answer: Callable[[list[bytes]], bytes], deadline: Deadline
    ) -> bytes:
        def gather_and_receive() -> Broadcast:
            self._gather(phase, outcome, deadline)
            return self._receive_down(phase, deadline)

        if self.rank != 0:
            return payload_of(self._ask(gather_and_receive, deadline))
        ups = self._ask(lambda: self._gather(phase, outcome, deadline), deadline)
        assert ups is not None
        if self.world_size > 1 and any(up.error is not None for up in ups):
            self._ask(lambda: self._shared.delete(_ALARM), deadline)
        return self.broadcast(phase, self._verdict(phase, ups, answer), deadline)

    def raise_alarm(self, deadline: Deadline) -> None:
        """Tell the other ranks that this one has failed, before they come to the next exchange, in which it passes its
        error. They see it in `is_alarmed`. Never raises `StorageError`: the exchange reports a store that is gone."""
        if self.world_size > 1:
            with suppress(StorageError):
                self._ask(lambda: self._shared.set(_ALARM, b""), deadline)

    def is_alarmed(self, deadline: Deadline) -> bool:
        """Whether some rank has failed since the last exchange. One small request; never raises `StorageError`."""
        if self.world_size > 1:
            with suppress(StorageError):
                return self._ask(lambda: self._shared.check(_ALARM), deadline)
        return False

    @property
    def look_s(self) -> float:
        """The interval at which a rank may look whether others have failed, so that one store serves all ranks."""
        return max(_ALARM_LOOK_S, self.world_size / _MAX_LOOKS_PER_S)

    def await_readers(self, deadline: Deadline) -> None:
        """On rank 0, return when all ranks have read the last broadcast, or after 2 s. Call it at the end of an
        operation: the process of rank 0 may serve the store, and end with this operation. Never raises `StorageError`:
        the operation is over, and the next one reports a store that does not answer.
        """
        if self.rank == 0 and self.world_size > 1:
            try:
                self._ask(lambda: await_readers(self._downs, self._num_broadcasts - 1), deadline)
            except (StorageError, DeadlineError) as error:
                _log.debug("%s: rank 0 does not know whether all ranks have read the result: %s", self.label, error)

    def _ask(self, call: Callable[[], T], deadline: Deadline) -> T:
        """Make the requests of `call`, and meanwhile check whether the ranks that it waits for have ended."""
        if self._meeting is None:
            return call()
        self._awaited = None
        try:
            # `call` keeps the deadline itself, with up to two graces. Only a request that hangs takes longer.
            return self._meeting.ask(call, deadline.remaining_s(graces=3), meanwhile=self._look_after)
        finally:
            self._awaited = None  # breaks a reference cycle, so that the channel is freed without the garbage collector

    def _look_after(self) -> None:
        """Store obituaries for ranks of this node that ended before they stored the keys that this rank waits for, and
        the errors of ranks that are given up."""
        awaited = self._awaited
        if awaited is None or self._meeting is None:
            return
        ended = {
            rank
            for rank in awaited.ranks
            if (process := self._meeting.processes.get(rank)) is not None and process.has_ended()
        }
        # Only at the second look: a message that a rank sent just before it ended may still be on its way.
        for rank in ended & self._found_ended:
            awaited.tell(rank, self.members.ended(rank))
        self._found_ended = ended
        for rank, error in tuple(self.members.given_up.items()):
            if rank in awaited.ranks:
                awaited.tell(rank, error)
            leader = self._leader_of(rank)
            if leader != self.rank and self._num_gathers > 0:
                # The first rank of its group waits for it, and may not know that it will not come.
                number = self._num_gathers - 1
                inbox = self._told.setdefault((number, leader), self._inbox(number, leader))
                inbox.stand_in(rank, self._up(awaited.phase, error, is_first=False), is_mine=False)

    def _catch_up(self, why: str) -> None:
        """Go on to the keys of the next operation, where this rank waits for the others."""
        self._strayed_why = why
        _log.warning("%s waits for the other ranks to make the same call: %s", self.label, why)
        self._meeting = self._met.next()
        self._told.clear()
        self._num_gathers = self._num_broadcasts = 0

    def confirm(self, phase: str, outcome: object, deadline: Deadline) -> None:
        """Return once all ranks have reported success. A rank that failed passes its error as `outcome`.

        Fails as `exchange` does: with the same error on every rank.
        """
        self.exchange(phase, outcome if isinstance(outcome, Exception) else b"", lambda _: b"", deadline)

    def _verdict(self, phase: str, ups: list[RankEnvelope], answer: Callable[[list[bytes]], bytes]) -> Outcome:
        """The outcome that rank 0 broadcasts: the answer to all contributions, or the first rank's error."""
        failed = [(rank, up.error) for rank, up in enumerate(ups) if up.error is not None]
        if failed:
            rank, wire = failed[0]
            who, number = self.members.names([rank]), f"{len(failed)} of {self.world_size} ranks failed"
            where = f"{who} failed in {self._what(phase)} ({number})"
            return from_wire(msgspec.structs.replace(wire, message=f"{where}: {wire.message}", rank=rank))
        try:
            return answer([up.payload for up in ups])
        except Exception as error:  # noqa: BLE001 - after any error, the other ranks must get an answer
            return error

    def _gather(self, phase: str, outcome: Outcome, deadline: Deadline) -> list[RankEnvelope] | None:
        self._join(phase, deadline)
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        up = self._up(phase, outcome, is_first=number == 0)
        if number == 0 and self.world_size > 1 and self._meeting is not None and not self._is_second:
            self._meeting.announce(self.rank, self.label)
        leader = self._leader_of(self.rank)
        if self.rank != leader:
            self._inbox(number, leader).put(self.rank, up)
            return None
        if self.rank != 0:
            self._report_group(number, up, deadline)
            return None
        try:
            ups = self._collect_groups(number, self._collect_group(number, up, deadline), phase, deadline)
        except HoldfastError as error:
            self._send_down(phase, error)
            raise
        if self.world_size > 1:
            self._met.note_all()
        self._compare(ups, phase, deadline, is_first=number == 0)
        return ups

    def _join(self, phase: str, deadline: Deadline) -> None:
        """Return when this rank has joined the attempt of rank 0."""
        if self.rank == 0:
            return
        self._awaited = _Awaited(phase, (0,), lambda _rank, _error: self._met.stop_joining())
        if not self._met.join(deadline.remaining_s(graces=2)):
            missed = late([0], self._what(phase), deadline.timeout_s, "", self.members)
            raise self.members.given_up.get(0, missed)
        self._awaited = None

    def _report_group(self, number: int, own: RankEnvelope, deadline: Deadline) -> None:
        """Collect and send the contributions of the group whose first rank is this one."""
        if self._members(self.rank)[1:]:
            # While this rank waits for its members, rank 0 sees that it has come.
            self._group_inbox(number, self.rank).announce(self.rank)
        self._mailbox.put(f"group/{number}/{self.rank}", self._collect_group(number, own, deadline))

    def _collect_group(self, number: int, own: RankEnvelope, deadline: Deadline) -> GroupEnvelope:
        """The contributions of this rank's group, or the ranks that did not contribute in time."""
        members = self._members(self.rank)[1:]
        if not members:
            return GroupEnvelope.of([own])
        inbox = self._inbox(number, self.rank)

        def tell(rank: int, error: Exception) -> None:
            inbox.stand_in(rank, self._up(own.phase, error, is_first=False), is_mine=True)

        self._awaited = _Awaited(own.phase, members, tell)
        absent = self._absent(
            lambda limit_s: inbox.await_all(members, limit_s), deadline.remaining_s(), is_first=number == 0
        )
        if absent:
            return GroupEnvelope.missing(absent)
        ups = [own, *inbox.take(members)]
        self._learn({rank: up.process for rank, up in enumerate(ups, self.rank)})
        return GroupEnvelope.of(ups)

    def _collect_groups(self, number: int, own: GroupEnvelope, phase: str, deadline: Deadline) -> list[RankEnvelope]:
        """The contributions of all ranks, in rank order. On rank 0 only."""
        groups = [own, *(self._reports(number, phase, deadline) if self._has_groups else ())]
        absent = {rank for group in groups for rank in group.absent}
        if absent:
            raise self._late(sorted(absent), phase, deadline)
        ups = [up for group in groups for up in group.members()]
        self._learn({rank: up.process for rank, up in enumerate(ups)})
        return ups

    def _reports(self, number: int, phase: str, deadline: Deadline) -> list[GroupEnvelope]:
        """The contributions, or the absent ranks, of each group but the first."""
        meeting = self._met
        leaders = range(self._group_size, self.world_size, self._group_size)
        keys = {leader: f"group/{number}/{leader}" for leader in leaders}

        def tell(leader: int, _: Exception) -> None:
            meeting.claim(keys[leader], packed(GroupEnvelope.missing([leader])))

        self._awaited = _Awaited(phase, leaders, tell)
        missing = self._absent(
            lambda limit_s: without_key(meeting, keys, limit_s), deadline.remaining_s(graces=1), is_first=number == 0
        )
        reports = self._mailbox.take_all([keys[leader] for leader in leaders if leader not in missing], GroupEnvelope)
        for leader in missing:
            # The group sent no message: its absent ranks have no record. Where none is absent, its first rank stopped
            # half-way, and is the absent one.
            here = self._group_inbox(number, leader).arrived()
            absent = [rank for rank in self._members(leader) if rank not in here]
            reports.append(GroupEnvelope.missing(absent or [leader]))
        return reports

    def _compare(self, ups: Sequence[RankEnvelope], phase: str, deadline: Deadline, *, is_first: bool) -> None:
        """Return if all ranks are in the same phase of the same operation as rank 0, which this rank is; else send all
        ranks the error and raise."""
        if is_first and self.world_size > 1 and self._shared.check("left"):
            missed = self._late([0], phase, deadline)
            self._send_down(phase, missed)  # for those that still wait here
            raise _OverError(missed.message)
        other = next((rank for rank, up in enumerate(ups) if (up.phase, up.label) != (phase, self.label)), None)
        if other is None:
            return
        up = ups[other]
        error = out_of_step(other, what(up.phase, up.label), self._what(phase), self.members)
        steps = [up.step for up in ups if up.step is not None]
        behind = min(steps) if is_first and len(steps) == len(ups) else self._step
        self._send_down(phase, error, step=behind)
        raise _OverError(error.message) if is_ahead(self._step, behind) else error

    def _members(self, leader: int) -> range:
        return range(leader, min(leader + self._group_size, self.world_size))

    def _leader_of(self, rank: int) -> int:
        return rank - rank % self._group_size

    def _inbox(self, number: int, leader: int) -> GatherInbox:
        """The inbox of the group whose first rank is `leader`, for gather `number`."""
        if self._has_groups:
            return self._group_inbox(number, leader)
        return KeyedInbox(self._met, f"up/{number}")

    def _group_inbox(self, number: int, leader: int) -> GroupInbox:
        num_groups = -(-self.world_size // self._group_size)
        return GroupInbox(self._met, f"up/{number}/{leader}", num_groups=num_groups)

    @property
    def _downs(self) -> Broadcasts:
        kind = SharedBroadcasts if self._has_groups else CountedBroadcasts
        return kind(self._met, num_readers=self.world_size - 1)

    def _absent(self, awaited: Callable[[float], list[int]], timeout_s: float, *, is_first: bool) -> list[int]:
        """The ranks that have not come in time, as `awaited` finds them, which waits so many seconds for them. In the
        first exchange a rank may have made no call at all, so this warns early which ranks are awaited."""
        early_s = min(timeout_s, _PATIENCE_S) if is_first else timeout_s
        absent = self._met.await_ranks(awaited, early_s) if self.rank == 0 else awaited(early_s)
        if early_s == timeout_s or not absent:
            return absent
        who = self.members.names(absent)
        _log.warning("%s has waited for %s for %.0f s: every rank must make this call", self.label, who, early_s)
        return self._absent(awaited, timeout_s - early_s, is_first=False)

    def _send_down(self, phase: str, outcome: Outcome, *, step: int | None = None) -> None:
        """Broadcast `outcome`; an error concerns the operation of `step` (default: of this channel)."""
        number, self._num_broadcasts = self._num_broadcasts, self._num_broadcasts + 1
        if self.world_size == 1:
            return
        up = self._up(phase, outcome, is_first=number == 0)
        board = self._met.board.name if number == 0 and self._has_groups else ""
        down = Broadcast(up.phase, up.label, up.step, up.payload, up.error, up.process, board)
        self._downs.send(number, down if step is None else msgspec.structs.replace(down, step=step))

    def _receive_down(self, phase: str, deadline: Deadline) -> Broadcast:
        self._join(phase, deadline)
        number, self._num_broadcasts = self._num_broadcasts, self._num_broadcasts + 1
        meeting, downs = self._met, self._downs

        def tell(_: int, error: Exception) -> None:
            meeting.claim(f"down/{number}", packed(Broadcast(phase, self.label, self._step, b"", error_wire(error))))

        self._awaited = _Awaited(phase, (0,), tell)
        data = downs.read(number, deadline.remaining_s(graces=2))
        if data is None:
            missed = self._late([0], phase, deadline)
            self._shared.set("left", b"")
            raise missed
        down = decode_msgpack(data, Broadcast)
        if down.process is not None:
            meeting.processes[0] = down.process
        if down.board:
            meeting.board.join(down.board)
        if number == 0 and down.error is not None and self._is_past(down, down.error):
            raise _OverError(down.error.message)
        if down.error is None and (down.phase, down.label) != (phase, self.label):
            raise out_of_step(self.rank, self._what(phase), what(down.phase, down.label), self.members)
        return down

    def _is_past(self, down: Broadcast, error: ErrorWire) -> bool:
        """Whether the first error that this rank receives concerns an operation that it skipped."""
        if self._step is not None and down.step is not None and self._step != down.step:
            return self._step > down.step
        if not isinstance(from_wire(error), DeadlineError):
            return False
        return down.label != self.label or (self.rank in error.absent and self._tries_rank_0_again())

    def _tries_rank_0_again(self) -> bool:
        """Whether rank 0 has entered the same operation again, or does so within `_TOGETHER_S`: ranks try again
        together."""
        end_s = time.monotonic() + _TOGETHER_S
        while not self._met.has_come_again(0, self.label):
            if time.monotonic() > end_s:
                return False
            time.sleep(_TOGETHER_S / 20)
        return True

    def _learn(self, processes: dict[int, Process | None]) -> None:
        """Remember the process of each rank that reported one."""
        if self._meeting is not None:
            self._meeting.processes.update({rank: process for rank, process in processes.items() if process})

    @property
    def _met(self) -> Meeting:
        assert self._meeting is not None, "a world of one sends no messages"
        return self._meeting

    @property
    def _shared(self) -> KeyValueStore:
        return self._met.store

    @property
    def _mailbox(self) -> Mailbox:
        return Mailbox(self._shared)

    def _up(self, phase: str, outcome: Outcome, *, is_first: bool) -> RankEnvelope:
        payload, error = (outcome, None) if isinstance(outcome, bytes) else (b"", error_wire(outcome))
        return RankEnvelope(phase, self.label, self._step, payload, error, Process.current() if is_first else None)

    def _what(self, phase: str) -> str:
        return what(phase, self.label)

    def _late(self, absent: list[int], phase: str, deadline: Deadline) -> DeadlineError:
        strayed = told_of(absent, self._met.whereabouts, self.members, label=self.label)
        return late(absent, self._what(phase), deadline.timeout_s, strayed, self.members)
