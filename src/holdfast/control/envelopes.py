"""The envelopes that ranks store under keys for each other: encoded messages, or the errors in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.control.processes import Process
from holdfast.decoding import decode_msgpack
from holdfast.errors import ErrorWire, HoldfastError, from_wire, to_wire

#: A message for other ranks, or the error that takes its place.
Outcome = bytes | Exception


class RankEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """One rank's contribution to a gather. The first one of an operation carries the rank's process."""

    phase: str
    label: str
    step: int | None
    payload: bytes
    error: ErrorWire | None
    process: Process | None = None

    def is_like(self, other: RankEnvelope) -> bool:
        """Whether this differs from `other` in payload and process alone, and has no error."""
        return self.error is None and (self.phase, self.label, self.step) == (other.phase, other.label, other.step)


class GroupEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """The contributions that the first rank of a group collected, in rank order, or the ranks that were `absent`.

    Most contributions differ in nothing but their payloads from `first`, which is that of the first rank; so `payloads`
    has those of the other ranks. `others` are the contributions that do differ, by their index."""

    first: RankEnvelope | None
    payloads: tuple[bytes, ...]
    others: dict[int, RankEnvelope]
    absent: tuple[int, ...]

    @staticmethod
    def of(ups: Sequence[RankEnvelope]) -> GroupEnvelope:
        """The contributions of all ranks of a group. Only that of the first rank keeps its process."""
        first = ups[0]
        others = {
            number: msgspec.structs.replace(up, process=None)
            for number, up in enumerate(ups)
            if number and not up.is_like(first)
        }
        return GroupEnvelope(first, tuple(up.payload for up in ups[1:]), others, ())

    @staticmethod
    def missing(ranks: Sequence[int]) -> GroupEnvelope:
        """The stand-in for the contribution of a group with absent `ranks`."""
        return GroupEnvelope(None, (), {}, tuple(ranks))

    def members(self) -> list[RankEnvelope]:
        """The contributions, in rank order."""
        if self.first is None:
            return []
        phase, label, step = self.first.phase, self.first.label, self.first.step
        every = [self.first, *(RankEnvelope(phase, label, step, payload, None) for payload in self.payloads)]
        for number, other in self.others.items():
            every[number] = other
        return every


class Broadcast(RankEnvelope, frozen=True, array_like=True):
    """A message of rank 0 to all ranks. The first one of an operation carries the process of rank 0, and the name of
    the `board` of each node. An error concerns the operation of `step`, which may be earlier than the operation that
    rank 0 is in."""

    board: str = ""


def encoded(message: object) -> bytes:
    """Encode a message as MessagePack; bytes stay as they are."""
    return message if isinstance(message, bytes) else msgspec.msgpack.encode(message)


def encoded_outcome(outcome: object) -> Outcome:
    """Encode a message as `encoded` does. Returns an error that is passed in its place, or that encoding raises."""
    try:
        return outcome if isinstance(outcome, Exception) else encoded(outcome)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for a message
        return error


def decoded(payload: bytes, kind: Any) -> Any:
    """Decode a message of type `kind` that `encoded` wrote."""
    return payload if kind is bytes else decode_msgpack(payload, kind)


def payload_of(down: Broadcast) -> bytes:
    """The payload of a broadcast; raises its error where it carries one."""
    if down.error is not None:
        raise from_wire(down.error)
    return down.payload


def error_wire(error: Exception) -> ErrorWire:
    """An error in the form in which it is sent; one outside the `HoldfastError` tree gets the code ``unexpected``."""
    if isinstance(error, HoldfastError):
        return to_wire(error)
    unexpected = HoldfastError(
        f"{type(error).__name__}: {error}.",
        code="unexpected",
        action="The log of the rank that failed has the traceback.",
    )
    return to_wire(unexpected)
