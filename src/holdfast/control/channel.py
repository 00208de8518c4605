"""Collective calls over a key-value store: gather to rank 0, broadcast from it, with deadlines and errors.

One `Channel` serves one operation (one save, one load). All ranks make the same calls in the same order. Every call
has a phase name, which all ranks must agree on and which messages use.

Keys of one channel, and who removes them:

``up/<g>/<rank>``    what a rank contributes to gather ``g``; removed by the first rank of its group, which collects it
``group/<g>/<rank>`` what a group's first rank collected; removed by rank 0
``down/<b>``         broadcast ``b``; removed by the last of its readers, who count themselves in ``down/<b>/read``

So an operation that succeeds, or fails with an error that a rank reported, leaves nothing behind, and no later call is
needed to clean up. One that ran into a deadline leaves its last messages, so that a late rank still finds the verdict.

Gathers and broadcasts are numbered apart: whatever rank 0 dies of between two calls, its error goes out as the next
broadcast, and that is the key on which every other rank waits next, whatever it contributes before.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from holdfast.errors import ConfigurationError, DeadlineError, ErrorWire, HoldfastError, from_wire, to_wire

#: Ranks per group; worlds that are larger gather in two levels.
GROUP_SIZE: Final = 64

#: torch's TCPStore drops the connection of a client that sends a value over 8 MiB.
_CHUNK_NBYTES: Final = 4 * 2**20
_NUM_CHUNKS: Final = struct.Struct(">I")

Clock = Callable[[], float]
Outcome = bytes | Exception
M = TypeVar("M", bound=msgspec.Struct)


class KeyValueStore(Protocol):
    """A store that all ranks share. Used by one thread at a time."""

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Block until all `keys` exist; False when `timeout_s` (positive) passed first."""

    def check(self, key: str) -> bool:
        """Whether `key` exists."""

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key` (0 at first), atomically, and return the new value."""

    def delete(self, key: str) -> None:
        """Remove `key`; a missing one is fine."""


class Deadline:
    """A point in time, `timeout_s` from now, by a monotonic clock."""

    def __init__(self, timeout_s: float, *, clock: Clock = time.monotonic) -> None:
        if not timeout_s > 0:
            raise ValueError(f"a timeout is positive, not {timeout_s}")
        self.timeout_s = timeout_s
        self._clock = clock
        self._end_s = clock() + timeout_s

    @property
    def for_storage_s(self) -> float:
        """Seconds that a store may take: nine tenths of all, so that the rank on which it hangs can tell the others."""
        return 0.9 * self.timeout_s

    def remaining_s(self, *, graces: int = 0) -> float:
        """Seconds that are left, at least 1 ms (stores take 0 for "for ever").

        Each grace adds a tenth of the timeout, but 1 to 30 s. Who waits for a rank that itself waits for others
        waits one grace longer, so that the rank nearest to the absent ones speaks first and names them.
        """
        return max(self._end_s + graces * min(max(0.1 * self.timeout_s, 1.0), 30.0) - self._clock(), 0.001)


class _Up(msgspec.Struct, frozen=True, array_like=True):
    """One rank's contribution to a gather."""

    what: str
    payload: bytes
    error: ErrorWire | None


class _Group(msgspec.Struct, frozen=True, array_like=True):
    """What the first rank of a group collected from its members, in rank order, and who was missing."""

    members: tuple[_Up, ...]
    absent: tuple[int, ...]


class _Down(msgspec.Struct, frozen=True, array_like=True):
    """A broadcast."""

    what: str
    payload: bytes
    error: ErrorWire | None


class Channel:
    """Small messages between the ranks of one operation. Rank 0 is the coordinator.

    `label` names the operation in messages ("save of step 700"). `store` may be None in a world of one.
    Calls block until their part is done or the deadline is over; payloads may be large (they are sent in chunks).
    """

    def __init__(
        self,
        store: KeyValueStore | None,
        *,
        rank: int,
        world_size: int,
        label: str,
        group_size: int = GROUP_SIZE,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        if store is None and world_size > 1:
            raise ValueError("a world of several ranks needs a store")
        self.rank = rank
        self.world_size = world_size
        self.label = label
        self._store = store
        self._group_size = group_size
        self._num_gathers = 0
        self._num_broadcasts = 0

    def gather(self, phase: str, payload: bytes, deadline: Deadline) -> list[bytes] | None:
        """Bring every rank's `payload` to rank 0, which gets them in rank order; the others get None at once.

        `DeadlineError` on rank 0 when ranks are missing. The others learn of that at their next `broadcast`.
        """
        ups = self._gather(phase, payload, deadline)
        return None if ups is None else [up.payload for up in ups]

    def broadcast(self, phase: str, outcome: Outcome | None, deadline: Deadline) -> bytes:
        """Bring rank 0's `outcome` to every rank (the others pass None). An error is raised on every rank.

        `DeadlineError` naming rank 0 on ranks that heard nothing from it in time.
        """
        if self.rank == 0:
            if outcome is None:
                raise ValueError("rank 0 broadcasts a payload or an error")
            self._send_down(phase, outcome)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        down = self._receive_down(phase, deadline)
        if down.error is not None:
            raise from_wire(down.error)
        return down.payload

    def exchange(
        self, phase: str, outcome: Outcome, answer: Callable[[list[bytes]], bytes], deadline: Deadline
    ) -> bytes:
        """Bring every rank's payload to rank 0, and rank 0's `answer` to them back to every rank.

        A rank that failed passes its error as `outcome`: then all ranks raise the error of the lowest rank that
        failed, with how many did. What `answer` raises is raised on all ranks too; it runs on rank 0 alone.
        """
        try:
            verdict = self._answer(phase, outcome, answer, deadline)
            return self.broadcast(phase, verdict, deadline)
        except HoldfastError as error:
            # The local traceback is worth more than the news that some rank failed.
            if isinstance(outcome, Exception) and error is not outcome:
                raise error from outcome
            raise

    def collect(self, phase: str, outcome: Outcome, deadline: Deadline) -> list[bytes] | None:
        """Bring every rank's payload to rank 0 (the others get None), once it is certain that no rank failed.

        Like `exchange` in how it fails: with the same error on every rank.
        """
        collected: list[bytes] = []

        def keep(payloads: list[bytes]) -> bytes:
            collected.extend(payloads)
            return b""

        self.exchange(phase, outcome, keep, deadline)
        return collected if self.rank == 0 else None

    def _answer(
        self, phase: str, outcome: Outcome, answer: Callable[[list[bytes]], bytes], deadline: Deadline
    ) -> Outcome | None:
        """What rank 0 is to broadcast; None on the other ranks."""
        ups = self._gather(phase, outcome, deadline)
        if ups is None:
            return None
        failed = [(rank, up.error) for rank, up in enumerate(ups) if up.error is not None]
        if failed:
            rank, wire = failed[0]
            where = f"rank {rank} failed in {self._what(phase)} ({len(failed)} of {self.world_size} ranks failed)"
            return from_wire(msgspec.structs.replace(wire, message=f"{where}: {wire.message}", rank=rank))
        try:
            return answer([up.payload for up in ups])
        except Exception as error:  # noqa: BLE001 - whatever it is, no rank may wait for an answer in vain
            return error

    def _gather(self, phase: str, outcome: Outcome, deadline: Deadline) -> list[_Up] | None:
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        up = _up(self._what(phase), outcome)
        leader = self.rank - self.rank % self._group_size
        if self.rank != leader:
            self._put(f"up/{number}/{self.rank}", up)
            return None
        if self.rank != 0:
            self._report_group(number, up, deadline)
            return None
        try:
            return self._collect_groups(number, self._collect_group(number, up, deadline), phase, deadline)
        except HoldfastError as error:
            self._send_down(phase, error)
            raise

    def _report_group(self, number: int, own: _Up, deadline: Deadline) -> None:
        """Send what the group of this rank, its first, contributes."""
        # While it waits for members, its own key shows rank 0 that it is there.
        here = f"up/{number}/{self.rank}"
        self._shared.set(here, b"")
        self._put(f"group/{number}/{self.rank}", self._collect_group(number, own, deadline))
        self._shared.delete(here)

    def _collect_group(self, number: int, own: _Up, deadline: Deadline) -> _Group:
        """The contributions of this rank's group, as far as they came in time."""
        members = self._members(self.rank)[1:]
        keys = [f"up/{number}/{member}" for member in members]
        absent = self._absent(members, keys, deadline.remaining_s())
        if absent:
            return _Group((), tuple(absent))
        return _Group((own, *(self._take(key, _Up) for key in keys)), ())

    def _collect_groups(self, number: int, own: _Group, phase: str, deadline: Deadline) -> list[_Up]:
        """All contributions, in rank order. On rank 0 only."""
        leaders = range(self._group_size, self.world_size, self._group_size)
        keys = [f"group/{number}/{leader}" for leader in leaders]
        missing = self._absent(leaders, keys, deadline.remaining_s(graces=1))
        arrived = [key for leader, key in zip(leaders, keys, strict=True) if leader not in missing]
        groups = [own, *(self._take(key, _Group) for key in arrived)]
        absent = {rank for group in groups for rank in group.absent}
        for leader in missing:
            # No word from a group: look who of it is there. Where all are, its first rank stopped half-way.
            members = self._members(leader)
            absent.update([m for m in members if not self._shared.check(f"up/{number}/{m}")] or [leader])
        if absent:
            raise self._late(sorted(absent), phase, deadline)
        ups = [up for group in groups for up in group.members]
        for rank, up in enumerate(ups):
            if up.what != own.members[0].what:
                raise _out_of_step(rank, up.what, own.members[0].what)
        return ups

    def _members(self, leader: int) -> range:
        return range(leader, min(leader + self._group_size, self.world_size))

    def _absent(self, ranks: Sequence[int], keys: Sequence[str], timeout_s: float) -> list[int]:
        """Those of `ranks` whose key did not appear in time."""
        if not keys or self._shared.wait(keys, timeout_s):
            return []
        return [rank for rank, key in zip(ranks, keys, strict=True) if not self._shared.check(key)]

    def _send_down(self, phase: str, outcome: Outcome) -> None:
        number, self._num_broadcasts = self._num_broadcasts, self._num_broadcasts + 1
        if self.world_size > 1:
            up = _up(self._what(phase), outcome)
            self._put(f"down/{number}", _Down(up.what, up.payload, up.error))

    def _receive_down(self, phase: str, deadline: Deadline) -> _Down:
        number, self._num_broadcasts = self._num_broadcasts, self._num_broadcasts + 1
        key, readers = f"down/{number}", f"down/{number}/read"
        if not self._shared.wait([key], deadline.remaining_s(graces=2)):
            raise self._late([0], phase, deadline)
        num_chunks, data = self._read(key)
        if self._shared.add(readers, 1) == self.world_size - 1:
            self._remove(key, num_chunks)
            self._shared.delete(readers)
        down = msgspec.msgpack.decode(data, type=_Down)
        if down.error is None and down.what != self._what(phase):
            raise _out_of_step(self.rank, self._what(phase), down.what)
        return down

    def _put(self, key: str, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        chunks = [data[start : start + _CHUNK_NBYTES] for start in range(0, len(data), _CHUNK_NBYTES)]
        # The key itself comes last: who sees it finds all chunks.
        for index, chunk in enumerate(chunks[1:], start=1):
            self._shared.set(f"{key}/{index}", chunk)
        self._shared.set(key, _NUM_CHUNKS.pack(len(chunks)) + chunks[0])

    def _read(self, key: str) -> tuple[int, bytes]:
        """The number of chunks and the data under a key that exists."""
        first = self._shared.get(key)
        (num_chunks,) = _NUM_CHUNKS.unpack_from(first)
        rest = (self._shared.get(f"{key}/{index}") for index in range(1, num_chunks))
        return num_chunks, b"".join((first[_NUM_CHUNKS.size :], *rest))

    def _take(self, key: str, kind: type[M]) -> M:
        """The message under a key that exists, which is removed."""
        num_chunks, data = self._read(key)
        self._remove(key, num_chunks)
        return msgspec.msgpack.decode(data, type=kind)

    def _remove(self, key: str, num_chunks: int) -> None:
        for name in (key, *(f"{key}/{index}" for index in range(1, num_chunks))):
            self._shared.delete(name)

    @property
    def _shared(self) -> KeyValueStore:
        assert self._store is not None, "a world of one sends no messages"
        return self._store

    def _what(self, phase: str) -> str:
        return f"'{phase}' of {self.label}"

    def _late(self, absent: list[int], phase: str, deadline: Deadline) -> DeadlineError:
        who = "rank" if len(absent) == 1 else "ranks"
        return DeadlineError(
            f"{who} {_ranges(absent)} did not reach {self._what(phase)} within {deadline.timeout_s:g} s.",
            code="timeout.ranks",
            action=f"Look at the log of {who} {_ranges(absent)}; where they are only slow, raise timeout_s.",
            rank=absent[0] if len(absent) == 1 else None,
            absent=tuple(absent),
        )


def _up(what: str, outcome: Outcome) -> _Up:
    if isinstance(outcome, bytes):
        return _Up(what, outcome, None)
    if isinstance(outcome, HoldfastError):
        return _Up(what, b"", to_wire(outcome))
    unexpected = HoldfastError(
        f"{type(outcome).__name__}: {outcome}.",
        code="unexpected",
        action="The log of the rank that failed has the traceback.",
    )
    return _Up(what, b"", to_wire(unexpected))


def _out_of_step(rank: int, what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"rank {rank} is in {what} while rank 0 is in {expected}.",
        code="config.call_order",
        action="Make the same holdfast calls in the same order, with the same step, on every rank.",
        rank=rank,
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Sorted `ranks` for a message, runs of three and more written ``64-127``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
